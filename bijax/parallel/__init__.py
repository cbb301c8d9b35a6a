"""Computing on several devices with the bits of one order."""

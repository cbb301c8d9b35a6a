"""Building blocks of portable programs and CPU programs."""

"""Row gathers."""

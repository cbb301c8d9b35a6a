"""Exceptions of the kernels."""


class UnsupportedError(NotImplementedError):
    """A backend cannot honour a contract for these operands; there is no fallback."""

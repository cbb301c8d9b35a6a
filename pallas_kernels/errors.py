"""Exceptions of the kernels."""


class UnsupportedError(NotImplementedError):
    """A backend cannot honour a contract for these operands; nothing else is tried in its place."""

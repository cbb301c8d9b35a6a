"""The exception of the demo."""


class DemoError(Exception):
    """The demo cannot run with these options, or its measurement would prove nothing.

    The message says what was expected, what was found and what to do; the command line shows it without a traceback.

    Example:
        >>> raise DemoError("--tokens must be at least 1, got 0")
        Traceback (most recent call last):
        bijax.demo.errors.DemoError: --tokens must be at least 1, got 0
    """

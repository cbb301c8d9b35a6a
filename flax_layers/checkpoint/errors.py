"""The exception of this package."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read exactly as it is meant.

    Raised for files that are damaged, foreign, incomplete, or that hold a model which this package does not compute:
    nothing in a checkpoint is skipped or guessed. The message names the file, says what was expected, what was found
    and what to do. A file that does not exist is a `FileNotFoundError` instead.

    Example:
        >>> from flax_layers.checkpoint import CheckpointError
        >>> issubclass(CheckpointError, ValueError)
        True
    """

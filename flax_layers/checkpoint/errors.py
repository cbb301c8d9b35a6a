"""The exception of this package."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read exactly.

    Raised for damaged, foreign or incomplete files, and for models that this package does not support:
    nothing in a checkpoint is skipped or guessed. The message names the file, says what was expected, what was found
    and what to do. A file that does not exist is a `FileNotFoundError` instead.

    Example:
        >>> from flax_layers.checkpoint import CheckpointError
        >>> issubclass(CheckpointError, ValueError)
        True
    """

"""Options of the model: what a checkpoint becomes when it is loaded."""

from dataclasses import dataclass

from bijax.serving.option_fields import Options, option

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """How a checkpoint is loaded. Checks itself. These options change the bits of every output.

    Raises:
        TypeError: If an option has the wrong type; the message names it.
        ValueError: If it is out of range.

    Example:
        >>> ModelOptions(dtype="float64")
        Traceback (most recent call last):
            ...
        ValueError: ModelOptions: dtype must be one of auto, bfloat16, float16, float32, got 'float64'.
    """

    dtype: str = option("auto", "dtype of weights, computation and cache; auto: the checkpoint's", kind=str,
                        choices=DTYPES)  # fmt: skip
    quantization: str | None = option(
        None, "int8: linear layers multiply in int8, at a quarter of float32's memory", kind=str, choices=("int8",)
    )

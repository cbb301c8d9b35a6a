"""Options of the model: what a checkpoint becomes when it is loaded."""

from dataclasses import dataclass

from bijax.serving.option_fields import Options, option

DTYPES = ("auto", "bfloat16", "float16", "float32")
LEAVES = 8


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
    tensor_parallel_size: int | None = option(
        None,
        "devices that weights and cache are cut over, a power of two; 1 has the bits of several on one device, and"
        " without the option sums are not cut",
        least=1,
    )
    tensor_parallel_leaves: int = option(
        LEAVES, "leaves of each sum that is cut, a power of two: the most devices; the same for equal bits", least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_parallel_size is None:
            if self.tensor_parallel_leaves != LEAVES:
                raise ValueError(
                    f"ModelOptions: tensor_parallel_leaves must be {LEAVES} without tensor_parallel_size, got"
                    f" {self.tensor_parallel_leaves}; set tensor_parallel_size, 1 for one device."
                )
            return
        for name in ("tensor_parallel_size", "tensor_parallel_leaves"):
            value = getattr(self, name)
            if value & (value - 1):
                raise ValueError(f"ModelOptions: {name} must be a power of two, got {value}.")
        if self.tensor_parallel_size > self.tensor_parallel_leaves:
            raise ValueError(
                f"ModelOptions: tensor_parallel_size must be at most tensor_parallel_leaves, got"
                f" {self.tensor_parallel_size} and {self.tensor_parallel_leaves}."
            )
        if self.quantization is not None:
            raise ValueError(
                f"ModelOptions: quantization must be None with tensor_parallel_size, got {self.quantization!r}; int8"
                " layers are not cut over devices."
            )

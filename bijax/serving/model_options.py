"""Options of the model: what a checkpoint becomes when it is loaded."""

from dataclasses import dataclass
from pathlib import Path

from bijax.serving.option_fields import Options, option

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_CACHE_DTYPES = ("auto", "int8", "fp8_e4m3")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """How a checkpoint is loaded. Checks itself.

    `dtype`, `quantization` and `kv_cache_dtype` change the bits of every output; adapters those of requests that choose
    one.

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
    kv_cache_dtype: str = option(
        "auto",
        "dtype of keys and values in the cache; auto: that of the computation",
        kind=str,
        choices=KV_CACHE_DTYPES,
    )
    enable_lora: bool | None = option(
        None, "requests may choose a LoRA adapter; on with lora_paths, which it needs", kind=bool
    )
    lora_paths: tuple[str, ...] = option(
        (), "folders of LoRA adapters, with the names that requests call them by", kind=tuple, metavar="NAME=PATH"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable_lora is not None and self.enable_lora != bool(self.lora_paths):
            wanted = "name an adapter with enable_lora" if self.enable_lora else "be empty without enable_lora"
            raise ValueError(f"ModelOptions: lora_paths must {wanted}, got {self.lora_paths!r}.")
        self.adapters()

    def adapters(self) -> dict[str, Path]:
        """Returns the folders of the adapters by name. One that is listed without a name is called as its path.

        Example:
            >>> ModelOptions(lora_paths=("poet=adapters/poet",)).adapters()["poet"].as_posix()
            'adapters/poet'
        """
        found: dict[str, Path] = {}
        for given in self.lora_paths:
            name, equals, path = given.partition("=")
            path = path if equals else name
            if not name or not path:
                raise ValueError(f"ModelOptions: lora_paths must be of the form NAME=PATH, got {given!r}.")
            if name in found:
                raise ValueError(f"ModelOptions: lora_paths must have different names, got {name!r} twice.")
            found[name] = Path(path)
        return found

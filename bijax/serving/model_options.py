"""Options of the model: what a checkpoint becomes when it is loaded."""

from dataclasses import dataclass
from pathlib import Path

from bijax.serving.option_fields import Options, option

DTYPES = ("auto", "bfloat16", "float16", "float32")
KV_CACHE_DTYPES = ("auto", "int8", "fp8_e4m3")
LEAVES = 8


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
        (), "folders of LoRA adapters, with their names in requests", kind=tuple, metavar="NAME=PATH"
    )
    tensor_parallel_size: int | None = option(
        None,
        "number of devices that weights and cache are cut over, a power of two; 1 gives the bits of several devices on"
        " one; by default the model is not cut, and has different bits",
        least=1,
    )
    tensor_parallel_leaves: int = option(
        LEAVES,
        "leaves of each sum that is cut, a power of two: the maximum number of devices; it fixes the bits",
        least=1,
    )
    expert_parallel_size: int = option(
        1,
        "experts are spread over this many times tensor_parallel_size devices, a power of two; all other weights are"
        " repeated; no bit depends on it",
        least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable_lora is not None and self.enable_lora != bool(self.lora_paths):
            wanted = "name an adapter with enable_lora" if self.enable_lora else "be empty without enable_lora"
            raise ValueError(f"ModelOptions: lora_paths must {wanted}, got {self.lora_paths!r}.")
        self.adapters()
        self._check_devices()

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

    def _check_devices(self) -> None:
        if self.tensor_parallel_size is None:
            if self.tensor_parallel_leaves != LEAVES:
                raise ValueError(
                    f"ModelOptions: tensor_parallel_leaves must be {LEAVES} without tensor_parallel_size, got"
                    f" {self.tensor_parallel_leaves}; set tensor_parallel_size, 1 for one device."
                )
            if self.expert_parallel_size != 1:
                raise ValueError(
                    "ModelOptions: expert_parallel_size must be 1 without tensor_parallel_size, got"
                    f" {self.expert_parallel_size}; set tensor_parallel_size too, 1 to cut nothing but the experts."
                )
            return
        for name in ("tensor_parallel_size", "tensor_parallel_leaves", "expert_parallel_size"):
            value = getattr(self, name)
            if value & (value - 1):
                raise ValueError(f"ModelOptions: {name} must be a power of two, got {value}.")
        if self.tensor_parallel_size > self.tensor_parallel_leaves:
            raise ValueError(
                f"ModelOptions: tensor_parallel_size must be at most tensor_parallel_leaves, got"
                f" {self.tensor_parallel_size} and {self.tensor_parallel_leaves}."
            )

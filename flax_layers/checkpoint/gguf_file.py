"""A GGUF file: its metadata and its tensors, with nothing known about any model."""

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from .errors import CheckpointError

_MAGIC = b"GGUF"


class _Reader(gguf.GGUFReader):
    """The package's reader, with every read checked against the end of the file.

    The original returns the remaining bytes when a read passes the end. A damaged header count then makes it loop over
    billions of empty values.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> np.ndarray:
        end = offset + np.dtype(dtype).itemsize * int(count)
        if end > self.data.size:
            raise ValueError(f"the header asks for bytes up to {end}, past the end of the file at {self.data.size}")
        if isinstance(self.data, np.memmap):
            # A plain view of the mapped file: slices of a memmap cost several times as much.
            self.data = self.data.view(np.ndarray)  # type: ignore[assignment]
        return super()._get(offset, dtype, count, *args, **kwargs)


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """One tensor as stored in the file.

    Attributes:
        data: The stored elements or quantisation blocks, mapped from the file.
        kind: The storage type, for example Q4_1.
        shape: Shape in elements, outermost axis first. The file lists the axes innermost first.
    """

    data: np.ndarray
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]

    def to_float32(self) -> np.ndarray:
        """Returns the tensor dequantised, as a float32 array of `shape` that the caller owns."""
        values = gguf.dequantize(self.data, self.kind)
        if np.may_share_memory(values, self.data):
            # A float32 tensor is returned as a view of the mapped file, which may change and is read-only.
            values = values.copy()
        return values.reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """The contents of a GGUF file.

    Attributes:
        path: Its path.
        metadata: Keys and values: str, int, float, bool or lists of these.
        tensors: Tensors by name.
    """

    path: Path
    metadata: dict[str, object]
    tensors: dict[str, GGUFTensor]

    def find[T](self, key: str, kind: type[T]) -> T | None:
        """Returns the metadata under `key`, or None if it is missing.

        Raises:
            CheckpointError: If the value is not a `kind`.
        """
        if key not in self.metadata:
            return None
        value = self.metadata[key]
        # bool is a subclass of int in Python, but not in the file.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(
                f"{self.path}: the metadata {key!r} must be a {kind.__name__}, got {type(value).__name__}: "
                f"{str(value)[:80]}; the file is damaged or needs another reader"
            )
        return value

    def get[T](self, key: str, kind: type[T], default: T | None = None) -> T:
        """Returns the metadata under `key`, or the default if it is missing.

        Raises:
            CheckpointError: If the value is not a `kind`, or if it is missing and there is no default.
        """
        value = self.find(key, kind)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.path}: the metadata {key!r} is missing; convert the model again")
        return value

    def get_list[T](self, key: str, kind: type[T]) -> list[T]:
        """Returns the metadata under `key`, which must be there and be a list of `kind`.

        Raises:
            CheckpointError: If the key is missing, or if the value or one of its elements has another type.
        """
        values: list[T] = self.get(key, list)
        for value in values:
            if not isinstance(value, kind):
                raise CheckpointError(
                    f"{self.path}: the metadata {key!r} must be a list of {kind.__name__}, got an element {value!r}; "
                    "the file is damaged"
                )
        return values


def open_gguf(path: Path) -> GGUFFile:
    """Maps a GGUF file and reads its header; tensors are read on access.

    Args:
        path: A GGUF file of version 2 or 3, little-endian, in one part.

    Raises:
        FileNotFoundError: If the file does not exist.
        CheckpointError: If it is not a GGUF file, is truncated or damaged, is big-endian, is one part of several, or
            holds a tensor type that cannot be dequantised.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "tiny.gguf"
        >>> writer = gguf.GGUFWriter(path, "llama")
        >>> writer.add_tensor("output_norm.weight", np.ones((2, 3), np.float32))
        >>> writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file()
        >>> writer.close()
        >>> file = open_gguf(path)
        >>> file.get("general.architecture", str), file.tensors["output_norm.weight"].shape
        ('llama', (2, 3))
    """
    with path.open("rb") as stream:
        magic = stream.read(len(_MAGIC))
    if magic != _MAGIC:
        raise CheckpointError(
            f"{path}: expected a GGUF file, which starts with the bytes {_MAGIC!r}, got {magic!r}; "
            "give a GGUF file or a folder with config.json and safetensors"
        )
    try:
        # Sizes in a damaged header overflow; the reader then fails on them, which is all that matters.
        with np.errstate(over="ignore"):
            reader = _Reader(path)
            metadata = {name: field.contents() for name, field in reader.fields.items()}
    # The reader lets out whatever its parsing runs into: ValueError, IndexError, KeyError, RecursionError, ...
    except Exception as error:
        raise CheckpointError(
            f"{path}: expected a whole GGUF file of version 2 or 3, but reading its "
            f"{path.stat().st_size} bytes failed with {type(error).__name__}: {error}; it is truncated or "
            "damaged: copy or download it again"
        ) from error
    if reader.byte_order == "S":
        raise CheckpointError(f"{path}: the file is in the other byte order; convert it to little-endian")
    if metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(f"{path}: one part of {metadata['split.count']}; merge the parts into one file first")
    tensors = {
        tensor.name: GGUFTensor(tensor.data, tensor.tensor_type, tuple(int(size) for size in reversed(tensor.shape)))
        for tensor in reader.tensors
    }
    _check_kinds(path, tensors)
    # The reader is dropped here: it keeps an object for every string of the vocabulary.
    return GGUFFile(path, metadata, tensors)


def _check_kinds(path: Path, tensors: dict[str, GGUFTensor]) -> None:
    for kind in {tensor.kind for tensor in tensors.values()}:
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError as error:
            name = next(name for name, tensor in tensors.items() if tensor.kind == kind)
            raise CheckpointError(
                f"{path}: the tensor {name} is stored as {kind.name}, which the package gguf cannot turn into float32; "
                "use a file stored as F32, F16, BF16 or one of the Q types"
            ) from error

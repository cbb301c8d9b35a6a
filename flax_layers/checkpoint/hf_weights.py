"""The weights of a Hugging Face folder, stored as safetensors."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from .config import LlamaConfig
from .errors import CheckpointError
from .hf_fields import read_json
from .hf_hybrid import plain_names
from .mtp import mtp_names
from .weights import Shape, Weights, match_shapes

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")

# Old files carry this buffer, which the model computes from the rope base.
_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def hf_weights(folder: Path, config: LlamaConfig) -> tuple[Weights, Weights | None]:
    """Maps the tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists.

    A model with linear attention has the names of `hf_hybrid.plain_names`, whichever layout the folder has.

    A single file takes precedence over an index, as in `transformers`. The stored output projection of a model with
    tied embeddings must have the bits of the embedding and is skipped.

    Returns:
        The weights of the model, and those of its MTP head in the names of `mtp.mtp_shapes`, which are not checked, or
        None.

    Raises:
        FileNotFoundError: If neither file exists, or a shard is missing.
        CheckpointError: If a file is damaged, if index and shards contradict each other, if tensors are missing,
            surplus, of the wrong shape, or of a dtype other than F32, F16 and BF16.
    """
    if config.linear is None:
        found, read = open_tensors(folder)
    else:
        files, stored = _list_tensors(folder)
        found, read = plain_names(stored, _reader(files), config.linear)
    names = mtp_names(found, config)
    mtp = {name: found.pop(stored) for name, stored in names.items()}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if config.tie_word_embeddings and head in found and embedding in found:
        if not np.array_equal(read(head).view(np.uint32), read(embedding).view(np.uint32)):
            raise CheckpointError(
                f"{folder}: config.json ties the output projection to the embedding, but {head} has other values than "
                f"{embedding}; set tie_word_embeddings to false or remove {head}"
            )
        del found[head]
    weights = Weights(match_shapes(found, config, folder), read)
    return weights, Weights(mtp, lambda name: read(names[name])) if mtp else None


def open_tensors(folder: Path) -> tuple[dict[str, Shape], Callable[[str], np.ndarray]]:
    """Returns the shape of every tensor in the folder, and a function that reads one as float32.

    Raises:
        FileNotFoundError: As `hf_weights`.
        CheckpointError: If a file or a dtype is not as `hf_weights` requires.
    """
    files, found = _list_tensors(folder)
    read = _reader(files)
    return found, lambda name: read(name, None)


def _reader(files: dict[str, Path]) -> Callable[[str, int | None], np.ndarray]:
    """Returns a function that reads a tensor of the files, or one of its rows, as float32."""

    def read(name: str, row: int | None) -> np.ndarray:
        with _opened(files[name]) as file:
            found = file.get_tensor(name) if row is None else file.get_slice(name)[row]
            return np.asarray(found, dtype=np.float32)

    return read


def stored_dtype(folder: Path, names: tuple[str, ...]) -> str:
    """Returns the dtype in which the tensor of one of these names is stored: F32, F16 or BF16."""
    files, _ = _list_tensors(folder)
    name = next(name for name in names if name in files)
    with _opened(files[name]) as file:
        return str(file.get_slice(name).get_dtype())


def _list_tensors(folder: Path) -> tuple[dict[str, Path], dict[str, Shape]]:
    """Returns the file and the shape of every tensor in the folder."""
    listed = _listed_shards(folder)
    files: dict[str, Path] = {}
    found: dict[str, Shape] = {}
    for path in dict.fromkeys(listed.values()) if listed else [folder / _SINGLE]:
        for name, shape in read_header(path).items():
            if listed.get(name, path) != path or name in files:
                raise CheckpointError(
                    f"{path}: holds {name}, which {_INDEX} places elsewhere; get the whole folder again"
                )
            files[name], found[name] = path, shape
    lost = [name for name in listed if name not in files and not _BUFFER.fullmatch(name)]
    if lost:
        raise CheckpointError(
            f"{listed[lost[0]]}: {_INDEX} places {lost[0]} here, but it is not; get the whole folder again"
        )
    return files, found


def _listed_shards(folder: Path) -> dict[str, Path]:
    """Returns the shard of each tensor from the index; nothing if there is a single file."""
    if (folder / _SINGLE).is_file():
        return {}
    path = folder / _INDEX
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has neither {_SINGLE} nor {_INDEX}; convert its weights to safetensors or get the whole folder"
        )
    shards = read_json(path).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{path}: weight_map must map tensor names to files, got {shards!r}; get the file again")
    for shard in shards.values():
        # The index is foreign input: it may not reach files outside its folder.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path}: shards must be plain file names, got {shard!r}; get the file again")
        if not (folder / shard).is_file():
            raise FileNotFoundError(f"{folder} lacks the shard {shard} that {_INDEX} lists; get the whole folder")
    return {name: folder / shard for name, shard in shards.items()}


def read_header(path: Path) -> dict[str, Shape]:
    """Returns the shape of every tensor in a safetensors file.

    Raises:
        CheckpointError: If the file is damaged or a dtype is not as `hf_weights` requires.
    """
    shapes: dict[str, Shape] = {}
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 (it is not a mapping)
            if not _BUFFER.fullmatch(name):
                shapes[name] = _checked_shape(file.get_slice(name), name, path)
    return shapes


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Opens a safetensors file, also one that was changed since its header was read."""
    try:
        with safetensors.safe_open(path, framework="np") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise CheckpointError(
            f"{path}: expected a whole safetensors file, but reading its "
            f"{path.stat().st_size} bytes failed with {error}; it is truncated or damaged: copy or download it again"
        ) from error


def _checked_shape(tensor: Any, name: str, path: Path) -> Shape:
    dtype = tensor.get_dtype()
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"{path}: {name} must be stored as one of {', '.join(_DTYPES)}, got {dtype}; "
            "use a checkpoint that is not quantised"
        )
    return tuple(tensor.get_shape())

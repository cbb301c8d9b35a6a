"""The dtype that a checkpoint was made for."""

from pathlib import Path
from typing import Literal

import gguf

from .errors import CheckpointError
from .gguf_file import GGUFFile
from .hf_fields import read_json
from .hf_hybrid import text_fields
from .hf_weights import stored_dtype

type Dtype = Literal["bfloat16", "float16", "float32"]

_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
_NAMES: dict[str, Dtype] = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}
_STORED: dict[str, Dtype] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_GGUF: dict[gguf.GGMLQuantizationType, Dtype] = {
    gguf.GGMLQuantizationType.F32: "float32",
    gguf.GGMLQuantizationType.F16: "float16",
}


def hf_dtype(folder: Path) -> Dtype:
    """Returns the dtype that `config.json` names (`dtype`, or `torch_dtype` in older files), or that of the embedding.

    Raises:
        CheckpointError: If it names another one.
    """
    path = folder / "config.json"
    fields = text_fields(read_json(path), path)
    named = fields.get("dtype") or fields.get("torch_dtype")
    if named is None:
        return _STORED[stored_dtype(folder, _EMBEDDINGS)]
    if not isinstance(named, str) or named.removeprefix("torch.") not in _NAMES:
        raise CheckpointError(f"{path}: dtype must be one of {', '.join(_NAMES)}, got {named!r}; correct the file")
    return _NAMES[named.removeprefix("torch.")]


def gguf_dtype(file: GGUFFile) -> Dtype:
    """Returns the dtype of the embedding; bfloat16 if that is quantised."""
    return _GGUF.get(file.tensors["token_embd.weight"].kind, "bfloat16")

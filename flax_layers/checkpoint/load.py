"""Reading a checkpoint of either format."""

import dataclasses
import os
import re
from pathlib import Path

from .config import LlamaConfig
from .dtype import Dtype, gguf_dtype, hf_dtype
from .errors import CheckpointError
from .gguf_file import open_gguf
from .gguf_llama import gguf_config, gguf_weights
from .gguf_tokenizer import gguf_tokenizer
from .hf_config import hf_config
from .hf_tokenizer import hf_tokenizer
from .hf_weights import hf_weights
from .tokenizer import Tokenizer
from .weights import Weights

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    Attributes:
        config: The model's numbers.
        weights: Its weights under Hugging Face names, float32, read at each access.
        tokenizer: Its tokenizer and chat template, or None.
        dtype: The dtype that it was made for: "bfloat16", "float16" or "float32".
        mtp: The weights of its multi-token prediction head in the same form, or None; see `flax_layers.MTPHead`.
    """

    config: LlamaConfig
    weights: Weights
    tokenizer: Tokenizer | None
    dtype: Dtype = "float32"
    mtp: Weights | None = None


def load_checkpoint(path: str | os.PathLike[str], *, tokenizer: bool = True) -> Checkpoint:
    """Opens a checkpoint, a GGUF file or a Hugging Face folder with safetensors.

    A GGUF file may hold a Llama, Qwen2, Qwen3 or Gemma 3, a folder a Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE,
    Qwen3-Next, Gemma 2 or 3, DeepSeek-V2 or V3, Kimi-K2, or the text model of a Qwen3.5 (dense or with experts), whose
    other parts are left out.
    Configuration, tokenizer, and the names, shapes and dtypes of all weights are read and checked now; the weights
    themselves are read on access, one at a time. Those of an MTP head are checked when one is made of them. The same
    model gives the same configuration and weights from either format, except for the rounding of quantisation.

    Args:
        path: A `.gguf` file, or a folder with `config.json`, `model.safetensors` (or its index and shards) and
            `tokenizer.json`.
        tokenizer: Whether to read the tokenizer. If a checkpoint has none, the result has none.

    Returns:
        The checkpoint. Nothing of it depends on JAX or Flax.

    Raises:
        FileNotFoundError: If the path, or a file that the folder needs, does not exist. Of the name of a model on the
            Hugging Face hub the message says how to download it.
        CheckpointError: If a file is damaged, foreign or incomplete, or holds a model or tokenizer that is not
            supported.

    Example:
        >>> from flax_layers.checkpoint import load_checkpoint, smollm2_path
        >>> checkpoint = load_checkpoint(smollm2_path())
        >>> checkpoint.config.num_layers, checkpoint.config.hidden_size, checkpoint.config.tie_word_embeddings
        (30, 576, True)
        >>> weight = checkpoint.weights["model.layers.0.self_attn.k_proj.weight"]
        >>> weight.shape, weight.dtype
        ((192, 576), dtype('float32'))
        >>> checkpoint.tokenizer.eos_token_ids
        (2,)
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(_not_there(path))
    text: Tokenizer | None = None
    mtp: Weights | None = None
    dtype: Dtype
    if path.is_dir():
        config = hf_config(path)
        weights, mtp = hf_weights(path, config)
        dtype = hf_dtype(path)
        if tokenizer:
            text = hf_tokenizer(path, config.eos_token_ids)
    else:
        file = open_gguf(path)
        config = gguf_config(file)
        weights = gguf_weights(file, config)
        dtype = gguf_dtype(file)
        if tokenizer:
            text = gguf_tokenizer(file, config.eos_token_ids)
    if text is not None and text.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has {text.vocab_size} token ids, but the model only {config.vocab_size}; "
            "tokenizer and model do not belong together"
        )
    return Checkpoint(config, weights, text, dtype, mtp)


def _not_there(path: Path) -> str:
    message = f"there is no checkpoint at {path}; give a GGUF file or a Hugging Face folder"
    if not _HUB_NAME.fullmatch(path.as_posix()) or path.suffix == ".gguf" or path.parent.exists():
        return message
    return (
        f"{message}. If {path} is a model on the Hugging Face hub, download it first: `pip install huggingface_hub` and"
        f" `hf download {path.as_posix()} --local-dir {path.name}`, then give the folder {path.name}"
    )

"""Reading a checkpoint of either format."""

import dataclasses
import os
from pathlib import Path

from .config import LlamaConfig
from .errors import CheckpointError
from .gguf_file import open_gguf
from .gguf_llama import gguf_config, gguf_weights
from .gguf_tokenizer import gguf_tokenizer
from .hf_config import hf_config
from .hf_tokenizer import hf_tokenizer
from .hf_weights import hf_weights
from .tokenizer import Tokenizer
from .weights import Weights


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    Attributes:
        config: The model's numbers.
        weights: Its weights under Hugging Face names, float32, read at each access.
        tokenizer: Its tokenizer and chat template.
    """

    config: LlamaConfig
    weights: Weights
    tokenizer: Tokenizer


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a Llama checkpoint, a GGUF file or a Hugging Face folder with safetensors, or a folder of a Qwen3-MoE.

    Configuration, tokenizer, and the names, shapes and dtypes of all weights are read and checked now; the weights
    themselves are read when they are asked for, one at a time. The same model gives the same configuration and weights
    from either format, save for what quantisation has rounded.

    Args:
        path: A `.gguf` file, or a folder with `config.json`, `model.safetensors` (or its index and shards) and
            `tokenizer.json`.

    Returns:
        The checkpoint. Nothing of it depends on JAX or Flax.

    Raises:
        FileNotFoundError: If the path, or a file that the folder needs, does not exist.
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
        raise FileNotFoundError(f"there is no checkpoint at {path}; give a GGUF file or a Hugging Face folder")
    if path.is_dir():
        config = hf_config(path)
        weights, tokenizer = hf_weights(path, config), hf_tokenizer(path, config.eos_token_ids)
    else:
        file = open_gguf(path)
        config = gguf_config(file)
        weights, tokenizer = gguf_weights(file, config), gguf_tokenizer(file, config.eos_token_ids)
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} token ids, but the model only {config.vocab_size}; "
            "tokenizer and model do not belong together"
        )
    return Checkpoint(config, weights, tokenizer)

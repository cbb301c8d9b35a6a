"""Checkpoints from disk: GGUF files and Hugging Face folders, read into numpy arrays."""

from . import _needs_packages as _needs_packages  # first: it tells what to install
from .config import LlamaConfig as LlamaConfig
from .errors import CheckpointError as CheckpointError
from .expert_block import ExpertBlock as ExpertBlock
from .expert_block import load_expert_block as load_expert_block
from .experts import ExpertsConfig as ExpertsConfig
from .latent import LatentConfig as LatentConfig
from .linear_attention import LinearAttentionConfig as LinearAttentionConfig
from .load import Checkpoint as Checkpoint
from .load import load_checkpoint as load_checkpoint
from .lora import LoRA as LoRA
from .lora import load_lora as load_lora
from .smollm2 import smollm2_path as smollm2_path
from .tokenizer import Tokenizer as Tokenizer
from .weights import Weights as Weights

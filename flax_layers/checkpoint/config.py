"""The numbers that define a model of the Llama family, whichever file they came from."""

import dataclasses
import math
from typing import Any, Literal, Self

from .errors import CheckpointError
from .experts import ExpertsConfig
from .latent import LatentConfig
from .linear_attention import LinearAttentionConfig
from .rope import RopeScaling

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)

_NUMBERS = ("rope_theta", "rms_norm_eps", "embedding_scale")
_OPTIONAL_NUMBERS = ("window_rope_theta", "attention_scale", "attention_soft_cap", "logits_soft_cap")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Everything about a model of the Llama family but its weights.

    The defaults are the plain Llama block: RMSNorm before attention and before a SwiGLU MLP (`silu`), no biases, rotary
    embedding over the whole head with unscaled frequencies. The fields with defaults describe the variants. Readers
    refuse checkpoints that need anything else.

    Attributes:
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the MLP.
        num_layers: Number of blocks.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; divides `num_heads`.
        head_dim: Width of one head; even.
        rope_theta: Base of the rotary frequencies.
        rms_norm_eps: Added to the mean square in every RMSNorm.
        tie_word_embeddings: Whether the embedding is also the output projection; then there is no `lm_head.weight`.
        max_position_embeddings: Longest sequence, in tokens, that the model supports.
        bos_token_id: Token that starts a sequence, or None.
        eos_token_ids: Tokens that end generation.
        qk_norm: Whether each head of queries and keys is normalised before it is rotated.
        experts: The experts that replace each MLP, or None.
        dense_layers: How many of the first layers have an MLP instead of experts.
        latent: Latent attention instead of keys and values for each head, or None. `head_dim` is then the width of
            what is rotated, and `num_kv_heads` is ignored.
        draft_layers: Layers after the last in which DeepSeek's checkpoints hold an MTP head; see `flax_layers.MTPHead`.
        linear: The linear attention that replaces attention in some layers, or None.
        output_gate: Whether the heads of attention are multiplied by the sigmoid of a gate.
        rotary_dim: Columns at the beginning of a head that are rotated; None for all.
        rope_scaling: Scaling of the rotary frequencies of `rope_theta`, or None.
        windows: For each layer the maximum number of tokens that a token sees, including itself, or None for all; over
            again from the first where there are more layers.
        window_rope_theta: Base of the rotary frequencies of layers with a window, which are not scaled then; None if
            they are as in the other layers.
        qkv_bias: Whether queries, keys and values have a bias.
        output_bias: Whether the output of attention has a bias.
        mlp_bias: Whether the products of the MLP have a bias.
        activation: Activation of the MLP's gate; "gelu_tanh" is gelu's tanh approximation.
        norm_offset: Added to the weights of all norms; 1 for models that store weight - 1.
        output_norms: Whether the outputs of attention and MLP are normalised before they are added.
        embedding_scale: Factor of the embeddings, rounded to their dtype.
        attention_scale: Factor of the attention scores; 1 / sqrt(head_dim) if None.
        attention_soft_cap: What attention scores x are bent to stay below, as cap * tanh(x / cap); None for no bound.
        logits_soft_cap: The same for the logits.

    Raises:
        CheckpointError: If a value has the wrong type or range, or if two values contradict each other.

    Example:
        >>> config = LlamaConfig(
        ...     vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1,
        ...     head_dim=4, rope_theta=10000.0, rms_norm_eps=1e-5, tie_word_embeddings=True,
        ...     max_position_embeddings=64, bos_token_id=1, eos_token_ids=(2,))
        >>> config == LlamaConfig.tiny()
        True
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    qk_norm: bool = False
    experts: ExpertsConfig | None = None
    dense_layers: int = 0
    latent: LatentConfig | None = None
    draft_layers: int = 0
    linear: LinearAttentionConfig | None = None
    output_gate: bool = False
    rotary_dim: int | None = None
    rope_scaling: RopeScaling | None = None
    windows: tuple[int | None, ...] = (None,)
    window_rope_theta: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norm_offset: float = 0.0
    output_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        """Returns the configuration of a model of a few hundred parameters, for examples and tests.

        Args:
            **changes: Fields that are to be different.

        Example:
            >>> LlamaConfig.tiny(num_layers=2).num_layers
            2
        """
        sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_layers": 1}
        heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "rope_theta": 10000.0, "rms_norm_eps": 1e-5}
        ends = {"tie_word_embeddings": True, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_ids": (2,)}
        fields: dict[str, Any] = {**sizes, **heads, **ends, **changes}
        return cls(**fields)

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if not _is_int(value) or value <= 0:
                raise CheckpointError(f"{name} must be a positive integer, got {value!r}; the configuration is damaged")
        for name in (*_NUMBERS, *_OPTIONAL_NUMBERS):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL_NUMBERS:
                continue
            if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
                raise CheckpointError(
                    f"{name} must be a positive finite float, got {value!r}; the configuration is damaged"
                )
        if not isinstance(self.tie_word_embeddings, bool):
            raise CheckpointError(f"tie_word_embeddings must be True or False, got {self.tie_word_embeddings!r}")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_heads must be a multiple of num_kv_heads, got num_heads={self.num_heads} and"
                f" num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim must be even for a rotary embedding, got head_dim={self.head_dim}")
        rotated = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if not _is_int(rotated) or rotated % 2 or not 2 <= rotated <= self.head_dim:
            raise CheckpointError(
                f"rotary_dim must be even and from 2 to head_dim, got rotary_dim={self.rotary_dim} and"
                f" head_dim={self.head_dim}"
            )
        if self.rope_scaling is not None and len(self.rope_scaling.divisors) != rotated // 2:
            raise CheckpointError(
                f"rope_scaling must have {rotated // 2} divisors for {rotated} rotated columns, got"
                f" {len(self.rope_scaling.divisors)}"
            )
        sizes = [window for window in self.windows if window is not None]
        if not self.windows or any(not _is_int(size) or size < 1 for size in sizes):
            raise CheckpointError(f"windows must be positive integers or None, at least one, got {self.windows}")
        if self.activation not in ("silu", "gelu_tanh"):
            raise CheckpointError(f"activation must be 'silu' or 'gelu_tanh', got {self.activation!r}")
        for name in ("dense_layers", "draft_layers"):
            if not _is_int(getattr(self, name)) or getattr(self, name) < 0:
                raise CheckpointError(f"{name} must be an integer of at least 0, got {getattr(self, name)!r}")
        if self.latent is not None and self.latent.rope_head_dim != self.head_dim:
            raise CheckpointError(
                f"head_dim must be latent.rope_head_dim, got head_dim={self.head_dim} and {self.latent}"
            )
        if not isinstance(self.eos_token_ids, tuple):
            raise CheckpointError(f"eos_token_ids must be a tuple of token ids, got {self.eos_token_ids!r}")
        for token_id in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not _is_int(token_id) or not 0 <= token_id < self.vocab_size:
                raise CheckpointError(
                    f"bos and eos ids must be integers from 0 to {self.vocab_size - 1}, "
                    f"got bos_token_id={self.bos_token_id} and eos_token_ids={self.eos_token_ids}"
                )

    def has_experts(self, layer: int) -> bool:
        """Returns whether a layer has experts instead of an MLP."""
        return self.experts is not None and layer >= self.dense_layers

    def is_linear(self, layer: int) -> bool:
        """Returns whether a layer has linear attention."""
        return self.linear is not None and self.linear.layers[layer % len(self.linear.layers)]

    def mtp_block(self) -> "LlamaConfig":
        """Returns the numbers of the only block of an MTP head: full attention, and experts if the model has any."""
        return dataclasses.replace(self, num_layers=1, dense_layers=0, draft_layers=0, linear=None, windows=(None,))

    def window(self, layer: int) -> int | None:
        """Returns the tokens that a token sees at most in a layer, or None for all."""
        return self.windows[layer % len(self.windows)]


def default_head_dim(hidden_size: int, num_heads: int) -> int:
    """Returns the head size of a checkpoint that does not state it: hidden_size / num_heads, which must be whole.

    Raises:
        CheckpointError: If it is not whole.

    Example:
        >>> default_head_dim(576, 9)
        64
    """
    if num_heads <= 0 or hidden_size % num_heads:
        raise CheckpointError(
            f"the head size is not stated, so the hidden size must be a multiple of the number of heads, "
            f"got {hidden_size} and {num_heads}; the configuration is damaged or incomplete"
        )
    return hidden_size // num_heads


def _is_int(value: object) -> bool:
    # bool is a subclass of int, and a true/false where a count belongs is a damaged file.
    return isinstance(value, int) and not isinstance(value, bool)

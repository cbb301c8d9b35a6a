"""Self-attention with grouped heads, rotary embedding and a cache."""

from typing import Any, cast, override

import jax
import jax.numpy as jnp
from flax import nnx

from ..._signature import ConstructorSignature
from ...ops import INVARIANT, Ops
from ._initializers import LECUN_NORMAL
from .cache import LayerCache
from .cached_attention import CachedAttention
from .linear import Linear
from .rms_norm import RMSNorm
from .rotary import check_angles
from .unrounded import Unrounded, apply_unrounded


class Attention(CachedAttention, nnx.Module):
    """Causal self-attention; several query heads may share a key/value head.

    Args:
        features: Length of the last dimension of input and output.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; divides `num_heads`.
        head_dim: Width of a head.
        dtype: Dtype of the computation; promoted from input and parameters by default.
        param_dtype: Dtype of the parameters.
        kernel_init: Initializer of the kernels.
        qk_norm: Epsilon of the per-head norms of queries and keys before rotation; None for none.
        qk_norm_offset: Added to the scales of these norms, as in `RMSNorm`.
        qkv_bias: Whether queries, keys and values have a bias.
        output_bias: Whether the output has a bias.
        scale: Factor of the scores; 1 / sqrt(head_dim) by default.
        soft_cap: What scores x are bent to stay below, as soft_cap * tanh(x / soft_cap); None for no bound.
        window: Tokens that a token sees at most, itself the last; None for all before it.
        output_gate: Whether the heads are multiplied by sigmoid of a product of the input, before `out`.
        ops: The operations to compute with.
        rngs: Keys; `rngs.params()` is drawn from.

    Attributes:
        qkv: Linear layer to the query heads, the key heads and the value heads, in this order. One kernel, because one
            product is faster than three and its columns do not mind.
        gate: Linear layer to the gates of the query heads, or None.
        out: Linear layer from the query heads back to `features`.
        query_norm: Norm of a head of queries, or None.
        key_norm: Norm of a head of keys, or None.

    Raises:
        ValueError: If `num_kv_heads` does not divide `num_heads`, or the window is not positive.

    Guarantee: row-invariant with `INVARIANT`: a token's output depends on the tokens up to it in its own sequence,
    whatever the batch, the padding, the cut into chunks and the cache.

    Source: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints",
    2023. Output gate: Qiu et al., "Gated Attention for Large Language Models", https://arxiv.org/abs/2505.06708.

    Example:
        >>> from flax_layers.models.layers import RotaryEmbedding
        >>> attention = Attention(8, num_heads=2, num_kv_heads=1, head_dim=4, rngs=nnx.Rngs(0))
        >>> rotary = RotaryEmbedding(4, 16)(jnp.arange(3)[None])
        >>> attention(jnp.ones((1, 3, 8)), rotary).shape
        (1, 3, 8)
    """

    __signature__ = ConstructorSignature()

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = LECUN_NORMAL,
        qk_norm: float | None = None,
        qk_norm_offset: float = 0.0,
        qkv_bias: bool = False,
        output_bias: bool = False,
        scale: float | None = None,
        soft_cap: float | None = None,
        window: int | None = None,
        output_gate: bool = False,
        ops: Ops = INVARIANT,
        rngs: nnx.Rngs,
    ) -> None:
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"Attention: num_kv_heads must divide num_heads, got {num_kv_heads=} and {num_heads=}.")

        if window is not None and window < 1:
            raise ValueError(f"Attention: window must be positive or None, got {window=}.")

        def linear(in_features: int, out_features: int, use_bias: bool) -> Linear:
            return Linear(
                in_features,
                out_features,
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                ops=ops,
                rngs=rngs,
            )

        self.qkv = linear(features, (num_heads + 2 * num_kv_heads) * head_dim, qkv_bias)
        self.gate: Any = linear(features, num_heads * head_dim, False) if output_gate else nnx.data(None)
        self.out = linear(num_heads * head_dim, features, output_bias)
        self.query_norm: Any = nnx.data(None)
        self.key_norm: Any = nnx.data(None)
        if qk_norm is not None:
            options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ops": ops, "rngs": rngs}
            options |= {"epsilon": qk_norm, "scale_offset": qk_norm_offset}
            self.query_norm = RMSNorm(head_dim, **options)
            self.key_norm = RMSNorm(head_dim, **options)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.soft_cap = soft_cap
        self.window = window
        self.ops = ops

    def __call__(self, x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Attends within the sequences of x.

        Args:
            x: (B, T, features). A sequence shorter than T is padded at its end; tokens do not see later ones.
            rotary: Cosines and sines (B, T, head_dim / 2) of the tokens' positions, see `RotaryEmbedding`.

        Returns:
            (B, T, features).

        Raises:
            TypeError: If a dtype is not supported.
            ValueError: If a shape does not fit.
        """
        heads, query_key = self._heads(x, rotary)
        query_key = self.ops.rotate(query_key, *rotary)
        query, key = query_key[:, :, : self.num_heads], query_key[:, :, self.num_heads :]
        value = heads[:, :, self.num_heads + self.num_kv_heads :]
        return self.out(self._merge(self.ops.attention(query, key, value, **self._options()), x))

    @override
    def prepare(
        self, x: jax.Array, rotary: tuple[jax.Array, jax.Array], cache: LayerCache, **places: jax.Array
    ) -> tuple[jax.Array, LayerCache]:
        if cache.values is None:
            raise ValueError("Attention: the cache must hold keys and values, got one of latents, without values.")
        rows = cache.rows(x.shape[1], **places)
        caches = cache.keys, cache.values
        options: dict[str, Any] = {"scales": cache.scales}
        in_groups = getattr(self.qkv, "in_groups", None)
        if self.query_norm is None and in_groups is not None:
            check_angles("Attention", x, rotary, self.head_dim)
            heads, groups = in_groups(x, self.num_kv_heads)
            heads = self._by_head(heads)
            query, keys, values = self.ops.rotate_and_store(heads, *rotary, rows, *caches, **options, groups=groups)
        else:
            heads, query_key = self._heads(x, rotary)
            to_rotate = None if self.query_norm is None else query_key
            query, keys, values = self.ops.rotate_and_store(
                heads, *rotary, rows, *caches, **options, to_rotate=to_rotate
            )
        return query, cache._replace(keys=keys, values=values)

    @override
    def attend(self, x: jax.Array, query: jax.Array, cache: LayerCache, **places: jax.Array) -> jax.Array | Unrounded:
        return apply_unrounded(self.out, self.attended(x, query, cache, **places))

    def attended(self, x: jax.Array, query: jax.Array, cache: LayerCache, **places: jax.Array) -> jax.Array:
        """Returns the input of the last product of `attend`, (B, T, num_heads * head_dim)."""
        options, values = {**places, **self._options()}, cast(jax.Array, cache.values)
        options |= {"page_table": cache.page_table, "common_prefix": cache.common_prefix, "scales": cache.scales}
        return self._merge(self.ops.attention(query, cache.keys, values, **options), x)

    def _options(self) -> dict[str, Any]:
        return {"scale": self.scale, "window": self.window, "soft_cap": self.soft_cap}

    def _heads(self, x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Returns all heads, and the queries and keys to rotate, (B, T, heads, head_dim) each."""
        check_angles("Attention", x, rotary, self.head_dim)
        heads = self._by_head(self.qkv(x))
        to_rotate = self.num_heads + self.num_kv_heads
        query_key = heads[:, :, :to_rotate]
        if self.query_norm is not None:
            query, key = query_key[:, :, : self.num_heads], query_key[:, :, self.num_heads :]
            query_key = jnp.concatenate([self.query_norm(query), self.key_norm(key)], axis=2)
        return heads, query_key

    def _by_head(self, columns: jax.Array) -> jax.Array:
        return columns.reshape(*columns.shape[:2], self.num_heads + 2 * self.num_kv_heads, self.head_dim)

    def _merge(self, heads: jax.Array, x: jax.Array) -> jax.Array:
        y = heads.reshape(*heads.shape[:2], self.num_heads * self.head_dim)
        return y if self.gate is None else self.ops.sigmoid_gate(y, self.gate(x))

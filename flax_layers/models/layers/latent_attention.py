"""Self-attention to one latent of each token, which holds its keys and values for all heads."""

from typing import Any, override

import jax
import jax.numpy as jnp
from flax import nnx

from ..._signature import ConstructorSignature
from ...ops import INVARIANT, Ops
from ._dtypes import promote
from ._initializers import LECUN_NORMAL
from .cache import LayerCache
from .cached_attention import CachedAttention
from .linear import Linear
from .rms_norm import RMSNorm
from .rotary import check_angles

_HEADS = nnx.initializers.lecun_normal(batch_axis=(0,))


class LatentAttention(CachedAttention, nnx.Module):
    """Causal self-attention of DeepSeek-V2 and V3 ("MLA"), absorbed for prompts and for single tokens.

    The cache holds a latent of `rank` numbers, from which the keys and values of all heads follow, and a key of
    `rope_head_dim` numbers that is rotated and shared by all heads. The projections of keys and values are multiplied
    into the queries and the results instead of into the cache.

    Args:
        features: Length of the last dimension of input and output.
        num_heads: Query heads.
        rank: Width of the latent without the rotated key.
        nope_head_dim: Width of the part of a query that is not rotated.
        rope_head_dim: Width of the part of a query that is rotated; even.
        value_head_dim: Width of a head of the values.
        query_rank: Width of the latent that queries are made of; None where they are made of the input.
        scale: Factor of the scores; 1 / sqrt(nope_head_dim + rope_head_dim) by default.
        norm_epsilon: Epsilon of the norms of latents.
        dtype: Dtype of the computation; promoted from input and parameters by default.
        param_dtype: Dtype of the parameters.
        ops: The operations to compute with.
        rngs: Keys; `rngs.params()` is drawn from.

    Attributes:
        query_down: Linear layer to the latent of queries, or None.
        query_norm: Norm of that latent, or None.
        query: Linear layer to the heads of queries, each the part that is not rotated, then the one that is.
        latent: Linear layer to the latent and the rotated key.
        latent_norm: Norm of the latent without the rotated key.
        key_up: (num_heads, nope_head_dim, rank) parameter, multiplied into queries.
        value_up: (num_heads, rank, value_head_dim) parameter, multiplied into results.
        out: Linear layer from the heads back to `features`.

    Raises:
        ValueError: If a size is not positive, or `rope_head_dim` is odd.

    Guarantee: row-invariant with `INVARIANT`: a token's output depends on the tokens up to it in its own sequence,
    whatever the batch, the padding, the cut into chunks and the cache.

    Source: DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434, 2024, section 2.1.

    Example:
        >>> from flax_layers.models.layers import RotaryEmbedding
        >>> sizes = {"rank": 16, "nope_head_dim": 8, "rope_head_dim": 4, "value_head_dim": 8}
        >>> attention = LatentAttention(8, num_heads=2, **sizes, rngs=nnx.Rngs(0))
        >>> attention(jnp.ones((1, 3, 8)), RotaryEmbedding(4, 16)(jnp.arange(3)[None])).shape
        (1, 3, 8)
    """

    __signature__ = ConstructorSignature()

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        rank: int,
        nope_head_dim: int,
        rope_head_dim: int,
        value_head_dim: int,
        query_rank: int | None = None,
        scale: float | None = None,
        norm_epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        ops: Ops = INVARIANT,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = (num_heads, rank, nope_head_dim, rope_head_dim, value_head_dim, query_rank or 1)
        if min(sizes) < 1 or rope_head_dim % 2:
            raise ValueError(
                "LatentAttention: expected positive sizes and an even rope_head_dim, got"
                f" {num_heads=}, {rank=}, {nope_head_dim=}, {rope_head_dim=}, {value_head_dim=}, {query_rank=}."
            )
        common: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "ops": ops, "rngs": rngs}

        def linear(in_features: int, out_features: int) -> Linear:
            return Linear(in_features, out_features, use_bias=False, kernel_init=LECUN_NORMAL, **common)

        heads = num_heads * (nope_head_dim + rope_head_dim)
        self.query_down: Any = nnx.data(None)
        self.query_norm: Any = nnx.data(None)
        if query_rank is not None:
            self.query_down = linear(features, query_rank)
            self.query_norm = RMSNorm(query_rank, epsilon=norm_epsilon, **common)
        self.query = linear(features if query_rank is None else query_rank, heads)
        self.latent = linear(features, rank + rope_head_dim)
        self.latent_norm = RMSNorm(rank, epsilon=norm_epsilon, **common)
        self.key_up = nnx.Param(_HEADS(rngs.params(), (num_heads, nope_head_dim, rank), param_dtype))
        self.value_up = nnx.Param(_HEADS(rngs.params(), (num_heads, rank, value_head_dim), param_dtype))
        self.out = linear(num_heads * value_head_dim, features)
        self.num_heads = num_heads
        self.rank = rank
        self.nope_head_dim = nope_head_dim
        self.rope_head_dim = rope_head_dim
        self.value_head_dim = value_head_dim
        self.scale = float((nope_head_dim + rope_head_dim) ** -0.5 if scale is None else scale)
        self.dtype = dtype
        self.ops = ops

    def __call__(self, x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Attends within the sequences of x.

        Args:
            x: (B, T, features). A sequence shorter than T is padded at its end; tokens do not see later ones.
            rotary: Cosines and sines (B, T, rope_head_dim / 2) of the tokens' positions, see `RotaryEmbedding`.

        Returns:
            (B, T, features).

        Raises:
            TypeError: If a dtype is not supported.
            ValueError: If a shape does not fit.
        """
        query, latents = self._heads(x, rotary)
        return self._merge(self._attended(query, latents))

    @override
    def prepare(
        self, x: jax.Array, rotary: tuple[jax.Array, jax.Array], cache: LayerCache, **places: jax.Array
    ) -> tuple[jax.Array, LayerCache]:
        if cache.values is not None:
            raise ValueError("LatentAttention: the cache must hold latents and no values, got a cache with values.")
        query, latents = self._heads(x, rotary)
        return query, cache.write(latents[:, :, None], None, **places)

    @override
    def attend(self, x: jax.Array, query: jax.Array, cache: LayerCache, **places: jax.Array) -> jax.Array:
        del x
        stored = cache.keys[:, :, 0]
        if cache.page_table is None:
            return self._merge(self._attended(query, stored, **places))
        options: dict[str, Any] = {
            "value_size": self.rank,
            "scale": self.scale,
            "page_table": cache.page_table,
            **places,
        }
        return self._merge(self.ops.latent_attention(query, stored, **options))

    def _attended(self, query: jax.Array, latents: jax.Array, **places: jax.Array) -> jax.Array:
        return self.ops.latent_attention(query, latents, value_size=self.rank, scale=self.scale, **places)

    def _heads(self, x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Returns queries (B, T, heads, rank + rope_head_dim) and latents (B, T, rank + rope_head_dim)."""
        check_angles("LatentAttention", x, rotary, self.rope_head_dim)
        low = x if self.query_down is None else self.query_norm(self.query_down(x))
        query = self.query(low).reshape(*x.shape[:2], self.num_heads, self.nope_head_dim + self.rope_head_dim)
        latent = self.latent(x)
        query, latent, key_up = promote(self.dtype, query, latent, self.key_up[...])
        parts = [query[..., self.nope_head_dim :], latent[:, :, None, self.rank :]]
        rotated = self.ops.rotate(jnp.concatenate(parts, axis=2), *rotary)
        absorbed = self.ops.head_matmul(query[..., : self.nope_head_dim], key_up)
        query = jnp.concatenate([absorbed, rotated[:, :, : self.num_heads]], axis=-1)
        latent = self.latent_norm(latent[..., : self.rank])
        return query, jnp.concatenate([latent, rotated[:, :, self.num_heads]], axis=-1)

    def _merge(self, results: jax.Array) -> jax.Array:
        results, value_up = promote(self.dtype, results, self.value_up[...])
        heads = self.ops.head_matmul(results, value_up)
        return self.out(heads.reshape(*heads.shape[:2], self.num_heads * self.value_head_dim))

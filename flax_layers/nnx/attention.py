"""Attention."""

from flax import nnx

from ._drop_in import invariant_layer


@invariant_layer
class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention`, batch-invariant: multi-head attention.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is a query
    with its own keys. Without dropout, whose random numbers follow the position in the batch.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((1, 3, 8))).shape
        (1, 3, 8)
    """


@invariant_layer
class RoPE(nnx.RoPE):
    """`flax.nnx.RoPE`, batch-invariant: rotary position embedding.

    Guarantee: row-invariant.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = RoPE()
        >>> layer(jnp.ones((1, 3, 8))).shape
        (1, 3, 8)
    """

"""Attention."""

from flax import linen

from ._drop_in import invariant_layer


@invariant_layer
class MultiHeadDotProductAttention(linen.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention`, batch-invariant: multi-head attention.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is a query
    with its own keys. Without dropout, whose random numbers follow the position in the batch.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer, x = MultiHeadDotProductAttention(2), jnp.ones((1, 3, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (1, 3, 8)
    """


@invariant_layer
class MultiHeadAttention(linen.MultiHeadAttention):
    """`flax.linen.MultiHeadAttention`, batch-invariant: multi-head attention.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is a query
    with its own keys. Without dropout, whose random numbers follow the position in the batch.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer, x = MultiHeadAttention(2), jnp.ones((1, 3, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (1, 3, 8)
    """


@invariant_layer
class SelfAttention(linen.SelfAttention):
    """`flax.linen.SelfAttention`, batch-invariant: multi-head attention of a sequence to itself.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is a query
    with its own keys. Without dropout, whose random numbers follow the position in the batch.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer, x = SelfAttention(2), jnp.ones((1, 3, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (1, 3, 8)
    """

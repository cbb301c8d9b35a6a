"""Dropout."""

from flax import linen

from ._drop_in import invariant_layer


@invariant_layer
class Dropout(linen.Dropout):
    """`flax.linen.Dropout`, batch-invariant: zeros at random.

    The zeros depend on the key and the row's position in the batch, not on the batch size: with the same key the first
    rows of a larger batch get the same zeros. For zeros that do not depend on the position, give each row its own key
    with `jax.vmap`.

    Guarantee: row-invariant for a row at its place, for the output and for the gradient of the input. Keys must be of
    threefry2x32, JAX's default.

    Example:
        >>> import jax.numpy as jnp
        >>> import jax
        >>> layer = Dropout(0.5, deterministic=False)
        >>> layer.apply({}, jnp.ones((2, 3)), rngs={"dropout": jax.random.key(0)}).shape
        (2, 3)
    """

"""Dropout."""

from flax import linen

from ._drop_in import invariant_layer


@invariant_layer
class Dropout(linen.Dropout):
    """`flax.linen.Dropout`, batch-invariant: zeros at random.

    Which elements are zero follows the key and the place of the row in the batch, not the length of the batch: with the
    same key the first rows of a larger batch get the same zeros. For zeros that go with a row wherever it stands, give
    each row a key of its own with `jax.vmap`.

    Guarantee: row-invariant for a row at its place, for the output and for the gradient of the input. Keys must be of
    threefry2x32, JAX's default.

    Example:
        >>> import jax.numpy as jnp
        >>> import jax
        >>> layer = Dropout(0.5, deterministic=False)
        >>> layer.apply({}, jnp.ones((2, 3)), rngs={"dropout": jax.random.key(0)}).shape
        (2, 3)
    """

"""Dropout."""

from flax import nnx

from ._drop_in import invariant_layer


@invariant_layer
class Dropout(nnx.Dropout):
    """`flax.nnx.Dropout`, batch-invariant: zeros at random.

    Which elements are zero follows the key and the place of the row in the batch, not the length of the batch: with the
    same key the first rows of a larger batch get the same zeros. For zeros that go with a row wherever it stands, give
    each row a key of its own with `jax.vmap`.

    Guarantee: row-invariant for a row at its place, for the output and for the gradient of the input. Keys must be of
    threefry2x32, JAX's default.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Dropout(0.5, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3))).shape
        (2, 3)
    """

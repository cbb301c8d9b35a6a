"""Dropout."""

from flax import nnx

from ._drop_in import invariant_layer


@invariant_layer
class Dropout(nnx.Dropout):
    """`flax.nnx.Dropout`, batch-invariant: zeros at random.

    The zeros depend on the key and the row's position in the batch, not on the batch size: with the same key the first
    rows of a larger batch get the same zeros. For zeros that do not depend on the position, give each row its own key
    with `jax.vmap`.

    Guarantee: row-invariant for a row at its place, for the output and for the gradient of the input. Keys must be of
    threefry2x32, JAX's default.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Dropout(0.5, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3))).shape
        (2, 3)
    """

"""The activation that has a parameter."""

from flax import linen

from ._drop_in import invariant_layer


@invariant_layer
class PReLU(linen.PReLU):
    """`flax.linen.PReLU`, batch-invariant: a ReLU whose slope below zero is learned.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> import jax
        >>> layer, x = PReLU(negative_slope_init=0.25), jnp.array([-4.0, 4.0])
        >>> layer.apply(layer.init(jax.random.key(0), x), x).tolist()
        [-1.0, 4.0]
    """

"""The activation that has a parameter."""

from flax import nnx

from ._drop_in import invariant_layer


@invariant_layer
class PReLU(nnx.PReLU):
    """`flax.nnx.PReLU`, batch-invariant: a ReLU whose slope below zero is learned.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = PReLU(0.25)
        >>> layer(jnp.array([-4.0, 4.0])).tolist()
        [-1.0, 4.0]
    """

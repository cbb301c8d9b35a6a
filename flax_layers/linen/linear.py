"""Linear layers, convolutions and the embedding."""

from flax import linen

from ._drop_in import invariant_layer


@invariant_layer
class Dense(linen.Dense):
    """`flax.linen.Dense`, batch-invariant: a linear map of the last dimension.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer, x = Dense(4), jnp.ones((2, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 4)
    """


@invariant_layer
class DenseGeneral(linen.DenseGeneral):
    """`flax.linen.DenseGeneral`, batch-invariant: a linear map of any dimensions.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer, x = DenseGeneral((4, 5), axis=(0, -1)), jnp.ones((2, 6, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (6, 4, 5)
    """


@invariant_layer
class Einsum(linen.Einsum):
    """`flax.linen.Einsum`, batch-invariant: an einsum of the input with a kernel.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer, x = Einsum((3, 4), "bk,kn->bn"), jnp.ones((2, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 4)
    """


@invariant_layer
class Conv(linen.Conv):
    """`flax.linen.Conv`, batch-invariant: a convolution.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is an example.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer, x = Conv(4, (3,)), jnp.ones((2, 8, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 8, 4)
    """


@invariant_layer
class ConvLocal(linen.ConvLocal):
    """`flax.linen.ConvLocal`, batch-invariant: a convolution whose kernel differs from place to place.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is an example.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer, x = ConvLocal(4, (3,)), jnp.ones((2, 8, 3))
        >>> layer.init(jax.random.key(0), x)["params"]["kernel"].shape
        (8, 9, 4)
    """


@invariant_layer
class ConvTranspose(linen.ConvTranspose):
    """`flax.linen.ConvTranspose`, batch-invariant: a transposed convolution.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is an example.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer, x = ConvTranspose(4, (3,), strides=(2,)), jnp.ones((2, 8, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 16, 4)
    """


@invariant_layer
class Embed(linen.Embed):
    """`flax.linen.Embed`, batch-invariant: looks up rows of a table; `attend` multiplies by the transposed table.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer, tokens = Embed(10, 4), jnp.array([[1, 2, 3]])
        >>> layer.apply(layer.init(jax.random.key(0), tokens), tokens).shape
        (1, 3, 4)
    """

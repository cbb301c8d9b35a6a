"""Linear layers, convolutions and the embedding."""

from flax import nnx

from ._drop_in import invariant_layer


@invariant_layer
class Linear(nnx.Linear):
    """`flax.nnx.Linear`, batch-invariant: a linear map of the last dimension.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Linear(3, 4, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3))).shape
        (2, 4)
    """


@invariant_layer
class LinearGeneral(nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral`, batch-invariant: a linear map of any dimensions.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = LinearGeneral((2, 3), (4, 5), axis=(0, -1), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 6, 3))).shape
        (6, 4, 5)
    """


@invariant_layer
class Einsum(nnx.Einsum):
    """`flax.nnx.Einsum`, batch-invariant: an einsum of the input with a kernel.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Einsum("bk,kn->bn", (3, 4), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3))).shape
        (2, 4)
    """


@invariant_layer
class Conv(nnx.Conv):
    """`flax.nnx.Conv`, batch-invariant: a convolution.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is an example.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Conv(3, 4, (3,), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 8, 3))).shape
        (2, 8, 4)
    """


@invariant_layer
class ConvTranspose(nnx.ConvTranspose):
    """`flax.nnx.ConvTranspose`, batch-invariant: a transposed convolution.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is an example.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = ConvTranspose(3, 4, (3,), strides=(2,), rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 8, 3))).shape
        (2, 16, 4)
    """


@invariant_layer
class Embed(nnx.Embed):
    """`flax.nnx.Embed`, batch-invariant: looks up rows of a table; `attend` multiplies by the transposed table.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Embed(10, 4, rngs=nnx.Rngs(0))
        >>> layer(jnp.array([[1, 2, 3]])).shape
        (1, 3, 4)
    """


@invariant_layer
class LoRA(nnx.LoRA):
    """`flax.nnx.LoRA`, batch-invariant: a linear map of low rank, added to another layer.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = LoRA(3, 2, 4, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3))).shape
        (2, 4)
    """


@invariant_layer
class LoRALinear(nnx.LoRALinear):
    """`flax.nnx.LoRALinear`, batch-invariant: a linear map of the last dimension and one of low rank.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3))).shape
        (2, 4)
    """

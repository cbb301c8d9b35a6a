"""Norms."""

from flax import nnx

from ._drop_in import invariant_layer


@invariant_layer
class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm`, batch-invariant: divides by the root mean square.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = RMSNorm(3, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3))).shape
        (2, 3)
    """


@invariant_layer
class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm`, batch-invariant: subtracts the mean and divides by the standard deviation.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = LayerNorm(3, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3))).shape
        (2, 3)
    """


@invariant_layer
class GroupNorm(nnx.GroupNorm):
    """`flax.nnx.GroupNorm`, batch-invariant: normalises groups of features.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is an example.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3, 4))).shape
        (2, 3, 4)
    """


@invariant_layer
class InstanceNorm(nnx.InstanceNorm):
    """`flax.nnx.InstanceNorm`, batch-invariant: normalises each feature of an example.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is an example.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = InstanceNorm(4, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3, 4))).shape
        (2, 3, 4)
    """


@invariant_layer
class BatchNorm(nnx.BatchNorm):
    """`flax.nnx.BatchNorm`, batch-invariant: normalises by statistics of the batch or running averages.

    Guarantee: row-invariant with `use_running_average=True`. Without, a row depends on its batch by
    definition.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = BatchNorm(3, use_running_average=True, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 3))).shape
        (2, 3)
    """


@invariant_layer
class SpectralNorm(nnx.SpectralNorm):
    """`flax.nnx.SpectralNorm`, batch-invariant: a layer whose weights have spectral norm 1.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = SpectralNorm(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
        >>> layer(jnp.ones((2, 3))).shape
        (2, 4)
    """


@invariant_layer
class WeightNorm(nnx.WeightNorm):
    """`flax.nnx.WeightNorm`, batch-invariant: a layer whose weights have norm 1, times a scale.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = WeightNorm(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
        >>> layer(jnp.ones((2, 3))).shape
        (2, 4)
    """

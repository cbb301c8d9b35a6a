"""Norms."""

from flax import linen

from ._drop_in import invariant_layer


@invariant_layer
class RMSNorm(linen.RMSNorm):
    """`flax.linen.RMSNorm`, batch-invariant: divides by the root mean square.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer, x = RMSNorm(), jnp.ones((2, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 3)
    """


@invariant_layer
class LayerNorm(linen.LayerNorm):
    """`flax.linen.LayerNorm`, batch-invariant: subtracts the mean and divides by the standard deviation.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer, x = LayerNorm(), jnp.ones((2, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 3)
    """


@invariant_layer
class GroupNorm(linen.GroupNorm):
    """`flax.linen.GroupNorm`, batch-invariant: normalises groups of features.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is an example.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer, x = GroupNorm(2), jnp.ones((2, 3, 4))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 3, 4)
    """


@invariant_layer
class InstanceNorm(linen.InstanceNorm):
    """`flax.linen.InstanceNorm`, batch-invariant: normalises each feature of an example.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is an example.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer, x = InstanceNorm(), jnp.ones((2, 3, 4))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 3, 4)
    """


@invariant_layer
class BatchNorm(linen.BatchNorm):
    """`flax.linen.BatchNorm`, batch-invariant: normalises by statistics of the batch or running averages.

    Guarantee: row-invariant with `use_running_average=True`. Without, a row depends on its batch by
    definition.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layer, x = BatchNorm(use_running_average=True), jnp.ones((2, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 3)
    """


@invariant_layer
class SpectralNorm(linen.SpectralNorm):
    """`flax.linen.SpectralNorm`, batch-invariant: a layer whose weights have spectral norm 1.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> import jax
        >>> layer, x = SpectralNorm(linen.Dense(4)), jnp.ones((2, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x, update_stats=False), x, update_stats=False).shape
        (2, 4)
    """


@invariant_layer
class WeightNorm(linen.WeightNorm):
    """`flax.linen.WeightNorm`, batch-invariant: a layer whose weights have norm 1, times a scale.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> import jax
        >>> layer, x = WeightNorm(linen.Dense(4)), jnp.ones((2, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 4)
    """

"""Recurrent cells."""

from flax import linen

from ._drop_in import invariant_layer


@invariant_layer
class LSTMCell(linen.LSTMCell):
    """`flax.linen.LSTMCell`, batch-invariant: a cell with long short-term memory.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> cell, x = LSTMCell(4), jnp.ones((2, 3))
        >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
        >>> cell.apply(cell.init(jax.random.key(1), carry, x), carry, x)[1].shape
        (2, 4)
    """


@invariant_layer
class OptimizedLSTMCell(linen.OptimizedLSTMCell):
    """`flax.linen.OptimizedLSTMCell`, batch-invariant: a cell with long short-term memory and fused products.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> cell, x = OptimizedLSTMCell(4), jnp.ones((2, 3))
        >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
        >>> cell.apply(cell.init(jax.random.key(1), carry, x), carry, x)[1].shape
        (2, 4)
    """


@invariant_layer
class GRUCell(linen.GRUCell):
    """`flax.linen.GRUCell`, batch-invariant: a gated recurrent unit.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> cell, x = GRUCell(4), jnp.ones((2, 3))
        >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
        >>> cell.apply(cell.init(jax.random.key(1), carry, x), carry, x)[1].shape
        (2, 4)
    """


@invariant_layer
class MGUCell(linen.MGUCell):
    """`flax.linen.MGUCell`, batch-invariant: a minimal gated unit.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> cell, x = MGUCell(4), jnp.ones((2, 3))
        >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
        >>> cell.apply(cell.init(jax.random.key(1), carry, x), carry, x)[1].shape
        (2, 4)
    """


@invariant_layer
class SimpleCell(linen.SimpleCell):
    """`flax.linen.SimpleCell`, batch-invariant: a cell with one activation.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> cell, x = SimpleCell(4), jnp.ones((2, 3))
        >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
        >>> cell.apply(cell.init(jax.random.key(1), carry, x), carry, x)[1].shape
        (2, 4)
    """


@invariant_layer
class ConvLSTMCell(linen.ConvLSTMCell):
    """`flax.linen.ConvLSTMCell`, batch-invariant: a cell with long short-term memory and convolutions.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> cell, x = ConvLSTMCell(4, (3,)), jnp.ones((2, 8, 3))
        >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
        >>> cell.apply(cell.init(jax.random.key(1), carry, x), carry, x)[1].shape
        (2, 8, 4)
    """


@invariant_layer
class RNN(linen.RNN):
    """`flax.linen.RNN`, batch-invariant: runs any cell over a sequence.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is a sequence.

    Example:
        >>> import jax.numpy as jnp
        >>> import jax
        >>> layer, x = RNN(GRUCell(4)), jnp.ones((2, 5, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 5, 4)
    """


@invariant_layer
class Bidirectional(linen.Bidirectional):
    """`flax.linen.Bidirectional`, batch-invariant: a sequence run forwards and backwards.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is a sequence.

    Example:
        >>> import jax.numpy as jnp
        >>> import jax
        >>> layer, x = Bidirectional(RNN(GRUCell(4)), RNN(GRUCell(4))), jnp.ones((2, 5, 3))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 5, 8)
    """

"""Recurrent cells."""

from flax import nnx

from ._drop_in import invariant_layer


@invariant_layer
class LSTMCell(nnx.LSTMCell):
    """`flax.nnx.LSTMCell`, batch-invariant: a cell with long short-term memory.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> cell, x = LSTMCell(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
        >>> carry = cell.initialize_carry(x.shape, nnx.Rngs(0))
        >>> cell(carry, x)[1].shape
        (2, 4)
    """


@invariant_layer
class OptimizedLSTMCell(nnx.OptimizedLSTMCell):
    """`flax.nnx.OptimizedLSTMCell`, batch-invariant: a cell with long short-term memory and fused products.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> cell, x = OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
        >>> carry = cell.initialize_carry(x.shape, nnx.Rngs(0))
        >>> cell(carry, x)[1].shape
        (2, 4)
    """


@invariant_layer
class GRUCell(nnx.GRUCell):
    """`flax.nnx.GRUCell`, batch-invariant: a gated recurrent unit.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> cell, x = GRUCell(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
        >>> carry = cell.initialize_carry(x.shape, nnx.Rngs(0))
        >>> cell(carry, x)[1].shape
        (2, 4)
    """


@invariant_layer
class SimpleCell(nnx.SimpleCell):
    """`flax.nnx.SimpleCell`, batch-invariant: a cell with one activation.

    Guarantee: row-invariant, for the output and for the gradient of the input.

    Example:
        >>> import jax.numpy as jnp
        >>> cell, x = SimpleCell(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
        >>> carry = cell.initialize_carry(x.shape, nnx.Rngs(0))
        >>> cell(carry, x)[1].shape
        (2, 4)
    """


@invariant_layer
class RNN(nnx.RNN):
    """`flax.nnx.RNN`, batch-invariant: runs any cell over a sequence.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is a sequence.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = RNN(GRUCell(3, 4, rngs=nnx.Rngs(0)))
        >>> layer(jnp.ones((2, 5, 3))).shape
        (2, 5, 4)
    """


@invariant_layer
class Bidirectional(nnx.Bidirectional):
    """`flax.nnx.Bidirectional`, batch-invariant: a sequence run forwards and backwards.

    Guarantee: row-invariant, for the output and for the gradient of the input. A row is a sequence.

    Example:
        >>> import jax.numpy as jnp
        >>> layer = Bidirectional(*(RNN(GRUCell(3, 4, rngs=nnx.Rngs(i))) for i in range(2)))
        >>> layer(jnp.ones((2, 5, 3))).shape
        (2, 5, 8)
    """

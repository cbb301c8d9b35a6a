"""A row of a softmax or of an element-wise kernel on a Hopper GPU, with the operations on its scalars and columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.parts.hopper.arithmetic import exponential, logarithm, product, quotient, strided


@dataclass(frozen=True)
class OnlineRow:
    """The current row of a kernel, with the operations on its scalars and columns.

    Attributes:
        index: Index of the row.
        source: The array of all rows.
        given: (M, 1) input arrays.
        numbers: (M, 1) results.
        writes_numbers: Whether this block writes the row's scalars.
        interpret: Whether the interpreter runs the kernel.
    """

    index: Any
    source: Any
    given: Sequence[Any]
    numbers: Sequence[Any]
    writes_numbers: Any
    interpret: Any

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Multiplies columns or scalars; rounded, never part of a fused multiply-add."""
        return product(jnp.asarray(a), jnp.asarray(b), self.interpret)

    def quotient(self, a: float | jax.Array, b: float | jax.Array) -> jax.Array:
        """Divides two scalars, correctly rounded."""
        return quotient(jnp.float32(a), jnp.float32(b), self.interpret)

    def exponential(self, x: jax.Array, *, exact: bool = False) -> jax.Array:
        """Returns exp(x); see `pallas_kernels.parts.hopper.arithmetic`."""
        return exponential(x, self.interpret, exact=exact)

    def logarithm(self, x: jax.Array) -> jax.Array:
        """Returns the natural logarithm of a scalar."""
        return logarithm(x)

    def spread(self, number: jax.Array, columns: jax.Array) -> jax.Array:
        """Broadcasts a float32 scalar to the shape and layout of columns (no change if `columns` is a scalar)."""
        if not columns.shape:
            return number
        wide = jnp.broadcast_to(number, columns.shape)
        return wide if self.interpret else plgpu.layout_cast(wide, strided(columns.shape[0]))

    def known(self, number: int) -> jax.Array:
        """Returns one of the row's input scalars."""
        return self.given[number][self.index, 0]

    def pick(self, column: jax.Array) -> jax.Array:
        """Returns the row's element in a column, as float32."""
        value: jax.Array = self.source[self.index, column]
        return value.astype(jnp.float32)

    def put(self, number: int, value: jax.Array) -> None:
        """Writes one of the row's scalar results."""

        def write() -> None:
            self.numbers[number][self.index, 0] = value

        if self.writes_numbers is True:
            write()
        else:
            pl.when(self.writes_numbers)(write)

"""Copying rows by number, as a primitive."""

from typing import TYPE_CHECKING, Final

import jax
import jax.numpy as jnp

from bijax.core.on_first_use import on_first_use
from bijax.dispatch.rows import Orders, define_row_kernel
from pallas_kernels.ops.pick import portable

if TYPE_CHECKING:
    from pallas_kernels.ops.pick import hopper
else:
    hopper = on_first_use("pallas_kernels.ops.pick.hopper")

_kernel: Final = define_row_kernel(
    "pick_rows", portable.pick_rows, lambda: hopper.pick_rows, orders=Orders(functions=True), folds=False
)


def pick_rows(x: jax.Array, place: jax.Array) -> jax.Array:
    """Returns the rows of x (S, C) at `place` (R,) int32, zeros where it is negative."""
    if 0 in x.shape:
        return jnp.zeros((place.size, x.shape[1]), x.dtype)
    return _kernel({"x": x, "place": place[:, None]})[0]

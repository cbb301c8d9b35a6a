"""A launch of a small kernel, for tests."""

from typing import Any, Final

import jax

from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.target import Target

X: Final = jax.ShapeDtypeStruct((100,), "float32")


def multiply_add(x: jax.Array, y: jax.Array, target: str, fuses: bool) -> jax.Array:
    from tests.jax_triton.small_kernel import multiply_add

    out = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    options: dict[str, Any] = {"warps": 4, "stages": 1, "fuses": fuses, "constants": {"BLOCK": 64}}
    grid = (-(-x.size // 64),)
    (z,) = launch(multiply_add, x, y, x.size, target=Target.parse(target), out=out, grid=grid, **options)
    return z

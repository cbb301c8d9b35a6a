"""Mosaic GPU operations inside a Pallas kernel: the only module that uses JAX's untyped or private API for them."""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu

Body = Callable[..., Any]


def inline(*arguments: Any, result: Any = None) -> Callable[[Body], Body]:
    """Returns a decorator that makes a function of Mosaic GPU values callable on Pallas references and arrays.

    Args:
        *arguments: A `RefType` for each reference and a layout for each array, or pytrees of them.
        result: The type of the result, from `held`, or a pytree of them; None for a function that returns nothing.
    """

    def decorate(body: Body) -> Body:
        inlined = plgpu.inline_mgpu(arg_types=arguments, return_type=result)
        return inlined(lambda _, *values: body(*values))

    return decorate


def held(shape: tuple[int, ...], layout: Any, dtype: Any = jnp.float32) -> Any:
    """Returns the type of an array that a warpgroup holds in registers."""
    return plgpu.ShapeDtypeStruct(shape, jnp.dtype(dtype), layout=layout)


def fragmented(registers: Any, layout: Any, signed: bool | None = None) -> Any:
    """Returns an array made from registers, an object array of the shape that the layout requires.

    Args:
        registers: The registers of a thread.
        layout: Mosaic GPU's layout.
        signed: For integers, whether they are signed; None for floats.
    """
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)

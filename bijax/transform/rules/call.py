"""A call of a primitive that is being lowered, and functions that lower it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.mlir import lower_with_sharding_in_types

from bijax.core.lowering_cache.lowered_forms import lower_once
from bijax.core.tag import kernel_code
from bijax.lax.dot_general import Arrangement
from bijax.transform.hook._jax_private import Context, Rule
from bijax.transform.hook.state import Request
from pallas_kernels.runtime.own_settings import of_width, without_mesh


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a primitive that is being lowered for one platform.

    Attributes:
        primitive: The primitive.
        name: Name of the operation (`rules.names.rule_name`).
        ctx: Context of the lowering rule.
        operands: The operands, values of the program that is being lowered.
        parameters: Parameters of the primitive.
        platform: The platform.
        request: The request.
        stock: JAX's rule for the platform.
        general: JAX's rule for all platforms, or else `stock`.
        arrangement: The memory layout of a product's operands.
    """

    primitive: Primitive
    name: str
    ctx: Context
    operands: Sequence[Any]
    parameters: dict[str, Any]
    platform: str
    request: Request
    stock: Rule
    general: Rule
    arrangement: Arrangement | None = None

    @functools.cached_property
    def dtypes(self) -> tuple[Any, ...]:
        """Dtypes of the operands and results that have a dtype."""
        return tuple(a.dtype for a in (*self.ctx.avals_in, *self.ctx.avals_out) if hasattr(a, "dtype"))

    def as_it_is(self, **parameters: Any) -> Sequence[Any]:
        """Lowers the call by JAX's own rule; programs that the rule traces are left to XLA.

        Args:
            **parameters: Parameters that override those of the call.
        """
        with kernel_code():
            return self.stock(self.ctx, *self.operands, **{**self.parameters, **parameters})

    def traced(self, function: Callable[..., Any], **parameters: Any) -> Sequence[Any]:
        """Lowers a function of arrays instead of the primitive.

        Args:
            function: Takes the operands, and the parameters as keyword arguments.
            **parameters: Parameters in addition to those of the call.
        """
        several = self.primitive.multiple_results
        return traced(function, self.ctx, self.operands, {**self.parameters, **parameters}, several)


def traced(
    function: Callable[..., Any],
    ctx: Context,
    operands: Sequence[Any],
    parameters: dict[str, Any],
    multiple_results: bool = False,
) -> Sequence[Any]:
    """Lowers a function of arrays instead of a primitive."""
    # Shardings and the axes of manual meshes belong to the primitive's values, not to the tiles inside.
    plain = [jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
    explicit = any(is_explicit(a) for a in (*ctx.avals_in, *ctx.avals_out))
    parameters = {name: value for name, value in parameters.items() if name != "out_sharding"}
    # A program may be lowered after the block that allowed its 64 bits has ended.
    with of_width((*plain, *ctx.avals_out)), kernel_code(), without_mesh():
        lowered = lower_once(function, multiple_results=multiple_results)(
            ctx.replace(avals_in=plain), *operands, **parameters
        )
    if not explicit:
        return lowered
    return [lower_with_sharding_in_types(ctx, v, a) for v, a in zip(lowered, ctx.avals_out, strict=True)]


def is_explicit(aval: Any) -> bool:
    """Returns whether the type of a value says how it is sharded (explicit meshes)."""
    mesh = getattr(getattr(aval, "sharding", None), "mesh", None)
    return mesh is not None and not mesh.empty and not mesh.are_all_axes_auto and not mesh._any_axis_manual

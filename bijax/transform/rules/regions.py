"""Programs that primitives carry into a region of one instruction: the update of a scatter, the body of a reduction.

XLA compiles such a region scalar by scalar with separate emitters, not all of which support the operations of fences.
So a program is either taken out of the region and becomes part of the surrounding program, where every rule applies,
or the primitive is left to XLA, and its region is not changed.
"""

from collections.abc import Callable
from typing import Any, Final

import jax
from jax import lax

from bijax.core.tag import kernel_code
from bijax.transform.hook.state import Request, tagged

IN_REGIONS: Final = {
    **dict.fromkeys(("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul"), ("update_jaxpr",)),
    **dict.fromkeys(("scatter-sub", "scatter_apply"), ("update_jaxpr",)),
    **dict.fromkeys(("reduce", "reduce_window"), ("jaxpr",)),
    "select_and_scatter": ("select_jaxpr", "scatter_jaxpr"),
}
"""Parameters with programs that are lowered into a region of one instruction."""

TAKEN_OUT: Final = {
    "scatter_apply": "its function is taken out of XLA's scatter: gathered, applied as often as indices meet, written",
    "reduce": "its function is taken out of XLA's reduction, and applied by a fixed tree of neighbours",
    "reduce_window": "its function is taken out of XLA's reduction, and applied upwards in each window",
}
"""Operations that carry a user's program, which becomes part of the surrounding program, and the evidence."""

_CONSTANTS: Final = {"scatter_apply": "update_consts", "reduce_window": "consts"}
_UNUSED: Final = frozenset({"computation", "update_consts", "consts"})


def without_region(
    name: str, function: Callable[..., Any], parameters: dict[str, Any], request: Request
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns a replacement that takes the program of a primitive as a function, and its other parameters.

    Args:
        name: Name of the operation, one of `TAKEN_OUT`.
        function: The replacement; it takes the keyword argument `program`, a function of scalars.
        parameters: Parameters of the primitive.
        request: The request for the program's operations, unless they carry tags.
    """
    (key,) = IN_REGIONS[name]
    jaxpr = parameters[key]
    constants = parameters[_CONSTANTS[name]] if name in _CONSTANTS else jaxpr.consts

    def program(*scalars: jax.Array) -> tuple[jax.Array, ...]:
        with tagged(request):
            return tuple(jax.core.eval_jaxpr(jaxpr, constants, *scalars))

    def run(*operands: jax.Array, **others: Any) -> Any:
        return function(*operands, program=program, **others)

    return run, {k: v for k, v in parameters.items() if k != key and k not in _UNUSED}


def without_programs(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a primitive whose name defines its program, without the program."""
    return {k: v for k, v in parameters.items() if k not in IN_REGIONS.get(name, ())}


def with_plain_region(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a primitive left to XLA, so that nothing in its region is fenced or replaced."""
    return {k: _as_kernel_code(v) if k in IN_REGIONS.get(name, ()) else v for k, v in parameters.items()}


def _as_kernel_code(value: Any) -> Any:
    """Returns a program with all its equations tagged as kernel code; anything else unchanged."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_as_kernel_code, value))
    if not hasattr(value, "eqns"):
        return value
    with kernel_code():
        context = jax.make_jaxpr(lax.neg)(0.0).eqns[0].ctx
    equations = [
        e.replace(ctx=context, params={k: _as_kernel_code(v) for k, v in e.params.items()}) for e in value.eqns
    ]
    return value.replace(eqns=equations)

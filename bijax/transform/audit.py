"""Looking at every operation of a program before it runs."""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax

from bijax import hlo
from bijax.hlo._trace import traced
from bijax.ops._tag import KERNEL, TAG
from bijax.transform._audit_flops import flops
from bijax.transform._audit_report import Audit, Decision, Operation
from bijax.transform._audit_walk import Equation, equations
from bijax.transform._state import of_equation
from bijax.transform._tables import ORDER_FREE, OWN_CONTRACT, PLATFORMS, Kind, table_name, verdict

_BELIEVED: Final = (ORDER_FREE, OWN_CONTRACT)


def audit(
    fn: Callable[..., Any], *args: Any, compiled: bool = False, platform: str | None = None, **kwargs: Any
) -> Audit:
    """Says of every operation of a program whether its bits can follow the size of the batch, and why.

    The program is traced, not run. Parts under `bijax.invariant` (or in its mode) are judged as they will be lowered;
    elsewhere the operations are XLA's.

    Args:
        fn: A function, jitted or not, made invariant or not, or a callable module. Of a Flax nnx model that changes
            its state while it runs, pass the call, `audit(lambda m, x: m(x), model, x)`; the model itself as `fn`
            raises Flax's `TraceContextError`.
        *args: Its arguments: arrays or `jax.ShapeDtypeStruct`. Static ones, of a function
            that is not jitted with them, go into a `functools.partial`.
        compiled: Whether to look at the compiled program too, with `bijax.hlo.inspect`; for another platform than the
            present one, at the program that is handed to its compiler.
        platform: "cpu" or "cuda"; None for the present one.
        **kwargs: Its keyword arguments. For arguments named `compiled` or `platform`, pass a `functools.partial`.

    Returns:
        The operations with their verdicts; `variant` holds those to look at.

    Raises:
        TypeError: If `fn` is not callable.
        ValueError: If there are no rules for the platform.

    Example:
        >>> import bijax, jax.numpy as jnp
        >>> def f(x, w):
        ...     return -(x @ w)
        >>> x, w = jnp.ones((8, 64)), jnp.ones((64, 64))
        >>> [operation.primitive for operation in audit(f, x, w).variant]
        ['dot_general']
        >>> audit(bijax.invariant(f), x, w).invariant
        True
    """
    if not callable(fn):
        raise TypeError(f"bijax.audit: expected a function, got {type(fn).__name__}.")
    platform = _platform(platform)
    stage = traced(fn, args, kwargs)
    # What JAX lowers: operations of a higher level, such as jnp.searchsorted, are expanded first.
    program = getattr(stage, "lojax", stage).jaxpr
    operations = _operations([_operation(e, platform) for e in equations(program, platform)])
    report = None
    if compiled and not any(o.verdict == "refused" for o in operations):
        here = platform == _present()
        look = functools.partial(hlo.inspect if here else functools.partial(hlo.inspect_for, platform), fn)
        report = look(*args, **kwargs)
    return Audit(operations, platform, sum(o.flops for o in operations), report)


def _platform(given: str | None) -> str:
    platform = _present() if given is None else given
    if platform not in PLATFORMS:
        raise ValueError(f"bijax.audit: expected the platform {' or '.join(PLATFORMS)}, got {platform!r}.")
    return platform


def _present() -> str:
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


def _operation(equation: Equation, platform: str) -> Operation:
    decision, evidence = _decide(equation, platform)
    operands, results = (", ".join(_short(a) for a in group) for group in (equation.operands, equation.results))
    return Operation(
        verdict=decision,
        primitive=equation.name,
        evidence=evidence,
        line=equation.line,
        shapes=f"{operands} -> {results}",
        count=1,
        flops=flops(equation),
        share=0.0,
    )


def _decide(equation: Equation, platform: str) -> tuple[Decision, str]:
    if equation.metadata.get(TAG) == KERNEL:
        return "invariant", "code of a kernel of bijax"
    request = of_equation(equation.metadata)
    dtypes = tuple(a.dtype for a in (*equation.operands, *equation.results) if hasattr(a, "dtype"))
    if equation.name == "pallas_call" and equation.parameters.get("interpret"):
        why = "interpreted: its body is lowered as operations of XLA"
        return ("replaced", f"{why}, each made invariant") if request.enabled else ("variant", why)
    found = verdict(table_name(equation.name, equation.parameters), dtypes, platform, request.allowed)
    match found.kind:
        case Kind.KEEP if equation.name in request.allowed or found.evidence in _BELIEVED:
            return "believed", found.evidence
        case Kind.KEEP:
            return "invariant", found.evidence
        case Kind.RECURSE:  # without a program that can be seen: its rule makes it up at lowering
            return ("replaced", found.evidence) if request.enabled else ("variant", "it is expanded at lowering")
        case Kind.REPLACE if request.enabled:
            return "replaced", found.evidence
        case Kind.REPLACE:
            return "variant", f"left to XLA; under bijax.invariant: {found.evidence}"
    return ("refused" if request.enabled else "variant"), found.evidence


def _operations(single: list[Operation]) -> tuple[Operation, ...]:
    """Puts operations of one line that are alike together."""
    groups: dict[tuple[str, ...], list[Operation]] = {}
    for operation in single:
        key = (operation.verdict, operation.primitive, operation.evidence, operation.line)
        groups.setdefault(key, []).append(operation)
    total = sum(o.flops for o in single) or 1
    return tuple(
        Operation(
            verdict=group[0].verdict,
            primitive=group[0].primitive,
            evidence=group[0].evidence,
            line=group[0].line,
            shapes=group[0].shapes,
            count=len(group),
            flops=(work := sum(o.flops for o in group)),
            share=work / total,
        )
        for group in groups.values()
    )


def _short(aval: Any) -> str:
    return str(aval.str_short(short_dtypes=True)) if hasattr(aval, "str_short") else str(aval)

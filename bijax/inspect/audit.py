"""Audits every operation of a program before it runs."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import jax

from bijax import hlo
from bijax.core.architecture import lowering_for
from bijax.core.checks import check_callable, flag
from bijax.core.tag import KERNEL, TAG
from bijax.hlo._trace import traced
from bijax.inspect.audit_flops import flops
from bijax.inspect.audit_report import Audit, Decision, Operation
from bijax.inspect.gathered import find_gathered
from bijax.inspect.rows_report import follow_rows
from bijax.transform.hook.callbacks import GUARDED, RAISING
from bijax.transform.hook.entered import why_not
from bijax.transform.hook.state import Request, of_equation
from bijax.transform.rules._kept import ORDER_FREE, OWN_CONTRACT
from bijax.transform.rules.equations import Equation, equations
from bijax.transform.rules.names import rule_name
from bijax.transform.rules.registry import PLATFORMS, Kind, Verdict, verdict
from bijax.transform.rules.uses import uses
from pallas_kernels.errors import UnsupportedError

_BELIEVED: Final = (ORDER_FREE, OWN_CONTRACT)


def audit(
    fn: Callable[..., Any],
    *args: Any,
    batch_axes: Any = None,
    compiled: bool = False,
    platform: str | None = None,
    architecture: str | None = None,
    **kwargs: Any,
) -> Audit:
    """Reports, for every operation of a program, whether its bits can depend on the size of the batch, and why.

    The program is traced, not run. Parts under `bijax.invariant` (or in its mode) are judged as they will be lowered;
    elsewhere XLA compiles the operations.

    Args:
        fn: A function, jitted or not, made invariant or not, or a callable module. For a Flax nnx model that changes
            its state while it runs, pass the call, `audit(lambda m, x: m(x), model, x)`; the model itself as `fn`
            raises Flax's `TraceContextError`.
        *args: Its arguments: arrays or `jax.ShapeDtypeStruct`. Static ones, of a function
            that is not jitted with them, go into a `functools.partial`. Where some are sharded, `gathered` of the
            result lists the operations that need them whole.
        batch_axes: The batch axis of each argument, as in `jax.vmap`'s `in_axes`: an int for all arrays, or a tuple
            with an int, None or a pytree of them for each positional argument (keyword arguments then have no rows).
            With it the rows are followed through the program, and `rows` of the result says where they meet.
        compiled: Whether to inspect the compiled program too, with `bijax.hlo.inspect`; for a platform other than the
            current one, the input of its compiler.
        platform: "cpu" or "cuda"; None for the current one.
        architecture: Architecture of the GPU, such as "sm_90"; None for this process's, or the one named by
            `bijax.lowering_for`. Without one, the contracts of a program for CUDA are not reported.
        **kwargs: Its keyword arguments. For arguments named `batch_axes`, `compiled`, `platform` or `architecture`,
            pass a `functools.partial`.

    Returns:
        The operations with their verdicts; `variant` holds those to check.

    Raises:
        TypeError: If `fn` is not callable, or `batch_axes` holds something other than ints and None.
        ValueError: If there are no rules for the platform, the architecture is invalid or named for a CPU, or
            `batch_axes` does not fit the arguments or marks fewer than 2 rows.
        UnsupportedError: If a program for CUDA is to be lowered (`compiled`) and its architecture is unknown.

    Example:
        >>> import bijax, jax.numpy as jnp
        >>> def f(x, w):
        ...     return -(x @ w)
        >>> x, w = jnp.ones((8, 64)), jnp.ones((64, 64))
        >>> [operation.primitive for operation in audit(f, x, w).variant]
        ['dot_general']
        >>> audit(bijax.invariant(f), x, w).invariant
        True
        >>> audit(bijax.invariant(lambda x: x - x.mean(0)), x, batch_axes=0).rows.verdict
        'mixes rows'
    """
    check_callable("bijax.audit", fn)
    compiled = flag("bijax.audit", "compiled", compiled)
    platform = platform_of("bijax.audit", platform, architecture)
    with contextlib.nullcontext() if architecture is None else lowering_for(architecture):
        program = program_of(fn, args, kwargs)
        rows = None if batch_axes is None else follow_rows(program, args, kwargs, batch_axes, platform)
        operations = _operations([operation for operation, *_ in looked_at(program, platform, strict=False)])
        report = None
        if compiled and not any(o.verdict == "refused" for o in operations):
            here = platform == _present()
            look = functools.partial(hlo.inspect if here else functools.partial(hlo.inspect_for, platform), fn)
            report = look(*args, **kwargs)
        gathered = find_gathered(program, (args, kwargs), platform)
    return Audit(operations, platform, sum(o.flops for o in operations), report, rows, gathered)


def program_of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the program of a call as JAX lowers it, with operations such as `jnp.searchsorted` expanded.

    Args:
        fn: As for `audit`, like the following ones.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    stage = traced(fn, args, kwargs)
    return getattr(stage, "lojax", stage).jaxpr


def looked_at(program: Any, platform: str, *, strict: bool) -> Iterator[tuple[Operation, tuple[str, ...], Request]]:
    """Yields every operation of a program, its contracts from `uses`, and its request.

    Args:
        program: The program, from `program_of`.
        platform: The platform.
        strict: Whether to raise where contracts cannot be found.

    Raises:
        UnsupportedError: If `strict`, as in `uses`.
    """
    known: dict[Any, tuple[str, ...]] = {}
    for equation in equations(program, platform):
        operation = _operation(equation, platform)
        terms: tuple[str, ...] = ()
        if operation.verdict not in ("variant", "refused"):
            with contextlib.nullcontext() if strict else contextlib.suppress(UnsupportedError):
                terms = _uses(equation, platform, known)
        ids = tuple(sorted({term.partition(" ")[0] for term in terms}))
        yield dataclasses.replace(operation, contracts=ids), terms, of_equation(equation.metadata)


def _uses(equation: Equation, platform: str, known: dict[Any, tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the result of `uses`, cached for identical operations."""
    avals = tuple(_short(a) for a in (*equation.operands, *equation.results))
    key = (equation.name, avals, tuple(equation.metadata.items()), str(sorted(equation.parameters.items(), key=str)))
    if key not in known:
        known[key] = uses(equation, platform)
    return known[key]


def platform_of(op: str, given: str | None, architecture: str | None) -> str:
    """Returns the platform that a caller named, or the current one.

    Args:
        op: Name of the caller's function, for the error.
        given: The name, or None.
        architecture: The architecture that the caller named, or None.

    Raises:
        ValueError: If there are no rules for the platform, or it has no such architectures.
    """
    platform = _present() if given is None else given
    if not isinstance(platform, str) or platform not in PLATFORMS:
        raise ValueError(f"{op}: expected the platform {' or '.join(PLATFORMS)}, got {platform!r}.")
    if architecture is not None and platform != "cuda":
        raise ValueError(
            f"{op}: architecture={architecture!r} is that of a GPU; expected platform='cuda' with it, got a program for"
            f" {platform!r}."
        )
    return platform


def _present() -> str:
    backend = jax.default_backend()
    return "cuda" if backend == "gpu" else backend


def _operation(equation: Equation, platform: str) -> Operation:
    judged = _judge(equation, platform)
    operands, results = (", ".join(_short(a) for a in group) for group in (equation.operands, equation.results))
    return Operation(
        verdict=judged.verdict,
        primitive=equation.name,
        evidence=judged.evidence,
        line=equation.line,
        shapes=f"{operands} -> {results}",
        count=1,
        flops=flops(equation),
        share=0.0,
        unknown=judged.verdict == "believed" and judged.evidence != ORDER_FREE,
        allowed=judged.allowed,
        refusable=judged.refusable,
    )


class _Judgement(NamedTuple):
    """The fields of an `Operation` that its rule decides."""

    verdict: Decision
    evidence: str
    allowed: bool = False
    refusable: bool = False


def _judge(equation: Equation, platform: str) -> _Judgement:
    if equation.metadata.get(TAG) == KERNEL:
        return _Judgement("invariant", "code of a kernel of bijax")
    request = of_equation(equation.metadata)
    dtypes = tuple(a.dtype for a in (*equation.operands, *equation.results) if hasattr(a, "dtype"))
    name = rule_name(equation.name, equation.parameters, equation.operands)
    found = verdict(name, dtypes, platform, request.allowed)
    if found.allowed:
        return _Judgement("believed", found.evidence, allowed=True)
    return _judge_by_rule(equation, found, enabled=request.enabled)


def _judge_by_rule(equation: Equation, found: Verdict, *, enabled: bool) -> _Judgement:
    if equation.name == "pallas_call" and equation.parameters.get("interpret"):
        why = "interpreted: its body is lowered as operations of XLA"
        return _Judgement("replaced", f"{why}, each made invariant") if enabled else _Judgement("variant", why)
    guarded = equation.name == RAISING and equation.conditional
    if guarded and enabled:
        return _Judgement("invariant", GUARDED)
    match found.kind:
        case Kind.KEEP if found.evidence in _BELIEVED:
            return _Judgement("believed", found.evidence)
        case Kind.KEEP:
            return _Judgement("invariant", found.evidence)
        case Kind.RECURSE:  # without a visible program: its rule creates it at lowering
            why = "it is expanded at lowering"
            return _Judgement("replaced", found.evidence) if enabled else _Judgement("variant", why)
        case Kind.REPLACE if enabled:
            return _Judgement("replaced", found.evidence)
        case Kind.REPLACE:
            return _Judgement("variant", f"left to XLA; under bijax.invariant: {found.evidence}")
    why = why_not(equation.by_itself) if found.kind is Kind.ENTER else found.evidence
    if enabled or guarded:
        return _Judgement("refused" if enabled else "variant", why, refusable=enabled)
    return _Judgement("variant", f"bijax.invariant refuses it: {why}", refusable=True)


def _operations(single: list[Operation]) -> tuple[Operation, ...]:
    """Merges identical operations of one line."""
    groups: dict[tuple[str, ...], list[Operation]] = {}
    for operation in single:
        key = (operation.verdict, operation.primitive, operation.evidence, operation.line, *operation.contracts)
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
            contracts=group[0].contracts,
            unknown=group[0].unknown,
            allowed=group[0].allowed,
            refusable=group[0].refusable,
        )
        for group in groups.values()
    )


def _short(aval: Any) -> str:
    return str(aval.str_short(short_dtypes=True)) if hasattr(aval, "str_short") else str(aval)

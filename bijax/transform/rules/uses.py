"""Finds the contracts of an operation by tracing its lowering."""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from bijax.core.contracts import Use, recording
from bijax.core.primitive import KERNELS
from bijax.core.tag import KERNEL, TAG, kernel_code
from bijax.transform.hook.state import of_equation
from bijax.transform.rules.equations import Equation, equations
from bijax.transform.rules.names import rule_name
from bijax.transform.rules.registry import verdict
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.runtime.own_settings import of_width, without_mesh

Uses = Callable[[Equation, str], Iterator[Use]]


def uses(equation: Equation, platform: str) -> tuple[str, ...]:
    """Returns the contracts of an operation, with the dtypes of its operands and results.

    Args:
        equation: The operation.
        platform: "cpu" or "cuda"; for the latter the architecture must be known (`bijax.lowering_for`).

    Returns:
        Texts "ID DTYPES -> DTYPES", sorted; none for operations that are exact in any order.

    Raises:
        UnsupportedError: If the architecture is unknown, the operands have no kernel, or a shape is unknown.
    """
    groups = equation.operands, equation.results
    operands, results = (",".join(str(getattr(a, "dtype", a)) for a in group) for group in groups)
    own = f"{operands} -> {results}"
    return tuple(sorted({f"{use.contract} {use.operation or own}" for use in kernels_of(equation, platform)}))


def kernels_of(equation: Equation, platform: str) -> Iterator[Use]:
    """Yields the contracts with the kernels that receive them, possibly repeated. Arguments as for `uses`."""
    name = rule_name(equation.name, equation.parameters, equation.operands)
    if name in KERNELS:
        if platform in KERNELS[name]:
            yield from _in_function(KERNELS[name][platform], equation, equation.parameters, platform)
        return
    request = of_equation(equation.metadata)
    if not request.enabled or equation.metadata.get(TAG) == KERNEL:
        return
    rule = verdict(name, dtypes_of(equation), platform, request.allowed).rule
    if rule is not None and rule.uses is not None:
        yield from rule.uses(equation, platform)


def dtypes_of(equation: Equation) -> tuple[Any, ...]:
    """Returns the dtypes of the operands and results that have a dtype."""
    return tuple(a.dtype for a in (*equation.operands, *equation.results) if hasattr(a, "dtype"))


def fixed(contract: Any) -> Uses:
    """Returns `Rule.uses` for operations that need no tracing, or cannot be traced alone."""
    return lambda equation, _: iter([Use(contract.id, tuple(map(str, dtypes_of(equation))), "")])


def by_tracing(function: Callable[[str], Callable[..., Any]]) -> Uses:
    """Returns `Rule.uses` for operations replaced by a function whose kernels record their contracts.

    Args:
        function: Returns the function for a platform.
    """

    def found(equation: Equation, platform: str) -> Iterator[Use]:
        parameters = {key: value for key, value in equation.parameters.items() if key != "out_sharding"}
        return _in_function(function(platform), equation, parameters, platform)

    return found


def _in_function(
    function: Callable[..., Any], equation: Equation, parameters: dict[str, Any], platform: str
) -> Iterator[Use]:
    """Yields the contracts in a function, and in the kernels that it calls."""
    operands = [jax.core.ShapedArray(a.shape, a.dtype) for a in equation.operands]
    if not all(isinstance(n, int) for a in operands for n in a.shape):
        raise UnsupportedError(f"{equation.name}: expected concrete shapes, got {', '.join(map(str, operands))}.")

    def run(*arrays: jax.Array) -> Any:  # a new function, that JAX has not traced yet
        return function(*arrays, **parameters)

    with of_width((*operands, *equation.results)), kernel_code(), without_mesh(), recording() as found:
        traced = jax.make_jaxpr(run)(*operands)
    yield from found
    for inner in equations(traced, platform):
        if inner.name in KERNELS:
            yield from kernels_of(inner, platform)

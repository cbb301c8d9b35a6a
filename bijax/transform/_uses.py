"""Under which contracts an operation is computed, found by tracing what it will be lowered to."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import jax

from bijax.core.contracts import Use, recording
from bijax.core.primitive import KERNELS
from bijax.core.tag import KERNEL, TAG, kernel_code
from bijax.transform._audit_walk import Equation, equations
from bijax.transform._replacements import replacement
from bijax.transform._state import Request, of_equation, tagged
from bijax.transform._tables import ORDERED, RACING, VECTORS, Kind, table_name, verdict
from bijax.transform.expansions import Expansion, expansion_of
from bijax.transform.expansions._lapack import contract_of as lapack_contract_of
from pallas_kernels.contract import XLA_FUNCTIONS, FoldContract, PairContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.xla.own_settings import of_width, without_mesh

_MADE_UP: Final = ("random_gamma", "regularized_incomplete_beta")
"""Operations whose own rules make up a program when they are lowered."""

_STATIC: Final[dict[str, Any]] = {
    **dict.fromkeys(VECTORS, XLA_FUNCTIONS),
    **dict.fromkeys(("psum", "psum_invariant", "reduce_scatter"), FoldContract("devices")),
    **dict.fromkeys(_MADE_UP, XLA_FUNCTIONS),
    "reduce": PairContract(),
    "reduce_window": FoldContract("window"),
}
"""Contracts of operations that need no tracing, or cannot be traced alone."""


def uses(equation: Equation, platform: str) -> tuple[str, ...]:
    """Returns the contracts under which an operation is computed, with the dtypes of its operands and results.

    Args:
        equation: The operation.
        platform: "cpu" or "cuda"; for the latter the architecture must be known (`bijax.lowering_for`).

    Returns:
        Texts "ID DTYPES -> DTYPES", sorted; none for operations that are exact in any order.

    Raises:
        UnsupportedError: If the architecture is not known, there is no kernel for the operands, or a shape is not.
    """
    groups = equation.operands, equation.results
    operands, results = (",".join(str(getattr(a, "dtype", a)) for a in group) for group in groups)
    return tuple(sorted({f"{use.contract} {operands} -> {results}" for use in kernels_of(equation, platform)}))


def kernels_of(equation: Equation, platform: str) -> Iterator[Use]:
    """Yields the contracts with the kernels that are given them; some more than once. Arguments as for `uses`."""
    name = table_name(equation.name, equation.parameters, equation.operands)
    if name in KERNELS:
        if platform in KERNELS[name]:
            yield from _traced(KERNELS[name][platform], equation, equation.parameters, platform)
        return
    request = of_equation(equation.metadata)
    if not request.enabled or equation.metadata.get(TAG) == KERNEL:
        return
    dtypes = tuple(a.dtype for a in (*equation.operands, *equation.results) if hasattr(a, "dtype"))
    if name not in _MADE_UP and verdict(name, dtypes, platform, request.allowed).kind is not Kind.REPLACE:
        return
    if platform == "cpu" and (lapack := lapack_contract_of(name, equation.operands, equation.parameters)):
        yield Use(lapack.id, tuple(map(str, dtypes)), "")
    elif (expansion := expansion_of(name, dtypes)) is not None:
        yield from _in_expansion(expansion, equation, request, platform)
    elif name in _STATIC:
        yield Use(_STATIC[name].id, tuple(map(str, dtypes)), "")
    elif name in ORDERED or name in RACING:
        parameters = {key: value for key, value in equation.parameters.items() if key != "out_sharding"}
        yield from _traced(replacement(name, platform), equation, parameters, platform)


def _in_expansion(expansion: Expansion, equation: Equation, request: Request, platform: str) -> Iterator[Use]:
    """Yields the contracts of the operations as which an operation is written out."""

    def run(*arrays: jax.Array) -> Any:
        with tagged(request):
            return expansion(*arrays, **equation.parameters)

    operands = [jax.core.ShapedArray(a.shape, a.dtype) for a in equation.operands]
    with of_width((*operands, *equation.results)), kernel_code():
        traced = jax.make_jaxpr(run)(*operands)
    for inner in equations(traced, platform):
        yield from kernels_of(inner, platform)


def _traced(
    function: Callable[..., Any], equation: Equation, parameters: dict[str, Any], platform: str
) -> Iterator[Use]:
    """Yields the contracts in a function, and those of the kernels that it calls."""
    operands = [jax.core.ShapedArray(a.shape, a.dtype) for a in equation.operands]
    if not all(isinstance(n, int) for a in operands for n in a.shape):
        raise UnsupportedError(f"{equation.name}: expected concrete shapes, got {', '.join(map(str, operands))}.")

    def run(*arrays: jax.Array) -> Any:  # a new function, which JAX has not traced yet
        return function(*arrays, **parameters)

    with of_width((*operands, *equation.results)), kernel_code(), without_mesh(), recording() as found:
        traced = jax.make_jaxpr(run)(*operands)
    yield from found
    for inner in equations(traced, platform):
        if inner.name in KERNELS:
            yield from kernels_of(inner, platform)

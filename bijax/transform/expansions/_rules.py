"""The rules for operations that are expanded, or left to a library: LAPACK, or XLA's for Fourier transforms."""

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
from jax.extend.core import Primitive

from bijax.core.contracts import Use
from bijax.core.tag import kernel_code
from bijax.transform.expansions import _fft_blocks, _lapack
from bijax.transform.expansions._stacks import one_by_one, over_stack
from bijax.transform.hook.state import of_equation, tagged
from bijax.transform.rules.call import Call, traced
from bijax.transform.rules.equations import Equation, equations
from bijax.transform.rules.registry import FLOATS, Dtypes, Kind, Rule, is_complex, is_real, register
from bijax.transform.rules.uses import dtypes_of, kernels_of
from pallas_kernels.base_contract import Contract
from pallas_kernels.runtime.own_settings import of_width

Expansion = Callable[..., Any]


class ByLibrary(NamedTuple):
    """An operation on a CPU that is left to a library.

    Attributes:
        contract: How the library is called.
        calls: Returns a function that calls it, for the contract and the primitive. It is lowered by JAX's own rules.
    """

    contract: Contract
    calls: Callable[[Any, Primitive], Expansion]


_OR_LAPACK: Final = "LAPACK for small matrices on a CPU, one per call; otherwise decomposed"
_COLUMNS: Final = (
    f"{_OR_LAPACK} into operations on one matrix, column by column and block by block, each of them invariant"
)
_ROTATIONS: Final = f"{_OR_LAPACK} into rotations of pairs of columns, in an order that depends only on the length"
_SUBSTITUTED: Final = (
    "decomposed into operations on one matrix, column by column and block by block, each of them invariant"
)
_ROWS: Final = "decomposed row by row, each computed from the previous one"
_TRANSFORMED: Final = (
    "XLA's library on a CPU, for a fixed number of longer transforms per call; otherwise decomposed into products with"
    " matrices of short transforms, which depend only on the length"
)
_BY_PARTS: Final = "complex numbers: decomposed into operations on real and imaginary parts"
_CONVERTED: Final = "the operands are first converted to float32 or float64, and then multiplied as floats"

EXPANDED: Final = {
    "cholesky": ("_triangular", _COLUMNS),
    "eigh": ("_jacobi", _ROTATIONS),
    "fft": ("_fft", _TRANSFORMED),
    "geqrf": ("_qr", _COLUMNS),
    "householder_product": ("_qr", _COLUMNS),
    "lu": ("_lu", _COLUMNS),
    "qr": ("_qr", _COLUMNS),
    "svd": ("_jacobi", _ROTATIONS),
    "triangular_solve": ("_triangular", _SUBSTITUTED),
    "tridiagonal_solve": ("_tridiagonal", _ROWS),
}
"""By operation, the module of its expansion, which is imported when needed, and the evidence."""

_LIBRARIES: Final = (_fft_blocks, _lapack)

OF_MATRICES: Final = frozenset(EXPANDED) - {"fft"}
"""Operations on stacks of matrices. A CPU computes one matrix at a time, which stays in its cache."""

COMPLEX: Final = (
    "abs conv_general_dilated cos cosh cumprod cumsum div dot_general eq exp exp2 expm1 integer_pow log log1p log2"
    " logistic mul ne one_minus_square polynomial pow reduce_prod reduce_sum reduce_window_sum rsqrt scatter-add"
    " scatter-mul scatter-sub sign sin sinh sqrt square tan tanh"
)
"""Operations on complex numbers that are expanded."""

COMPLEX_ON_GPU: Final = "add add_any convert_element_type sub"
"""The ones that a CPU computes exactly."""


def written_out(
    name: str, operands: Sequence[Any], parameters: Mapping[str, Any], dtypes: Dtypes, platform: str
) -> ByLibrary | Expansion:
    """Returns how a library computes an operation, or else its expansion.

    Args:
        name: Name of its primitive, one with a rule here.
        operands: Abstract values of its operands.
        parameters: Its parameters.
        dtypes: Dtypes of its operands and results.
        platform: The platform.
    """
    if platform == "cpu":
        for library in _LIBRARIES:
            if contract := library.contract_of(name, operands, parameters):
                return ByLibrary(contract, library.calls)
        if name == "fft" and _fft_blocks.is_along_each_axis(operands, parameters["fft_lengths"]):
            return _fft_blocks.along_each_axis
    if name in EXPANDED:
        function = _function(EXPANDED[name][0], name)
        one_at_a_time = platform == "cpu" and name in OF_MATRICES
        return _of_each_matrix(function) if one_at_a_time else function
    return _function("_complex" if is_complex(dtypes) else "_mixed", name)


def _of_each_matrix(function: Expansion) -> Expansion:
    def run(*operands: jax.Array, **parameters: Any) -> Any:
        return over_stack(functools.partial(function, **parameters), *operands, over=one_by_one)

    return run


def _function(module: str, name: str) -> Expansion:
    found = vars(importlib.import_module(f"{__package__}.{module}"))
    return found["COMPLEX"][name] if module == "_complex" else found[name]


def _lower(call: Call) -> Sequence[Any]:
    expansion = written_out(call.name, call.ctx.avals_in, call.parameters, call.dtypes, call.platform)
    if isinstance(expansion, ByLibrary):
        return call.traced(expansion.calls(expansion.contract, call.primitive))
    fixed = {"out_sharding": None} if "out_sharding" in call.parameters else {}

    def run(*arrays: jax.Array, **others: Any) -> Any:
        with tagged(call.request):
            return expansion(*arrays, **others, **fixed)

    return traced(run, call.ctx, call.operands, call.parameters, call.primitive.multiple_results)


def _uses(equation: Equation, platform: str) -> Iterator[Use]:
    """Yields the contracts of the operations in an expansion."""
    dtypes = dtypes_of(equation)
    expansion = written_out(equation.name, equation.operands, equation.parameters, dtypes, platform)
    if isinstance(expansion, ByLibrary):
        yield Use(expansion.contract.id, tuple(map(str, dtypes)), "")
        return
    request = of_equation(equation.metadata)

    def run(*arrays: jax.Array) -> Any:
        with tagged(request):
            return expansion(*arrays, **equation.parameters)

    operands = [jax.core.ShapedArray(a.shape, a.dtype) for a in equation.operands]
    with of_width((*operands, *equation.results)), kernel_code():
        program = jax.make_jaxpr(run)(*operands)
    for inner in equations(program, platform):
        yield from kernels_of(inner, platform)


def _is_mixed(dtypes: Dtypes) -> bool:
    return is_real(dtypes) and any(str(d) not in FLOATS for d in dtypes)


for _name, (_, _why) in EXPANDED.items():
    register(_name, Rule(Kind.REPLACE, _why, lower=_lower, uses=_uses))
register(COMPLEX, Rule(Kind.REPLACE, _BY_PARTS, lower=_lower, uses=_uses, dtypes=is_complex))
register(COMPLEX_ON_GPU, Rule(Kind.REPLACE, _BY_PARTS, lower=_lower, uses=_uses, platform="cuda", dtypes=is_complex))
register("dot_general", Rule(Kind.REPLACE, _CONVERTED, lower=_lower, uses=_uses, dtypes=_is_mixed))

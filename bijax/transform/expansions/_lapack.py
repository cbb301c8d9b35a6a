"""Factorisations of small matrices on a CPU: JAX's calls of LAPACK, one matrix at a time."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
from jax import lax
from jax.extend.core import Primitive

from bijax.transform.expansions._stacks import one_by_one, over_stack
from pallas_kernels.contract import LapackContract, lapack_contract

_NAMES: Final = frozenset(("cholesky", "eigh", "geqrf", "householder_product", "lu", "qr", "svd"))
"""Operations on one matrix. (The columns of a triangular system may be a batch.)"""

_DTYPES: Final = frozenset(("float32", "float64", "complex64", "complex128"))


def contract_of(name: str, operands: Sequence[Any], parameters: Mapping[str, Any]) -> LapackContract | None:
    """Returns the contract under which LAPACK computes an operation on a CPU; None if it is not left to LAPACK.

    Args:
        name: Name of the primitive.
        operands: Abstract values of its operands.
        parameters: Its parameters.
    """
    if name not in _NAMES or str(operands[0].dtype) not in _DTYPES:
        return None
    rows, columns = operands[0].shape[-2:]
    # JAX supports neither partial decompositions nor other algorithms on a CPU.
    if parameters.get("subset_by_index") not in (None, (0, min(rows, columns))):
        return None
    if getattr(parameters.get("algorithm"), "name", "DEFAULT") != "DEFAULT" or math.prod(operands[0].shape) == 0:
        return None
    return lapack_contract(name, (rows, columns))


def calls(_: LapackContract, primitive: Primitive) -> Callable[..., Any]:
    """Returns a function that applies a primitive to every matrix of a stack, one after another.

    It must be lowered by JAX's own rules.
    """

    def run(*operands: jax.Array, **parameters: Any) -> Any:
        def one(*matrix: jax.Array) -> Any:
            results = primitive.bind(*matrix, **parameters)
            return results[:2] if primitive is lax.linalg.lu_p else results

        results = over_stack(one, *operands, over=one_by_one)
        if primitive is lax.linalg.lu_p:  # integers, which JAX would compute in a nested loop
            factors, pivots = results
            return factors, pivots, lax.linalg.lu_pivots_to_permutation(pivots, operands[0].shape[-2])
        return results

    return run

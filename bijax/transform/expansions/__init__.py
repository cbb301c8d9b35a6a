"""Operations of JAX written out as others of JAX, which are made invariant in their turn.

An expansion takes the operands and parameters of its primitive and is traced under the request of the equation that it
stands for, so all it holds is lowered as if the user's program had said it: it needs neither kernels nor a contract of
its own, on any platform, and nothing in it sees more than its own matrix, row or number. Small matrices on a CPU are
left to LAPACK, one at a time (`_lapack`).
"""

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any, Final

import jax
import jax.numpy as jnp

from bijax.transform._tables import COMPLEX, EXPANDED
from bijax.transform.expansions._stacks import one_by_one, over_stack

Expansion = Callable[..., Any]

_MODULES: Final = {
    "cholesky": "_triangular",
    "eigh": "_jacobi",
    "fft": "_fft",
    "geqrf": "_qr",
    "householder_product": "_qr",
    "lu": "_lu",
    "qr": "_qr",
    "svd": "_jacobi",
    "triangular_solve": "_triangular",
    "tridiagonal_solve": "_tridiagonal",
}
"""The module that holds the expansion of an operation, under its name; imported when it is needed."""

_OF_MATRICES: Final = frozenset(_MODULES) - {"fft"}
"""Operations on stacks of matrices. A CPU takes one matrix after the other: it stays in the cache."""

_FLOATS: Final = frozenset(("float32", "bfloat16", "float16", "float64"))


def expansion_of(name: str, dtypes: Iterable[Any], platform: str = "") -> Expansion | None:
    """Returns the expansion of an operation; None if it is lowered in another way.

    Args:
        name: Name of its primitive.
        dtypes: Dtypes of its operands and results.
        platform: Platform that is lowered for, if it is known. No bit depends on it.
    """
    dtypes = tuple(dtypes)
    if name in EXPANDED:
        function = _function(_MODULES[name], name)
        return _of_each_matrix(function) if platform == "cpu" and name in _OF_MATRICES else function
    if name in COMPLEX and any(jnp.issubdtype(d, jnp.complexfloating) for d in dtypes):
        return _function("_complex", name)
    if name == "dot_general" and any(str(d) not in _FLOATS for d in dtypes):
        return _function("_mixed", name)
    return None


def _of_each_matrix(function: Expansion) -> Expansion:
    def run(*operands: jax.Array, **parameters: Any) -> Any:
        return over_stack(functools.partial(function, **parameters), *operands, over=one_by_one)

    return run


def _function(module: str, name: str) -> Expansion:
    found = vars(importlib.import_module(f"{__name__}.{module}"))
    function: Expansion = found["COMPLEX"][name] if module == "_complex" else found[name]
    return function

"""Operations of JAX written out as others of JAX, which are made invariant in their turn.

An expansion takes the operands and parameters of its primitive and is traced under the request of the equation that it
stands for, so all it holds is lowered as if the user's program had said it: it needs neither kernels nor a contract of
its own, on any platform, and nothing in it sees more than its own matrix, row or number.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import jax.numpy as jnp

from bijax.transform.expansions._complex import COMPLEX
from bijax.transform.expansions._fft import fft
from bijax.transform.expansions._jacobi import eigh, svd
from bijax.transform.expansions._lu import lu
from bijax.transform.expansions._mixed import FLOATS
from bijax.transform.expansions._mixed import dot_general as mixed_dot_general
from bijax.transform.expansions._qr import geqrf, householder_product, qr
from bijax.transform.expansions._triangular import cholesky, triangular_solve

Expansion = Callable[..., Any]

_EXPANSIONS: Final[dict[str, Expansion]] = {
    "cholesky": cholesky,
    "eigh": eigh,
    "fft": fft,
    "geqrf": geqrf,
    "householder_product": householder_product,
    "lu": lu,
    "qr": qr,
    "svd": svd,
    "triangular_solve": triangular_solve,
}


def expansion_of(name: str, dtypes: Iterable[Any]) -> Expansion | None:
    """Returns the expansion of an operation; None if it is lowered in another way.

    Args:
        name: Name of its primitive.
        dtypes: Dtypes of its operands and results.
    """
    dtypes = tuple(dtypes)
    if name in _EXPANSIONS:
        return _EXPANSIONS[name]
    if any(jnp.issubdtype(d, jnp.complexfloating) for d in dtypes):
        return COMPLEX.get(name)
    if name == "dot_general" and any(str(d) not in FLOATS for d in dtypes):
        return mixed_dot_general
    return None

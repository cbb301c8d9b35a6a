"""How the results of products are used, so that they can be computed in the wanted memory layout.

A kernel's result has one layout in memory. JAX writes many products, especially gradients of others, as a product and
a transpose of its result; without this, XLA would copy the result, or a value computed from it.
"""

from collections.abc import Sequence
from typing import Any, Final

from jax.extend.core import Literal

from bijax.lax.dot_general import Arrangement

ARRANGEMENT: Final = "arrangement"
"""The parameter that is added to a product under a request."""


def with_arrangements(jaxpr: Any, equations: Sequence[Any]) -> list[Any]:
    """Returns the equations of a program for lowering, with an output-layout hint added to each product.

    Args:
        jaxpr: The program.
        equations: Its equations, with those under a request already replaced.
    """
    found = arrangements(jaxpr)
    return [
        new.replace(params={**new.params, ARRANGEMENT: found[new.outvars[0]]})
        if new is not old and new.primitive.name == "dot_general"
        else new
        for new, old in zip(equations, jaxpr.eqns, strict=True)
    ]


def arrangements(jaxpr: Any) -> dict[Any, Arrangement]:
    """Returns, for each product of a program, the dimensions of its result that should be innermost in memory."""
    # By value, the product that it is a transpose of, and the permutation of that product's dimensions.
    turned: dict[Any, tuple[Any, tuple[int, ...]]] = {}
    found = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            result = eqn.outvars[0]
            turned[result], found[result] = (eqn, tuple(range(result.aval.ndim))), Arrangement.OF_RHS
        elif eqn.primitive.name == "transpose" and _known(eqn.invars[0], turned):
            product, dimensions = turned[eqn.invars[0]]
            dimensions = tuple(dimensions[d] for d in eqn.params["permutation"])
            turned[eqn.outvars[0]] = product, dimensions
            last = _from_lhs(product, dimensions[-1])
            found[product.outvars[0]] = Arrangement.OF_LHS if last else Arrangement.OF_RHS
    return found


def _known(atom: Any, turned: dict[Any, Any]) -> bool:
    return not isinstance(atom, Literal) and atom in turned


def _from_lhs(product: Any, dimension: int) -> bool:
    """Returns whether a dimension of a product's result is a free one of its left operand."""
    (contracting, _), (batch, _) = product.params["dimension_numbers"]
    free = product.invars[0].aval.ndim - len(contracting) - len(batch)
    return bool(len(batch) <= dimension < len(batch) + free)

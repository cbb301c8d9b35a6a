"""The order in which `jax.numpy.einsum` contracts three or more operands, chosen without the batch.

`jax.numpy.einsum` asks opt_einsum for the cheapest order, which depends on the sizes of all axes: a batch of 5 may be
multiplied by one matrix after another, a batch of 8 by the product of the matrices. Inside of `bijax.invariant` the
sizes of the axes of the result do not count. An axis that is summed away does: its length is that of a sum.
"""

from collections.abc import Callable
from typing import Any, Final

from bijax.transform.hook._jax_private import metadata_of_trace
from bijax.transform.hook.state import of_equation

_FIRST: Final = 32
"""Assumed size of the result's first axis, which most programs use for the batch."""

_OTHERS: Final = 128
"""Assumed size of its other axes."""


def without_batch(opt_einsum: Any) -> Callable[..., Any]:
    """Returns opt_einsum's `contract_path` with an order that does not depend on the batch where it is requested.

    Args:
        opt_einsum: The module. `jax.numpy.einsum` passes subscripts, operands and `optimize` to that function.
    """
    stock = opt_einsum.contract_path

    def contract_path(*operands: Any, **options: Any) -> Any:
        optimize = options.get("optimize", "auto")
        is_chosen = optimize is True or isinstance(optimize, str)
        if is_chosen and not options.get("shapes") and of_equation(metadata_of_trace()).enabled:
            options["optimize"] = _order(opt_einsum, operands, optimize) or optimize
        return stock(*operands, **options)

    return contract_path


def _order(opt_einsum: Any, operands: tuple[Any, ...], optimize: Any) -> list[tuple[int, ...]] | None:
    """Returns which operands to contract, in order; None if there is no choice."""
    inputs, output, arrays = opt_einsum.parser.parse_einsum_input(operands)
    terms = inputs.split(",")
    if len(terms) < 3:
        return None
    assumed = {axis: _OTHERS if place else _FIRST for place, axis in enumerate(output)}
    shapes = [
        tuple(assumed.get(axis, size) for axis, size in zip(term, array.shape, strict=True))
        for term, array in zip(terms, arrays, strict=True)
    ]
    given = f"{inputs}->{output}", *shapes
    path: list[tuple[int, ...]] = opt_einsum.contract_path(*given, shapes=True, optimize=optimize)[0]
    return path

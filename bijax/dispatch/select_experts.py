"""The experts of tokens as one primitive: softmax, its largest numbers and their sum, in one kernel where there is one.

That kernel has the bits of the kernels that it stands for, which serve where there is none.
"""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp

from bijax.core.primitive import Arrays, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.kernels import run_if_served, run_kernel
from pallas_kernels.registry import find
from pallas_kernels.target import Target
from pallas_kernels.topk.order import numbers_at


class RoutingContracts(NamedTuple):
    """The contracts of the kernels that one kernel stands for.

    Attributes:
        softmax: Order of the sum of exponentials, and how they are computed, as keyword arguments sorted by name.
        sums: Order of the sum of the largest numbers.
    """

    softmax: tuple[tuple[str, Any], ...]
    sums: Any


def _backend(target: Target, logits: jax.Array, *, number: int, experts: int) -> Arrays:
    rows = logits.shape[0]
    terms = jax.ShapeDtypeStruct((rows, number, 1), jnp.float32)
    ours = jax.ShapeDtypeStruct((rows, experts), logits.dtype)
    softmax = find("softmax", target, experts, x=ours).contracts
    sums = find("sum_axis", target, number, x=terms, mean=False).contracts["contract"]
    contracts = RoutingContracts(tuple(sorted(softmax.items())), sums)
    options = {"number": number, "experts": experts}
    found = run_if_served("select_experts", target, contracts, logits, sums=sums, like=_shapes, **options)
    if found is not None:
        return tuple(found)
    probabilities = run_kernel("softmax", target, experts, like=lambda *, x: x, x=logits[:, :experts])
    places, _ = run_kernel("largest", target, None, probabilities, number=number, like=_two_shapes)
    numbers = numbers_at(probabilities, places)
    totals = run_kernel(
        "sum_axis",
        target,
        number,
        like=lambda *, x, mean: jnp.zeros((x.shape[0], 1), jnp.float32),
        x=numbers[:, :, None],
        mean=False,
    )
    return places, numbers, totals


def _shapes(logits: jax.Array, *, number: int, **_: Any) -> Arrays:
    places, numbers = _two_shapes(logits, number=number)
    return places, numbers, jnp.zeros((logits.shape[0], 1), jnp.float32)


def _two_shapes(logits: jax.Array, *, number: int) -> Arrays:
    shape = (logits.shape[0], number)
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)


def _fold(size: int, arrays: Arrays, axes: Any, parameters: dict[str, Any]) -> Arrays:
    return unfold_rows(size, select_experts_kernel(*fold_rows(size, arrays, axes), **parameters))


select_experts_kernel: Final = define_kernel("select_experts", _backend, _fold, _shapes)
"""(T, E or more) float32, `number`, and `experts`, E: places and probabilities (T, number), and their sum (T, 1)."""

"""Token routing as primitives: top-k scores, the rows of each expert, their sums, and row copies.

All of it but the sums of a token's rows is exact, so there is no contract: every kernel has the same results.
"""

from typing import Any, Final

import jax

from bijax.core.primitive import Arrays, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.kernels import backend_of, run_if_served, run_kernel
from pallas_kernels.expert_rows import portable as expert_rows
from pallas_kernels.pick import portable as pick
from pallas_kernels.target import Target


def _fold(size: int, arrays: Arrays, axes: Any, parameters: dict[str, Any]) -> Arrays:
    return unfold_rows(size, largest_kernel(*fold_rows(size, arrays, axes), **parameters))


largest_kernel: Final = define_kernel("largest", backend_of("largest"), _fold)
"""(T, E) and `number`: places and numbers (T, number), see `topk.portable.largest`."""

sort_kernel: Final = define_kernel("sort_by_expert", backend_of("sort_by_expert"))
"""(A,) int32, `first`, `end`, `allocated` and `topk`, see `expert_rows.portable.sort_by_expert`."""


def _spread(target: Target, x: jax.Array, number: jax.Array, *, experts: int, topk: int) -> Arrays:
    options: dict[str, int] = {"experts": experts, "topk": topk}
    found = run_if_served("spread_to_experts", target, None, x, number, like=expert_rows.spread_to_experts, **options)
    if found is not None:
        return tuple(found)
    options = {"first": 0, "end": experts, "allocated": number.size, "topk": topk}
    found = run_kernel("sort_by_expert", target, None, number, like=expert_rows.sort_by_expert, **options)
    _, _, count, _, _, row, token = found
    return run_kernel("pick_rows", target, None, x, token[:, None], like=pick.pick_rows), count, row


spread_kernel: Final = define_kernel("spread_to_experts", _spread)
"""(T, C), (T * topk,) int32, `experts` and `topk`, see `expert_rows.portable.spread_to_experts`."""

rows_by_count_kernel: Final = define_kernel("rows_by_count", backend_of("rows_by_count"))
"""(E,) int32 and `rows`, see `expert_rows.portable.rows_by_count`."""

rows_of_tokens_kernel: Final = define_kernel("rows_of_tokens", backend_of("rows_of_tokens"))
"""(A,) int32 and `places`, see `expert_rows.portable.rows_of_tokens`."""

add_rows_kernel: Final = define_kernel("add_expert_rows", backend_of("add_expert_rows"))
"""(R, C), (R,) int32, (T, topk) int32, (T, topk) and `dtype`, see `expert_rows.portable.add_expert_rows`."""

pick_kernel: Final = define_kernel("pick_rows", backend_of("pick_rows"))
"""(S, C), (M, 1) int32 and possibly an order (M, 1) int32, see `pick.portable.pick_rows`."""

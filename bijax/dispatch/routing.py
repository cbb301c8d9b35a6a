"""Token routing as primitives: top-k scores, the rows of each expert, and row copies.

All of it is exact, so there is no contract: every kernel has the same results.
"""

from typing import Any, Final

from bijax.core.primitive import Arrays, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.kernels import backend_of


def _fold(size: int, arrays: Arrays, axes: Any, parameters: dict[str, Any]) -> Arrays:
    return unfold_rows(size, largest_kernel(*fold_rows(size, arrays, axes), **parameters))


largest_kernel: Final = define_kernel("largest", backend_of("largest"), _fold)
"""(T, E) and `number`: places and numbers (T, number), see `topk.portable.largest`."""

sort_kernel: Final = define_kernel("sort_by_expert", backend_of("sort_by_expert"))
"""(A,) int32, `first`, `end`, `allocated` and `topk`, see `expert_rows.portable.sort_by_expert`."""

rows_by_count_kernel: Final = define_kernel("rows_by_count", backend_of("rows_by_count"))
"""(E,) int32 and `rows`, see `expert_rows.portable.rows_by_count`."""

rows_of_tokens_kernel: Final = define_kernel("rows_of_tokens", backend_of("rows_of_tokens"))
"""(A,) int32 and `places`, see `expert_rows.portable.rows_of_tokens`."""

pick_kernel: Final = define_kernel("pick_rows", backend_of("pick_rows"))
"""(S, C), (M, 1) int32 and possibly an order (M, 1) int32, see `pick.portable.pick_rows`."""

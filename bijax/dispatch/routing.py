"""Where tokens go, as primitives: the largest scores, the rows of experts, and rows that are copied.

All of it is exact, so there is no contract: every kernel has the same results.
"""

from typing import Any, Final

from bijax.core.primitive import Arrays, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.kernels import backend_of


def _fold(size: int, arrays: Arrays, axes: Any, parameters: dict[str, Any]) -> Arrays:
    return unfold_rows(size, largest_kernel(*fold_rows(size, arrays, axes), **parameters))


largest_kernel: Final = define_kernel("largest", backend_of("largest"), _fold)
"""(T, E) and `number`: places and numbers (T, number), as `topk.portable.largest` has them."""

sort_kernel: Final = define_kernel("sort_by_expert", backend_of("sort_by_expert"))
"""(A,) int32, `first`, `end` and `allocated`, as `expert_rows.portable.sort_by_expert` has them."""

rows_by_count_kernel: Final = define_kernel("rows_by_count", backend_of("rows_by_count"))
"""(E,) int32 and `rows`, as `expert_rows.portable.rows_by_count` has them."""

rows_of_tokens_kernel: Final = define_kernel("rows_of_tokens", backend_of("rows_of_tokens"))
"""(A,) int32 and `places`, as `expert_rows.portable.rows_of_tokens` has them."""

pick_kernel: Final = define_kernel("pick_rows", backend_of("pick_rows"))
"""(S, C), (M, 1) int32 and possibly an order (M, 1) int32, as `pick.portable.pick_rows` has them."""

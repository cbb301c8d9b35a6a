"""Where tokens go, as primitives: the largest scores, the rows of experts, and rows that are copied.

All of it is exact, so there is no contract: every kernel has the same results.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import jax

from bijax.core.contracts import run
from bijax.core.on_first_use import on_first_use
from bijax.core.primitive import Arrays, Kernel, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.rows import as_tuple
from pallas_kernels.ops.expert_rows import portable as expert_rows
from pallas_kernels.ops.pick import cpu as pick_cpu
from pallas_kernels.ops.pick import portable as pick
from pallas_kernels.ops.topk import cpu as topk_cpu
from pallas_kernels.ops.topk import portable as topk

if TYPE_CHECKING:
    from pallas_kernels.ops.expert_rows import triton as expert_rows_triton
    from pallas_kernels.ops.pick import triton as pick_triton
    from pallas_kernels.ops.topk import triton as topk_triton
else:
    expert_rows_triton = on_first_use("pallas_kernels.ops.expert_rows.triton")
    pick_triton = on_first_use("pallas_kernels.ops.pick.triton")
    topk_triton = on_first_use("pallas_kernels.ops.topk.triton")


def _backends(
    portable: Callable[..., Any], triton: Callable[[], Any], cpu: Callable[..., Any] | None = None
) -> dict[str, Kernel]:
    """Returns the Triton kernel for the calls that it serves on a GPU, and XLA's program for others."""

    def on_cuda(*arrays: jax.Array, **parameters: Any) -> Arrays:
        kernel = triton()
        if not kernel.serves(*arrays, **parameters):
            return as_tuple(run(portable, *arrays, **parameters))
        return as_tuple(run(kernel, *arrays, like=portable, **parameters))

    def on_cpu(*arrays: jax.Array, **parameters: Any) -> Arrays:
        return as_tuple(run(cpu or portable, *arrays, **parameters))

    # The last one is traced for the shapes of the results.
    return {"cuda": on_cuda, "cpu": on_cpu}


def _fold(size: int, arrays: Arrays, axes: Any, parameters: dict[str, Any]) -> Arrays:
    return unfold_rows(size, largest_kernel(*fold_rows(size, arrays, axes), **parameters))


largest_kernel: Final = define_kernel(
    "largest",
    _backends(topk.largest, lambda: topk_triton.largest, topk_cpu.largest),
    _fold,
)
"""(T, E) and `number`: places and numbers (T, number), as `topk.portable.largest` has them."""

sort_kernel: Final = define_kernel(
    "sort_by_expert", _backends(expert_rows.sort_by_expert, lambda: expert_rows_triton.sort_by_expert)
)
"""(A,) int32, `first`, `end` and `allocated`, as `expert_rows.portable.sort_by_expert` has them."""

rows_by_count_kernel: Final = define_kernel(
    "rows_by_count", _backends(expert_rows.rows_by_count, lambda: expert_rows_triton.rows_by_count)
)
"""(E,) int32 and `rows`, as `expert_rows.portable.rows_by_count` has them."""

rows_of_tokens_kernel: Final = define_kernel(
    "rows_of_tokens", _backends(expert_rows.rows_of_tokens, lambda: expert_rows_triton.rows_of_tokens)
)
"""(A,) int32 and `places`, as `expert_rows.portable.rows_of_tokens` has them."""

pick_kernel: Final = define_kernel(
    "pick_rows", _backends(pick.pick_rows, lambda: pick_triton.pick_rows, pick_cpu.pick_rows)
)
"""(S, C), (M, 1) int32 and possibly an order (M, 1) int32, as `pick.portable.pick_rows` has them."""

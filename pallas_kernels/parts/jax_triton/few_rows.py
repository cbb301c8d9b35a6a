"""Which calls of few rows Triton's kernels serve on Hopper, whose bits are those of the Mosaic kernels.

XLA launches a Triton kernel itself (`pallas_kernels.parts.jax_triton.native_calls`). A Mosaic kernel is a foreign call,
which XLA prepares, initialises and records each time that a program runs: 4.5 µs more of the host. That counts where a
kernel takes a few µs and the host waits for each step. So Triton's kernels serve where they take no longer on the GPU,
by the times of `benchmarks/notes/hybrids-gpu.md`; and where a program runs on several GPUs, whose host launches the
kernels of all of them and is what a step of few rows waits for (`benchmarks/notes/several-gpus.md`).
"""

from typing import Any, Final

from pallas_kernels.parts.jax_triton.native_calls import are_known
from pallas_kernels.target import Target

NORM_ELEMENTS: Final = 1 << 18
"""Elements of the rows of a norm up to which they are few. Up to this size the norm also rounds the sum of several
devices (`flax_layers.models.parallel_layers`), whose rounding would be another kernel for the host to launch."""

_SIZE: Final = 2  # bytes of a number
_NORM_COLUMNS: Final = 4096
_GROUP_ROWS: Final = 640
_PRODUCT_ROWS: Final = 16


def norm(_target: Target, x: Any, *_: Any, **__: Any) -> bool:
    """Returns whether a norm of rows x (M, C) is that of Triton.

    Example:
        >>> import numpy as np
        >>> hopper = Target.parse("sm_90")
        >>> norm(hopper, np.ones((64, 4096), "float16")), norm(hopper, np.ones((256, 4096), "float16"))
        (True, False)
    """
    return bool(are_known() and x.dtype.itemsize == _SIZE and x.shape[1] <= _NORM_COLUMNS and x.size <= NORM_ELEMENTS)


def groups(_target: Target, x: Any, *_: Any, **__: Any) -> bool:
    """Returns whether products of rows x (M, K) by weights of their groups are Triton's.

    Example:
        >>> import numpy as np
        >>> hopper = Target.parse("sm_90")
        >>> groups(hopper, np.ones((80, 64))), groups(hopper, np.ones((8192, 64)))
        (True, False)
    """
    return are_known() and bool(x.shape[0] <= _GROUP_ROWS)


def products(target: Target, x: Any, *_: Any, **__: Any) -> bool:
    """Returns whether products of rows x (M, K) by weights are Triton's.

    Example:
        >>> import numpy as np
        >>> x = np.ones((8, 4096), "float16")
        >>> products(Target("cuda", "sm_90"), x), products(Target("cuda", "sm_90", several=True), x)
        (False, True)
    """
    few = x.dtype.itemsize == _SIZE and x.shape[-2] <= _PRODUCT_ROWS
    return bool(target.several and are_known() and few)

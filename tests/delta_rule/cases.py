"""Dtypes and sizes of heads that the kernels of the gated delta rule for GPUs are tested with."""

from typing import Final

Sizes = tuple[int, int, int, int]
CASES: Final[dict[str, tuple[str, Sizes]]] = {
    "bfloat16": ("bfloat16", (2, 4, 128, 128)),
    "float16": ("float16", (2, 4, 128, 128)),
    "heads of 64": ("bfloat16", (1, 2, 64, 64)),
    "keys of 64": ("float16", (3, 3, 64, 128)),
    "values of 64": ("bfloat16", (1, 4, 128, 64)),
}

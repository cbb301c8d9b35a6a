"""What the operations are lowered to for a GPU, read on any machine."""

from collections.abc import Callable
from typing import Any

import jax

from bijax import hlo


def assert_fenced_on_cuda(fn: Callable[..., Any], *arguments: tuple[tuple[int, ...], Any]) -> None:
    """Checks that nothing in the program for CUDA could follow the batch, given shapes and dtypes."""
    report = hlo.inspect_for("cuda", fn, *(jax.ShapeDtypeStruct(*a) for a in arguments))
    assert report.invariant, str(report)

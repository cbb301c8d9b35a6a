"""What the operations are lowered to for GPUs, read on any machine."""

from collections.abc import Callable
from typing import Any

import jax

import bijax
from bijax import hlo


def assert_fenced_on_cuda(fn: Callable[..., Any], *arguments: tuple[tuple[int, ...], Any]) -> None:
    """Checks that nothing in the programs for CUDA could depend on the batch, given shapes and dtypes."""
    for architecture in ("sm_80", "sm_90"):
        with bijax.lowering_for(architecture):
            report = hlo.inspect_for("cuda", fn, *(jax.ShapeDtypeStruct(*a) for a in arguments))
        assert report.invariant, f"{architecture}: {report}"

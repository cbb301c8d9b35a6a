"""Row kernels in Triton's interpreter, in a process with TRITON_INTERPRET=1: prints what differs.

    python -m tests.rows.interpreted_rows COLUMNS KIND NAME

COLUMNS and KIND (of `hostile_rows`) are lists with commas, NAME is a part of the names of cases.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.contract import PTX_FUNCTIONS, QuantizeContract, row_contract
from pallas_kernels.cross_entropy.jax_triton import launch as cross_entropy
from pallas_kernels.quantize.jax_triton import launch as quantize
from pallas_kernels.softmax.jax_triton import launch as softmax
from pallas_kernels.target import Target
from tests.jax_triton.interpreted import interpret_launches
from tests.jax_triton.interpreter_instructions import interpret_instructions
from tests.quantize import cases as quantize_cases
from tests.rows import row_kernel_cases

TARGET = Target.parse("sm_80")
NEAR = 3e-6  # of float32 rows; float64 is the reference


def bits(name: str, columns: int, kind: str) -> Iterator[str]:
    """Yields the cases whose bits are not those of the portable programs."""
    sizes = ((3, "float32"), (130, "float32")) if columns < 100 else ((3, "float32"),)
    for m, dtype in sizes:
        for case in row_kernel_cases.cases(m, columns, dtype, kind=kind, kernel=row_kernel_cases.triton_kernel):
            over_rows = case.name.startswith(("sum_rows", "weight_gradient"))
            if name in case.name and over_rows == (m > 3):
                yield from _differences(f"{case.name} {m} {columns} {kind}", case.found(), case.expected())
    if columns >= 100:
        for one in quantize_cases.cases(4, columns, "float32", kind=kind, kernel=quantize_cases.triton_kernel):
            if name in one.name:
                given = [jnp.asarray(a) for a in one.arguments]
                found, expected = one.kernel(*given, **one.parameters), one.portable(*given, **one.parameters)
                yield from _differences(f"{one.name} {columns} {kind}", found, expected)


def _differences(name: str, found: Any, expected: Any) -> Iterator[str]:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        kind = {1: np.uint8, 4: np.uint32}[np.asarray(a).dtype.itemsize]
        if not np.array_equal(np.asarray(a).view(kind), np.asarray(b).view(kind)):
            yield name


def numbers(name: str, columns: int) -> Iterator[str]:
    """Yields the functions of rows whose results are not near those in float64."""
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal((3, columns)).astype(np.float32) for _ in range(2))
    labels = np.array([[0], [columns - 1], [-1]], np.int32)
    wide, cotangent = x.astype(np.float64), g.astype(np.float64)
    m = wide.max(1, keepdims=True)
    log_sum = np.log(np.exp(wide - m).sum(1, keepdims=True))
    p = np.exp(wide - m - log_sum)
    lse, number = m + log_sum, cotangent[:, :1]
    loss = log_sum - (np.take_along_axis(wide, np.maximum(labels, 0), 1) - m) + 0.01 * lse * lse
    slope = number * (p * (1 + 0.02 * lse) - (np.arange(columns) == labels))
    both: dict[str, Any] = {"contract": row_contract(), "target": TARGET}
    numbers = [jnp.asarray(a, jnp.float32) for a in (m, log_sum, number)]
    used = labels >= 0
    results = {
        "softmax": lambda: (softmax.softmax(x, **both), p),
        "softmax_gradient": lambda: (
            softmax.softmax_gradient(jnp.asarray(p, jnp.float32), g, **both),
            p * (cotangent - (p * cotangent).sum(1, keepdims=True)),
        ),
        "log_softmax": lambda: (softmax.log_softmax(x, **both), (wide - m - log_sum, m, log_sum)),
        "log_softmax_gradient": lambda: (
            softmax.log_softmax_gradient(x, *numbers[:2], g, **both),
            cotangent - p * cotangent.sum(1, keepdims=True),
        ),
        "logsumexp": lambda: (softmax.logsumexp(x, **both), (m, log_sum)),
        "logsumexp_gradient": lambda: (softmax.logsumexp_gradient(x, *numbers, target=TARGET), p * number),
        "cross_entropy": lambda: (
            cross_entropy.cross_entropy(x, labels, z_loss=0.01, **both),
            (np.where(used, loss, 0), m, log_sum),
        ),
        "cross_entropy_gradient": lambda: (
            cross_entropy.cross_entropy_gradient(x, labels, *numbers, z_loss=0.01, target=TARGET),
            np.where(used, slope, 0),
        ),
        "quantize_swiglu": lambda: _swiglu(x, g),
    }
    for key, result in results.items():
        if name in key:
            for found, exact in zip(*map(jax.tree.leaves, result()), strict=True):
                error = np.abs(np.asarray(found).astype(np.float64) - exact).max()
                if not error <= NEAR * max(1, np.abs(exact).max()):
                    yield f"{key} {columns}: {error}"


def _swiglu(gate: np.ndarray, up: np.ndarray) -> Any:
    """A quantised number is as near as the scale allows: the scale and the error in units of it are compared."""
    y, scale = quantize.quantize_swiglu(
        jnp.concatenate([gate, up], 1), contract=QuantizeContract(), target=TARGET, functions=PTX_FUNCTIONS
    )
    exact = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    scales = np.abs(exact).max(1, keepdims=True) / 127
    steps = np.abs(np.asarray(y) - exact / scales)
    return (scale, np.maximum(steps - 0.501, 0)), (scales, np.zeros_like(steps))


def main() -> None:
    interpret_launches()
    interpret_instructions()
    different: list[str] = []
    for columns in map(int, sys.argv[1].split(",")):
        for kind in sys.argv[2].split(","):
            different += bits(sys.argv[3], columns, kind)
        different += numbers(sys.argv[3], columns)
    print(json.dumps(different))


if __name__ == "__main__":
    main()

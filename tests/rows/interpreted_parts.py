"""Rows that several programs share, in Triton's interpreter: the bits of programs with whole rows.

TRITON_INTERPRET=1 python -m tests.rows.interpreted_parts COLUMNS
"""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.testing import assert_bits_equal, hostile_rows
from pallas_kernels.contract import row_contract
from pallas_kernels.cross_entropy.jax_triton import launch as cross_entropy
from pallas_kernels.norm.jax_triton import launch as norm
from pallas_kernels.schedule.jax_triton.rows import RowSchedule
from pallas_kernels.softmax.jax_triton import launch as softmax
from pallas_kernels.target import Target
from tests.jax_triton.interpreted import interpret_launches
from tests.jax_triton.interpreter_instructions import interpret_instructions

TARGET = Target.parse("sm_80")
KINDS = ("normal", "wide", "cancelling", "inf", "nan")
WHOLE = RowSchedule(1, 4, held=True)
PARTS = (RowSchedule(1, 4, held=True, parts=2), RowSchedule(1, 1, held=True, preload=True, parts=8))


def functions(columns: int) -> dict[str, Callable[[RowSchedule], Any]]:
    """Returns functions of the schedule, of rows of every kind."""
    data = [hostile_rows(seed, (1, columns), "float32") for seed in range(3)]
    x = jnp.concatenate([jnp.asarray(data[0][kind]) for kind in KINDS])
    g, r = (jnp.concatenate([jnp.asarray(d["normal"])] * len(KINDS)) for d in data[1:])
    w, b = (jnp.asarray(hostile_rows(seed, (columns,), "float32")["normal"]) for seed in (3, 4))
    f, u = (jnp.asarray(hostile_rows(seed, (len(x), 1), "float32")["normal"]) for seed in (5, 6))
    labels = jnp.asarray([[0], [columns - 1], [columns // 2], [-1], [columns]], jnp.int32)
    both: dict[str, Any] = {"contract": row_contract(), "target": TARGET}
    loss: dict[str, Any] = {"z_loss": 0.01, "target": TARGET}
    return {
        "rms_norm": lambda s: norm.rms_norm(x, w, r, eps=1e-6, schedule=s, **both),
        "rms_norm with an offset": lambda s: norm.rms_norm(x, w, eps=1e-6, offset=1.0, schedule=s, **both),
        "rms_norm of x": lambda s: norm.rms_norm(x, eps=1e-6, schedule=s, **both),
        "rms_norm_gradient": lambda s: norm.rms_norm_gradient(x, f, g, w, r, schedule=s, **both),
        "rms_norm_gradient with an offset": lambda s: norm.rms_norm_gradient(
            x, f, g, w, offset=1.0, schedule=s, **both
        ),
        "layer_norm": lambda s: norm.layer_norm(x, w, b, eps=1e-6, schedule=s, **both),
        "softmax": lambda s: softmax.softmax(x, schedule=s, **both),
        "log_softmax": lambda s: softmax.log_softmax(x, schedule=s, **both),
        "cross_entropy": lambda s: cross_entropy.cross_entropy(x, labels, schedule=s, contract=row_contract(), **loss),
        "cross_entropy_gradient": lambda s: cross_entropy.cross_entropy_gradient(
            x, labels, u, f, f, schedule=s, **loss
        ),
    }


def main() -> None:
    interpret_launches()
    interpret_instructions()
    for name, function in functions(int(sys.argv[1])).items():
        whole = function(WHOLE)
        for schedule in PARTS:
            for ours, right in zip(jax.tree.leaves(function(schedule)), jax.tree.leaves(whole), strict=True):
                assert_bits_equal(np.asarray(ours), np.asarray(right), err_msg=f"{name} {schedule}")
    print("compared")


if __name__ == "__main__":
    with np.errstate(all="ignore"):
        main()

"""Row kernels through jax-triton without a GPU: bits and numbers in the interpreter, and machine code."""

import functools
import importlib.util
import json
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.contract import (
    ChunkContract,
    RowContract,
    chunk_contract,
)
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.schedule.jax_triton.batch_sum import ChunkSchedule
from pallas_kernels.schedule.jax_triton.rows import RowSchedule, row_schedule
from pallas_kernels.target import Target
from tests.jax_triton.interpreter_process import run_interpreted
from tests.jax_triton.machine_code import TARGETS, check_resources, compiled, launches_of, needs_triton
from tests.rows.jax_triton_calls import CONTRACT, Calls, calls

if importlib.util.find_spec("triton"):
    from pallas_kernels.cross_entropy.jax_triton import launch as cross_entropy
    from pallas_kernels.norm.jax_triton import launch as norm
    from pallas_kernels.rows.jax_triton import launch as rows
    from pallas_kernels.softmax.jax_triton import launch as softmax


@needs_triton
@pytest.mark.tier("full", fast=("a norm",))
@pytest.mark.parametrize(
    ("columns", "kinds", "name"),
    [
        pytest.param("200", "wide", "rms_norm of a sum", id="a norm"),
        pytest.param("77,576,1100,5000", "normal,wide,cancelling", "", id="all"),
        pytest.param("25000", "normal", "norm", id="wide rows"),
    ],
)
def test_numbers_in_the_interpreter(columns: str, kinds: str, name: str) -> None:
    """Sums and norms have the bits of the portable programs, functions of softmax are near float64."""
    output = run_interpreted("-m", "tests.rows.interpreted_rows", columns, kinds, name)
    assert json.loads(output.splitlines()[-1]) == []


def test_another_order_has_other_bits() -> None:
    """The control of the bits above."""
    x = np.random.default_rng(0).standard_normal((3, 1100)).astype(np.float32)
    assert (jnp.cumsum(jnp.asarray(x), 1)[:, -1] != jnp.asarray(x).sum(1)).any()


NAMES = tuple(calls(Target.parse("sm_80"), 8, "float32"))
FUSED = {
    # Products and sums are fused in the functions' own sequences alone: exp of float32 and a quotient of 8 bits.
    "float32": {
        name for name in NAMES if any(part in name for part in ("softmax", "logsumexp", "entropy", "quantize"))
    },
    "bfloat16": {"quantize", "quantize_swiglu", "quantize_norm"},
}
FUSED["float32"] -= {"softmax_gradient"}


@needs_triton
@pytest.mark.tier("full", fast=("4096-bfloat16-cross_entropy-sm_80", "5000-bfloat16-layer_norm-sm_80"))
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        *((77, "float32"), (576, "bfloat16"), (4096, "bfloat16"), (5000, "bfloat16"), (32000, "float32")),
        (128256, "bfloat16"),
    ],
)
def test_machine_code(columns: int, dtype: str, name: str, target: str) -> None:
    gpu = Target.parse(target)
    function, arrays = calls(gpu, columns, dtype)[name]
    for launch in launches_of(function, *arrays):
        assert not launch.fuses
        code = compiled(launch)
        check_resources(code, gpu)
        assert code.count(r"\b(RED\.|ATOM)") == 0  # no sums of several programs
        assert "div.full" not in code.ptx  # quotients and roots are rounded correctly
        assert "sqrt.approx" not in code.ptx
        # No thread computes all columns of a row: with 576 and 5000 columns, layer_norm took thousands of sums.
        assert len(re.findall(r"add(\.rn)?\.f32", code.ptx)) < 800
        if launch.name != "add_chunks_kernel":
            assert (code.ptx.count("fma.rn.f32") > 0) == (name in FUSED[dtype])
        if columns == 4096 and "gradient" not in name and name != "sum_rows":
            assert code.count(r"LDG\.E\S*\.(64|128)") > 0  # neighbouring columns are read at once


def test_the_rule_has_a_schedule_for_all_rows() -> None:
    for columns in (1, 77, 128, 1023, 1024, 4095, 8192, 12000, 16384, 16385, 32000, 65536, 128256, 1_000_000):
        for sizes in ((2,), (4,), (2, 2), (4, 4), (2, 4), (2, 2, 2), (4, 2, 4)):
            for m in (1, 132, 133, 5000):
                for writes in (True, False):
                    schedule = row_schedule(m, columns, CONTRACT.lanes(columns), sizes, writes=writes)
                    assert schedule.warps <= 32
                    assert schedule.held or columns > 16384


def every_rule() -> Iterator[tuple[RowSchedule, int, str, str]]:
    """Yields the schedules that the rule chooses, each with the rows, the dtype and a kernel for which it does."""
    found: dict[tuple[RowSchedule, str, str], int] = {}
    kernels = (("rms_norm", 1, True), ("softmax_gradient", 2, True), ("cross_entropy", 1, False))
    for columns in (77, 1024, 2048, 4096, 8192, 12000, 20000, 32000, 128256):
        for m in (8, 300):
            for dtype, size in (("bfloat16", 2), ("float32", 4)):
                for name, arrays, writes in kernels:
                    lanes = CONTRACT.lanes(columns)
                    schedule = row_schedule(m, columns, lanes, (size,) * arrays, writes=writes)
                    found[schedule, dtype, name] = columns
    return ((schedule, columns, dtype, name) for (schedule, dtype, name), columns in found.items())


@needs_triton
@pytest.mark.tier("full")
@pytest.mark.parametrize("target", TARGETS)
def test_every_schedule_of_the_rule_fits(target: str) -> None:
    gpu = Target.parse(target)
    for schedule, columns, dtype, name in every_rule():
        both: dict[str, Any] = {"contract": CONTRACT, "target": gpu, "schedule": schedule}
        x, labels = jax.ShapeDtypeStruct((300, columns), dtype), jax.ShapeDtypeStruct((300, 1), "int32")
        functions: Calls = {
            "rms_norm": (functools.partial(norm.rms_norm, eps=1e-6, **both), (x,)),
            "softmax_gradient": (functools.partial(softmax.softmax_gradient, **both), (x, x)),
            "cross_entropy": (functools.partial(cross_entropy.cross_entropy, z_loss=0.0, **both), (x, labels)),
        }
        function, arrays = functions[name]
        (launch,) = launches_of(function, *arrays)
        check_resources(compiled(launch), gpu)


@needs_triton
@pytest.mark.tier("full")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("schedule", [ChunkSchedule(32, 1), ChunkSchedule(512, 4), ChunkSchedule(256, 4)], ids=str)
def test_every_cut_of_a_chunk_fits(schedule: ChunkSchedule, target: str) -> None:
    gpu = Target.parse(target)
    for dtype in ("bfloat16", "float32"):
        x, n = jax.ShapeDtypeStruct((300, 4096), dtype), jax.ShapeDtypeStruct((300, 1), "float32")
        options: dict[str, Any] = {"contract": chunk_contract(), "target": gpu, "schedule": schedule}
        for launch in launches_of(lambda x, n, o=options: norm.weight_gradient(x, n, x, n, **o), x, n):
            check_resources(compiled(launch), gpu)


@needs_triton
def test_what_is_refused() -> None:
    gpu = Target.parse("sm_80")
    x, wide = jax.ShapeDtypeStruct((2, 8), "float32"), jax.ShapeDtypeStruct((2, 8), "float64")
    three = jax.ShapeDtypeStruct((2, 8, 3), "float32")
    with pytest.raises(UnsupportedError, match="expected the contract rows/v2"):
        jax.eval_shape(lambda x: softmax.softmax(x, contract=RowContract(most_lanes=256), target=gpu), x)
    with pytest.raises(UnsupportedError, match=r"sum_rows: expected rows of float32, .* in chunks of 128 rows"):
        jax.eval_shape(lambda x: rows.sum_rows(x, contract=ChunkContract(64), target=gpu), x)
    with pytest.raises(ValueError, match="warps must be a power of two, got 3"):
        RowSchedule(1, 3, held=True)
    assert not softmax.softmax.serves(wide)
    assert norm.rms_norm.serves(jax.ShapeDtypeStruct((2, 200_000), "float32"))
    assert not rows.sum_axis.serves(three)
    assert rows.sum_axis.serves(three, mean=True)  # the portable program rounds the quotient otherwise
    assert not rows.variance.serves(three, ddof=8)
    empty = jax.eval_shape(
        lambda x: norm.layer_norm(x, eps=1e-6, contract=CONTRACT, target=gpu), jax.ShapeDtypeStruct((0, 8), "float32")
    )
    assert [a.shape for a in empty] == [(0, 8), (0, 1), (0, 1)]

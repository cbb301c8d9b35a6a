"""Rows that several programs share, through jax-triton without a GPU: bits, machine code, refusals."""

from typing import Final

import jax
import pytest

from pallas_kernels.contract import row_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.schedule.jax_triton.rows import RowSchedule, schedule_of_parts
from pallas_kernels.target import Target
from tests.jax_triton.interpreter_process import run_interpreted
from tests.jax_triton.machine_code import TARGETS, check_resources, compiled, launches_of, needs_triton
from tests.rows.jax_triton_calls import calls

LAUNCHES: Final = {
    "rms_norm": 2,
    "rms_norm_gradient": 2,
    "layer_norm": 3,
    "softmax": 3,
    "log_softmax": 3,
    "cross_entropy": 3,
    "cross_entropy_gradient": 1,
}


@needs_triton
@pytest.mark.tier("full")
def test_bits_in_the_interpreter() -> None:
    output = run_interpreted("-m", "tests.rows.interpreted_parts", "5000")
    assert output.split()[-1] == "compared"


@needs_triton
@pytest.mark.tier("full", fast=("float32-softmax-sm_80",))
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_machine_code(dtype: str, name: str, target: str) -> None:
    gpu = Target.parse(target)
    function, arrays = calls(gpu, 128256, dtype, m=8)[name]
    launches = launches_of(function, *arrays)
    assert len(launches) == LAUNCHES[name]
    for launch in launches:
        code = compiled(launch)
        assert launch.grid[:2] == (8, 16)
        check_resources(code, gpu)
        assert code.count(r"\b(RED\.|ATOM)") == 0  # what programs share is added in an order


def test_the_rule_leaves_a_program_the_columns_that_it_can_hold() -> None:
    for columns in (128256, 151936, 262144):
        for rows in range(1, 17):
            lanes = row_contract().lanes(columns)
            schedule = schedule_of_parts(rows, columns, lanes)
            assert schedule is not None
            assert rows * schedule.parts <= 132
            assert -(-columns // lanes) * lanes // schedule.parts <= 32 * 32 * schedule.warps
    for rows, columns in ((17, 128256), (1, 32000), (1, 1_000_000), (1, 1)):
        assert schedule_of_parts(rows, columns, row_contract().lanes(columns)) is None


@needs_triton
def test_sums_that_one_program_adds_are_refused_in_parts() -> None:
    from pallas_kernels.softmax.jax_triton.launch import softmax_gradient

    x = jax.ShapeDtypeStruct((4, 5000), "float32")
    parts = RowSchedule(1, 4, held=True, parts=8)
    with pytest.raises(UnsupportedError, match=r"softmax_gradient_kernel: expected a schedule in which .* parts=8"):
        jax.eval_shape(
            lambda x: softmax_gradient(x, x, contract=row_contract(), target=Target.parse("sm_80"), schedule=parts), x
        )
    with pytest.raises(ValueError, match="a program that has a part of a row holds no other, got"):
        RowSchedule(2, 4, held=True, parts=8)

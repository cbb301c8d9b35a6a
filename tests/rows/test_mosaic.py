"""The row kernels for Hopper on a CPU: their bits under the interpreter, and the programs that a GPU would get."""

import functools

import jax
import jax.numpy as jnp
import pytest

import bijax
from bijax.ops.norm.norms import wide_rms_norm
from bijax.testing import assert_bits_equal
from pallas_kernels.parts.hopper import batch_sum
from pallas_kernels.schedule.hopper.batch_sum import ChunkSchedule
from tests.mosaic import Races, interpreter
from tests.rows.row_kernel_cases import Case, cases

pytestmark = pytest.mark.usefixtures("hopper")

# Rows of whole blocks and others; a single chunk of rows, whole chunks and others.
ROWS = {case.name: case for case in cases(3, 320, "bfloat16", "float32")}
CHUNKS = {case.name: case for case in cases(260, 256, "bfloat16")}
INTERPRETED = [
    *((case, None) for case in ROWS.values()),
    (CHUNKS["sum_rows"], None),
    (CHUNKS["weight_gradient"], ChunkSchedule(neighbours=2, warpgroups=2)),
    ({case.name: case for case in cases(130, 192, "float32")}["sum_rows"], ChunkSchedule(1, 4)),
]


@pytest.mark.tier("full", fast=("rms_norm-", "rms_norm of a sum-", "weight_gradient of layer_norm-"))
@pytest.mark.parametrize(("case", "schedule"), INTERPRETED, ids=lambda value: getattr(value, "name", ""))
def test_interpreted_kernels_give_the_portable_bits(
    case: Case,
    schedule: ChunkSchedule | None,
    races: Races,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if schedule is not None:
        monkeypatch.setattr(batch_sum, "chunk_schedule", lambda *_: schedule)
    found = case.found(interpret=interpreter())
    assert_bits_equal(found, case.expected(), err_msg=case.name)
    assert not races()


@pytest.mark.parametrize("case", [*ROWS.values(), CHUNKS["sum_rows"]], ids=lambda case: case.name)
def test_programs_for_a_gpu_lower_with_a_kernel(case: Case) -> None:
    program = jax.jit(lambda *arguments: case.kernel(*arguments, **case.parameters)).trace(*case.arguments)
    assert "mosaic_gpu" in program.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((3, 321), ("rms_norm", "sum_axis")),  # rows that the copy engine cannot address
        ((3, 100), ("layer_norm", "sum_rows")),  # fewer columns than lanes
    ],
    ids=str,
)
def test_what_the_kernels_do_not_serve_is_refused(shape: tuple[int, int], names: tuple[str, ...]) -> None:
    for case in cases(*shape, "bfloat16"):
        if case.name in names:
            with pytest.raises(bijax.UnsupportedError, match=f"{case.name}: expected .* at least 128"):
                case.found()


@pytest.mark.parametrize(
    "name", ["rms_norm", "layer_norm_gradient", "weight_gradient", "sum_axis", "variance", "sum_rows"]
)
def test_no_rows(name: str) -> None:
    for case in cases(0, 256, "bfloat16"):
        if case.name == name:
            assert_bits_equal(case.found(), case.expected())


def test_an_offset_and_a_wider_result_take_no_program_of_their_own() -> None:
    """Weights that are stored minus 1 are read as they are, and rows in 16 bits are not copied to float32."""
    x, w = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.bfloat16)
    wide = functools.partial(wide_rms_norm, "test", eps=1e-6)
    for function in (lambda x, w: bijax.rms_norm(x, w, weight_offset=1.0), lambda x, _: bijax.l2_norm(x), wide):
        text = jax.jit(function).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == 1
        assert not any(f"stablehlo.{name} " in text for name in ("add", "convert", "broadcast_in_dim", "constant"))

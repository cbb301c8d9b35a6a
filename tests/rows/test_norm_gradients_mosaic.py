"""Both gradients of rms_norm in one launch for Hopper, under the interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest

from bijax.testing import assert_bits_equal
from pallas_kernels.contract import chunk_contract, row_contract
from pallas_kernels.norm import hopper
from pallas_kernels.schedule.hopper.batch_sum import ChunkSchedule
from pallas_kernels.schedule.hopper.norm_gradients import GradientsSchedule
from pallas_kernels.schedule.hopper.rows import RowSchedule
from tests.mosaic import Races, interpreter
from tests.tiers import full_only

pytestmark = pytest.mark.usefixtures("hopper")


@pytest.mark.parametrize(
    ("rows", "columns", "schedule", "strips", "residual"),
    [
        (18, 1024, RowSchedule(1, 18, hold=True), ChunkSchedule(4, 1), True),
        full_only(130, 1024, RowSchedule(1, 130, hold=True), ChunkSchedule(4, 1), False),
        full_only(133, 2048, RowSchedule(2, 133, hold=True), ChunkSchedule(2, 2), True),
        (18, 1024, RowSchedule(1, 18, hold=True), ChunkSchedule(4, 1, apart=True), False),
        full_only(130, 1152, RowSchedule(1, 130, hold=True, cluster=2, vector=4), ChunkSchedule(2, 1, True), True),
        full_only(133, 2048, RowSchedule(2, 133, hold=True, cluster=2, vector=4), ChunkSchedule(2, 2, True), False),
    ],
)
def test_one_launch_has_the_bits_of_two(
    rows: int, columns: int, schedule: RowSchedule, strips: ChunkSchedule, residual: bool, races: Races
) -> None:
    """In chunks, of which the last is not whole, in a single one, which is rounded at once, and in parts of chunks."""
    rng = np.random.default_rng(0)
    h, g, g_sum = (jnp.asarray(rng.standard_normal((rows, columns)), jnp.bfloat16) for _ in range(3))
    factor = jnp.asarray(rng.standard_normal((rows, 1)), jnp.float32)
    arrays = (h, factor, g, h[0], g_sum if residual else None)
    dh, dw = hopper.rms_norm_gradients(
        *arrays,
        dtype="bfloat16",
        contract=row_contract(),
        chunks=chunk_contract(),
        interpret=interpreter(),
        schedule=GradientsSchedule(schedule, strips),
    )
    (expected,) = hopper.rms_norm_gradient(*arrays, contract=row_contract(), interpret=interpreter())
    weight = hopper.weight_gradient(h, factor, g, contract=chunk_contract(), dtype="bfloat16", interpret=interpreter())
    assert_bits_equal((dh, dw), (expected, weight))
    assert not races()

"""Kernels that several GPUs of one process run together: large sums and exchanges have the bits of one device."""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import bijax
from bijax import parallel
from bijax.testing import assert_bits_equal
from pallas_kernels.contract import TreeContract
from pallas_kernels.devices.peer_sum import peer_sum
from tests.parallel.on_devices import AXIS, array

DEVICES: Final = len(jax.devices())
COUNTS: Final = tuple(n for n in (2, 4) if n <= DEVICES) or (2,)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICES < 2, reason=f"needs two GPUs of one process, got {DEVICES} device"),
]

SHAPES: Final = ((2048, 4096), (2056, 1536), (2050, 1024))
"""Blocks of 2048, 1024 and 512 elements on four devices."""


def terms(devices: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns numbers of all sizes, with infinities, nan, negative zeros and subnormal numbers."""
    x = array(devices, devices, *shape, huge=True)
    x = x.at[:, 0, 1].set(-0.0).at[0, 0, 2].set(jnp.nan).at[:, 1, :64].multiply(2.0**-130)
    return x.at[0, 0, 3].set(jnp.inf).at[1, 0, 3].set(-jnp.inf)


def on(first: int, devices: int) -> Mesh:
    return Mesh(np.array(jax.devices()[first : first + devices]), (AXIS,), axis_types=(AxisType.Auto,))


def compiled(function: Any, mesh: Mesh, out: P, x: jax.Array) -> Any:
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=out)).lower(x).compile()


@pytest.mark.parametrize("devices", COUNTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bits(devices: int, shape: tuple[int, ...], dtype: str) -> None:
    x = terms(devices, shape)
    expected = jax.jit(lambda x: parallel.tree_sum(x, dtype=dtype))(x)
    whole = compiled(lambda x: parallel.psum(x[0], AXIS, dtype=dtype), on(0, devices), P(), x)
    cut = compiled(lambda x: parallel.psum_scatter(x[0], AXIS, dtype=dtype), on(0, devices), P(AXIS), x)
    for program in (whole, cut):
        assert "peer_sum" in program.as_text() or "mosaic_gpu" in program.as_text(), "another way was taken"
        for _ in range(3):  # what an earlier call left in memory is not read
            assert_bits_equal(program(x), expected)


def test_plain_sums_of_four_have_other_bits() -> None:
    if DEVICES < 4:
        pytest.skip(f"needs four GPUs of one process, got {DEVICES}")
    x = array(1, 4, 1024, 1024)
    plain = compiled(lambda x: lax.psum(x[0], AXIS), on(0, 4), P(), x)(x)
    assert (np.asarray(plain) != np.asarray(jax.jit(parallel.tree_sum)(x))).any()


def test_sums_one_after_another() -> None:
    """The next sum starts while other devices still store results of the last one, in a loop and queued."""
    devices = COUNTS[-1]
    x = array(2, devices, 1024, 2048)

    def step(x: jax.Array) -> jax.Array:
        return parallel.psum(x * jnp.float32(0.5), AXIS)

    def often(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 20, lambda _, y: lax.pcast(step(y), AXIS, to="varying"), x[0])[None]

    program = compiled(often, on(0, devices), P(AXIS), x)
    total = x * jnp.float32(0.5)
    tree = jax.jit(parallel.tree_sum)
    for _ in range(20):
        total = jnp.broadcast_to(tree(total), x.shape) * jnp.float32(0.5)
    expected = total * 2
    results = [program(x) for _ in range(20)]
    for result in results:
        assert_bits_equal(result, expected)


def test_devices_elsewhere() -> None:
    """GPUs that are not the first ones use XLA's collectives, with the same bits."""
    if DEVICES < 4:
        pytest.skip(f"needs four GPUs of one process, got {DEVICES}")
    x = terms(2, SHAPES[0])
    program = compiled(lambda x: parallel.psum(x[0], AXIS, dtype="bfloat16"), on(2, 2), P(), x)
    assert "mosaic_gpu" not in program.as_text()
    assert_bits_equal(program(x), jax.jit(lambda x: parallel.tree_sum(x, dtype="bfloat16"))(x))


@pytest.mark.parametrize("devices", COUNTS)
@pytest.mark.parametrize("popular", [False, True], ids=["any experts", "popular experts"])
def test_experts(devices: int, popular: bool) -> None:
    """Results of experts travel back: used rows alone, from none to all rows of a device."""
    tokens, topk, experts, width = 4096, 4, 8, 2048
    x, weights = array(1, tokens, width, dtype=jnp.bfloat16), array(2, tokens, topk)
    rng = np.random.default_rng(3)
    selected = rng.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :topk]
    selected[: tokens // 2] = np.arange(topk) if popular else selected[: tokens // 2]
    down = array(4, experts, width, width, dtype=jnp.bfloat16) / 64

    def block(axis: str | None, x: Any, selected: Any, weights: Any, down: Any) -> Any:
        sent = parallel.moe_dispatch(x, selected, axis, num_experts=experts, zero_unused=False)
        rows = bijax.group_matmul(sent.rows, down, sent.counts, zero_unused=False)
        return parallel.moe_combine(rows, sent, weights, axis)

    given = x, jnp.asarray(selected, jnp.int32), weights, down
    expected = jax.jit(lambda *a: block(None, *a))(*given)
    cut = jax.shard_map(lambda *a: block(AXIS, *a), mesh=on(0, devices), in_specs=P(AXIS), out_specs=P(AXIS))
    program = jax.jit(cut).lower(*given).compile()
    text: Any = program.as_text()
    assert "all-to-all" not in text, "another way was taken"
    for _ in range(3):
        assert_bits_equal(program(*given), expected)


@pytest.mark.parametrize("devices", COUNTS)
@pytest.mark.parametrize("reads", [False, True], ids=["stores", "reads"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_ways(devices: int, reads: bool, dtype: str) -> None:
    x = terms(devices, SHAPES[1])
    expected = np.asarray(jax.jit(lambda x: parallel.tree_sum(x, dtype=dtype))(x)).reshape(-1)
    for columns in (1024, 512):
        options: dict[str, Any] = {"axis": AXIS, "devices": devices, "out_dtype": dtype, "contract": TreeContract()}

        def add(x: jax.Array, whole: bool, columns: int = columns, options: Any = options) -> jax.Array:
            return peer_sum(x.reshape(devices, -1), whole=whole, reads=reads, columns=columns, **options).reshape(-1)

        for whole in (True, False):
            cut = jax.shard_map(
                lambda x, whole=whole, add=add: add(x, whole),
                mesh=on(0, devices),
                in_specs=P(AXIS),
                out_specs=P(AXIS),
                check_vma=False,
            )
            for _ in range(3):
                found = np.asarray(jax.jit(cut)(x))
                assert_bits_equal(found, np.tile(expected, devices) if whole else expected)

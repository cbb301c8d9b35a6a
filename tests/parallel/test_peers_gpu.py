"""Kernels that several GPUs of one process run together: large sums and results of experts have the bits of one."""

import re
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

SHAPES: Final = ((2048, 4096), (2056, 1536), (2052, 1536))
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
def test_bits_of_the_kernel(devices: int, shape: tuple[int, ...], dtype: str) -> None:
    x = terms(devices, shape)
    expected = np.asarray(jax.jit(lambda x: parallel.tree_sum(x, dtype=dtype))(x)).reshape(-1)
    options: dict[str, Any] = {"axis": AXIS, "devices": devices, "out_dtype": dtype, "contract": TreeContract()}
    for whole in (True, False):

        def add(x: jax.Array, whole: bool = whole) -> jax.Array:
            return peer_sum(x.reshape(devices, -1), whole=whole, **options).reshape(-1)

        cut = jax.shard_map(add, mesh=on(0, devices), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
        for _ in range(3):  # what an earlier call left in memory is not read
            assert_bits_equal(np.asarray(jax.jit(cut)(x)), np.tile(expected, devices) if whole else expected)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_sums_over_two(shape: tuple[int, ...], dtype: str) -> None:
    x = terms(2, shape)
    expected = jax.jit(lambda x: parallel.tree_sum(x, dtype=dtype))(x)
    whole = compiled(lambda x: parallel.psum(x[0], AXIS, dtype=dtype), on(0, 2), P(), x)
    cut = compiled(lambda x: parallel.psum_scatter(x[0], AXIS, dtype=dtype), on(0, 2), P(AXIS), x)
    for program in (whole, cut):
        assert "mosaic_gpu" in program.as_text(), "another way was taken"
        for _ in range(3):
            assert_bits_equal(program(x), expected)


@pytest.mark.parametrize("devices", COUNTS)
@pytest.mark.parametrize("popular", [False, True], ids=["any experts", "popular experts"])
def test_results_of_experts(devices: int, popular: bool) -> None:
    """Used rows alone travel back, from none to all rows of a device."""
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
    cut = jax.shard_map(lambda *a: block(AXIS, *a), mesh=on(0, devices), in_specs=P(AXIS), out_specs=P(AXIS))
    program = jax.jit(cut).lower(*given).compile()
    text: Any = program.as_text()
    assert "peer_rows" in text or "mosaic_gpu" in text, "another way was taken"
    assert not re.search(r"bf16\S* all-to-all", text), "another way was taken"
    expected = jax.jit(lambda *a: block(None, *a))(*given)
    for _ in range(3):
        assert_bits_equal(program(*given), expected)
    program = jax.jit(jax.grad(lambda *a: cut(*a).astype(jnp.float32).sum(), (0, 2, 3)))
    gradient = jax.jit(jax.grad(lambda *a: block(None, *a).astype(jnp.float32).sum(), (0, 2, 3)))
    assert_bits_equal(program(*given), gradient(*given))


def test_plain_sums_of_four_have_other_bits() -> None:
    if DEVICES < 4:
        pytest.skip(f"needs four GPUs of one process, got {DEVICES}")
    x = array(1, 4, 1024, 1024)
    plain = compiled(lambda x: lax.psum(x[0], AXIS), on(0, 4), P(), x)(x)
    assert (np.asarray(plain) != np.asarray(jax.jit(parallel.tree_sum)(x))).any()


def test_sums_one_after_another() -> None:
    """The next sum starts while other devices still store results of the last one, in a loop and queued."""
    devices = 2
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

"""Norms, sums and gradients of weights on a Hopper GPU: the bits of the CPU's portable form, in any batch."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal, hostile_rows
from pallas_kernels.contract import chunk_contract, row_contract
from pallas_kernels.parts.hopper import batch_sum
from pallas_kernels.parts.hopper.row_engine import run_rows
from pallas_kernels.rows import hopper as rows
from pallas_kernels.schedule.hopper.batch_sum import ChunkSchedule
from pallas_kernels.schedule.hopper.rows import RowSchedule
from tests.rows.golden_rows import GOLDEN, golden_hash
from tests.rows.row_kernel_cases import Case, cases, hopper_kernel

pytestmark = pytest.mark.gpu

THREADS = 14  # kernels compile outside of the interpreter lock

# Rows of whole blocks and others, for a warp, a warpgroup and a cluster; vectors of another dtype.
SHAPES = (
    (5, 576, "bfloat16", "float32"),
    (301, 576, "bfloat16", "float32"),
    (1100, 1016, "float16", None),
    (9001, 128, "bfloat16", None),
    (300, 1024, "float16", None),
    (130, 4096, "float32", None),
    (9, 32000, "bfloat16", None),
    (3, 128256, "float32", None),
)

KINDS = ("normal", "wide", "cancelling")


@pytest.mark.parametrize(("m", "columns", "dtype", "weights"), SHAPES)
def test_the_bits_are_those_of_the_cpu(m: int, columns: int, dtype: str, weights: str | None) -> None:
    # The kinds of data are distinguished on short rows.
    kinds = KINDS if columns <= 4096 else KINDS[:1]
    by_operation = list(zip(*(cases(m, columns, dtype, weights, kind) for kind in kinds), strict=True))

    def run(same: tuple[Case, ...]) -> tuple[list[Any], list[Any]]:
        return list(same[0].all_found(same)), list(same[0].all_expected(same))

    with ThreadPoolExecutor(THREADS) as pool:
        for same, (ours, theirs) in zip(by_operation, pool.map(run, by_operation), strict=True):
            for kind, found, expected in zip(kinds, ours, theirs, strict=True):
                assert_bits_equal(found, expected, err_msg=f"{same[0].name}, {kind}")


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [(8192, "bfloat16"), (8192, "float32"), (4096, "bfloat16"), (5008, "float16"), (2048, "bfloat16")],
)
def test_spread_strips_give_the_same_bits(columns: int, dtype: str) -> None:
    """Two sums in one pass and one more, of rows in registers and in shared memory."""
    x = jnp.concatenate([jnp.asarray(hostile_rows(0, (3, columns), dtype)[kind]) for kind in (*KINDS, "inf", "nan")])

    def run(schedule: RowSchedule) -> Any:
        def program(row: Any) -> None:
            total, squares = row.fold(lambda x: (x, row.product(x, x)), combine=("add", "add"))
            other = row.fold(lambda x: x - total)
            row.put(0, squares)
            row.put(1, other)
            row.emit(lambda x: (row.product(x, other),))

        return jax.jit(lambda x: run_rows(program, [x], (), [x.dtype], numbers=2, interpret=False, schedule=schedule))(
            x
        )

    m, lanes = len(x), row_contract().lanes(columns)
    members = lanes // (128 * (4 if dtype == "float32" else 8))
    forms = [RowSchedule(team, m, hold=True) for team in (1, 2, 4) if team <= members]
    forms += [RowSchedule(1, m), RowSchedule(2, 2), *([RowSchedule(1, m, columns, 1)] if columns % 128 == 0 else [])]
    every = [replace(form, spread=spread) for form in forms for spread in (False, True)]
    with ThreadPoolExecutor(THREADS) as pool:
        first, *others = pool.map(run, every)
    for schedule, other in zip(every[1:], others, strict=True):
        assert_bits_equal(other, first, err_msg=str(schedule))


@pytest.mark.parametrize(
    ("columns", "dtype"), [(128, "bfloat16"), (128, "float32"), (200, "float16"), (960, "bfloat16")]
)
def test_parts_of_a_warp_give_the_same_bits(columns: int, dtype: str) -> None:
    x = jnp.concatenate([jnp.asarray(hostile_rows(0, (3, columns), dtype)[kind]) for kind in (*KINDS, "inf", "nan")])
    w = jnp.asarray(hostile_rows(1, (columns,), dtype)["normal"])

    def run(schedule: RowSchedule) -> Any:
        def program(row: Any) -> None:
            most = row.fold(lambda x: x, combine="max", unit=-jnp.inf)
            total, product = row.fold(lambda x, w: (x - most, row.product(x, w)), combine=("add", "add"), vectors=(0,))
            row.put(0, total)
            row.put(1, product)
            row.emit(lambda x, w: (row.product(x, total) + w,))

        def call(x: jax.Array, w: jax.Array) -> Any:
            return run_rows(program, [x], [w], [x.dtype], numbers=2, interpret=False, schedule=schedule)

        return jax.jit(call)(x, w)

    vector = 4 if dtype == "float32" else 8
    short = [
        RowSchedule(1, len(x), hold=True, preload=preload, rows_per_warp=each, threads=threads, vector=vector)
        for threads in (4, 8, 16)
        for each, preload in ((1, True), (2, False))
    ]
    every = [RowSchedule(1, len(x), hold=True), RowSchedule(1, len(x), hold=True, rows_per_warp=1), *short]
    with ThreadPoolExecutor(THREADS) as pool:
        first, *others = pool.map(run, every)
    for schedule, other in zip(every[1:], others, strict=True):
        assert_bits_equal(other, first, err_msg=str(schedule))


@pytest.mark.parametrize(("m", "columns"), [(17, 640), (128, 640), (300, 2048), (1000, 321)])
def test_every_cut_of_a_sum_over_rows(m: int, columns: int) -> None:
    x, g = (hostile_rows(seed, (m, columns), "bfloat16")["wide"] for seed in (0, 1))
    factor = hostile_rows(2, (m, 1), "float32")["normal"]
    start = hostile_rows(3, (columns,), "float32")["normal"]

    def sums(schedule: ChunkSchedule) -> jax.Array:
        step: Callable[..., jax.Array] = lambda x, g, factor: x + g  # noqa: E731
        program = jax.jit(
            lambda *rows: batch_sum.sum_chunks(step, rows, start, given=[factor], interpret=False, schedule=schedule)
        )
        return program(x, g)

    cuts = [ChunkSchedule(n, w) for n in (1, 2, 4) for w in (1, 2, 8) if columns % n == 0]
    with ThreadPoolExecutor(THREADS) as pool:
        first, *others = pool.map(sums, cuts)
    for cut, other in zip(cuts[1:], others, strict=True):
        assert_bits_equal(other, first, err_msg=str(cut))


# What the kernels take, and what they leave to the portable form: unaligned rows, few columns.
@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("rms_norm", (576, 8192, 321)),
        ("layer_norm", (2048, 32000, 77)),
        ("sum", (576, 1000)),
        ("mean", (8192, 321)),
        ("var", (2048, 32000)),
    ],
)
def test_rows_at_every_position_among_any_neighbours(name: str, every: tuple[int, ...]) -> None:
    def sweep(columns: int) -> None:
        x = jnp.asarray(hostile_rows(0, (16, columns), "float32")["normal"])
        w = jnp.asarray(hostile_rows(1, (columns,), "float32")["normal"])

        def both(x: jax.Array, w: jax.Array) -> Any:
            """The result and the gradient of the rows."""
            op = getattr(bijax, name)
            f = (lambda x: op(x, w)) if name.endswith("norm") else (lambda x: op(x, -1))
            y, pull = jax.vjp(f, x)
            return y, pull(jnp.cos(y))[0]

        sizes = (2, 9, 133) if columns > 8192 else (2, 530)
        assert_batch_invariant(both, x, w, batch_axes=(0, None), batch_sizes=sizes, modes=("jit",))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(sweep, every))


def test_plain_jax_is_not_invariant() -> None:
    """The control: the sweep above finds what XLA does to a norm after a dot."""
    x = jnp.asarray(hostile_rows(0, (16, 1024), "float32")["normal"])
    w = jnp.asarray(hostile_rows(1, (1024,), "float32")["normal"])

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        h = x @ jnp.outer(w, w)
        return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)

    with pytest.raises(AssertionError):
        assert_batch_invariant(plain, x, w, batch_axes=(0, None), batch_sizes=(2, 133), modes=("jit",))


def test_many_rows_and_few() -> None:
    x = jnp.asarray(hostile_rows(0, (5000, 2048), "bfloat16")["wide"])
    sizes = (5000, 1, 133, 1056, 1057)
    with ThreadPoolExecutor(THREADS) as pool:
        whole, *others = pool.map(lambda m: np.asarray(jax.jit(lambda x: bijax.rms_norm(x))(x[-m:])), sizes)
    for m, other in zip(sizes[1:], others, strict=True):
        assert_bits_equal(other, whole[-m:], err_msg=f"{m} rows")


def test_any_layout() -> None:
    x = jnp.asarray(hostile_rows(0, (33, 640, 5), "float32")["wide"])
    flat = jnp.array(x.transpose(2, 0, 1))
    for op in (bijax.sum, bijax.mean, bijax.var):
        assert_bits_equal(jax.jit(lambda x, op=op: op(x.transpose(2, 0, 1), -1))(x), op(flat, -1), err_msg=op.__name__)
        assert_bits_equal(op(x[:, ::-1], 1), op(x[:, ::-1].transpose(0, 2, 1), -1), err_msg=op.__name__)
    sliced = jax.jit(lambda x: bijax.rms_norm(x.transpose(2, 0, 1)[:, 3:]))(x)
    assert_bits_equal(sliced, bijax.rms_norm(flat)[:, 3:])


def test_aligned_micro_batches_add_up_to_the_whole() -> None:
    x = jnp.asarray(hostile_rows(0, (700, 1024), "float32")["normal"])
    start = jnp.zeros(1024, jnp.float32)
    whole = rows.sum_rows(x, contract=chunk_contract(), accumulate=start)
    for i in range(0, 700, 256):
        start = rows.sum_rows(x[i : i + 256], contract=chunk_contract(), accumulate=start)
    assert_bits_equal(start, whole)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("columns", [576, 32000])
def test_gradients_against_float64(name: str, columns: int) -> None:
    rng = np.random.default_rng(0)
    x, g = (rng.standard_normal((40, columns)).astype(np.float32) for _ in range(2))
    w = rng.standard_normal(columns).astype(np.float32)

    @jax.jit
    def both(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, w: getattr(bijax, name)(x, w, eps=1e-6), x, w)
        return y, *pull(g)

    y, dx, dw = both(x, w, g)
    wide, gw = x.astype(np.float64), g.astype(np.float64) * w
    d = wide - wide.mean(-1, keepdims=True) if name == "layer_norm" else wide
    factor = 1 / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-6)
    normal = d * factor
    exact = factor * (gw - normal * (gw * normal).mean(-1, keepdims=True))
    if name == "layer_norm":
        exact -= factor * gw.mean(-1, keepdims=True)
    assert np.abs(np.asarray(y) - normal * w).max() < 1e-5
    assert np.abs(np.asarray(dx) - exact).max() < 1e-5
    assert np.abs(np.asarray(dw) - (g * normal).sum(0)).max() < 1e-4


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_hashes(name: str) -> None:
    assert golden_hash(name, hopper_kernel(name)) == GOLDEN[name]

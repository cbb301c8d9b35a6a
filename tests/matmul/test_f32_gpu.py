"""The float32 matmuls on a Hopper GPU: every schedule gives the same bits, few rows those of many; accuracy."""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.testing import assert_batch_invariant, assert_bits_equal, hostile_rows
from pallas_kernels.contract import Tf32Contract, split_contract
from pallas_kernels.matmul.hopper import bf16x6, tf32
from pallas_kernels.matmul.schedule.hopper.bf16x6 import SplitSchedule, split_candidates
from pallas_kernels.matmul.schedule.hopper.chain import ChainSchedule
from pallas_kernels.matmul.schedule.hopper.tf32 import Tf32Schedule, tf32_candidates
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule

pytestmark = pytest.mark.gpu

PRECISIONS = ("default", "highest")

# (M, K, N), weights stored as (N, K): aligned, ragged in each dimension, few rows, padded.
SHAPES = {
    "aligned": ((256, 1024, 512), False),
    "ragged": ((203, 1000, 528), False),
    "ragged transposed": ((203, 1000, 520), True),
    "few rows": ((13, 576, 1536), False),
    "unaligned": ((9, 77, 21), False),
}
MOST_SCHEDULES = 4  # of each kind
THREADS = 4
# Weights in registers, of few columns.
CHAINS = [
    ChainSchedule(8, 16, 256, 4),
    ChainSchedule(16, 8, 128, 6),
    ChainSchedule(32, 8, 64, 4),
    ChainSchedule(64, 16, 128, 3),
]
TRANSPOSED_CHAINS = [
    ChainSchedule(8, 8, 256, 4),
    ChainSchedule(64, 16, 128, 3),
    ChainSchedule(16, 8, 256, 6, "memory"),
    ChainSchedule(32, 32, 128, 4, "memory"),
    ChainSchedule(32, 8, 256, 4, "both"),
    ChainSchedule(16, 16, 256, 4, "both", 2),
]
KINDS = ("normal", "wide", "cancelling", "linspace", "inf")


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "default") for name in SHAPES), ("ragged transposed", "highest"), ("few rows", "highest")],
)
def test_every_schedule_gives_the_same_bits(name: str, precision: str) -> None:
    (m, k, n), transpose_w = SHAPES[name]
    data = [operands(kind, m, k, n, transpose_w) for kind in KINDS]
    found: list[Any] = []
    for some in schedules(precision, m, k, n, transpose_w):
        # A share of them for each shape: compiling is what takes time.
        different = list(dict.fromkeys(some))
        stride = max(1, -(-len(different) // MOST_SCHEDULES))
        found += different[list(SHAPES).index(name) % stride :: stride]
    with ThreadPoolExecutor(THREADS) as pool:
        programs = list(pool.map(lambda schedule: compiled(precision, schedule, *data[0], transpose_w), found))
    expected = [programs[0](x, w) for x, w in data]
    for schedule, program in zip(found[1:], programs[1:], strict=True):
        for kind, (x, w), y in zip(KINDS, data, expected, strict=True):
            assert_bits_equal(program(x, w), y, err_msg=f"{kind}, {schedule}")


def schedules(precision: str, m: int, k: int, n: int, transpose_w: bool) -> list[list[Any]]:
    """Returns what the candidates leave out and every candidate for the rows, for fewer and for more, by kind."""
    if precision == "highest":
        tiles = MatmulSchedule(True, 64, 64, 64, 2)
        splits = split_contract(k).splits(k)
        return [
            [SplitSchedule(tiles), SplitSchedule(dataclasses.replace(tiles, blocks=1, warpgroups=2, group=1))],
            [s for rows in (8, 64, m, 512) for s in split_candidates(rows, n, splits)],
        ]
    tiles = MatmulSchedule(False, 64, 64, 32, 3)
    changes: list[dict[str, Any]] = [{}, {"blocks": 1}]
    found = [s for rows in (8, 64, m, 512) for s in tf32_candidates(rows, k, n, transpose_w=transpose_w)]
    return [
        [Tf32Schedule(dataclasses.replace(tiles, **change)) for change in changes],
        [s for s in found if not s.transposers and not s.from_registers],
        [s for s in found if s.transposers or s.from_registers],
        TRANSPOSED_CHAINS if transpose_w else CHAINS,
    ]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_numbers_of_rows_and_both_storages(precision: str) -> None:
    x, w = operands("wide", 300, 512, 256, False)
    whole = np.asarray(multiply(precision, x, w))
    assert_bits_equal(multiply(precision, x, w.T, transpose_w=True), whole)
    numbers = (1, 8, 13, 64, 65, 129)
    with ThreadPoolExecutor(THREADS) as pool:
        programs = pool.map(lambda m: compiled(precision, None, x[:m], w, False), numbers)
        for m, program in zip(numbers, programs, strict=True):
            assert_bits_equal(program(x[-m:], w), whole[-m:], err_msg=f"{m} rows")


def test_larger_numbers_of_rows() -> None:
    x, w = operands("normal", 2048, 4096, 1024, False)
    whole = np.asarray(multiply("default", x, w))
    for m in (1, 128, 1000):
        assert_bits_equal(multiply("default", x[-m:], w), whole[-m:], err_msg=f"{m} rows")


@pytest.mark.parametrize(("precision", "transpose_w"), [("default", False), ("highest", True)])
def test_rows_at_every_position_among_any_neighbours(precision: str, transpose_w: bool) -> None:
    x, w = operands("normal", 16, 256, 128, transpose_w)
    assert_batch_invariant(
        lambda x, w: multiply(precision, x, w, transpose_w=transpose_w),
        x,
        w,
        batch_axes=(0, None),
        batch_sizes=(2, 129),
        modes=("jit",),
    )


@pytest.mark.parametrize(("name", "precision"), [("few rows", "default"), ("ragged transposed", "highest")])
def test_a_stack_gives_the_bits_of_its_products(name: str, precision: str) -> None:
    (m, k, n), transpose_w = SHAPES[name]
    data = [operands(kind, m, k, n, transpose_w) for kind in ("normal", "wide")]
    x, w = (jnp.stack(arrays) for arrays in zip(*data, strict=True))
    y = multiply(precision, x, w, transpose_w=transpose_w)
    for i, (one, weights) in enumerate(data):
        assert_bits_equal(y[i], multiply(precision, one, weights, transpose_w=transpose_w))


@pytest.mark.parametrize(("name", "precision"), [("aligned", "default"), ("unaligned", "highest")])
def test_bias_is_added_to_the_sum(name: str, precision: str) -> None:
    (m, k, n), transpose_w = SHAPES[name]
    x, w = operands("normal", m, k, n, transpose_w)
    bias = jnp.asarray(hostile_rows(n, (n,), "float32")["normal"])
    y = multiply(precision, x, w, transpose_w=transpose_w, bias=bias)
    assert_bits_equal(y, multiply(precision, x, w, transpose_w=transpose_w) + bias)


@pytest.mark.parametrize(("weights", "precision"), [("inf", "default"), ("inf", "highest"), ("ones", "highest")])
def test_what_is_not_finite_comes_out_as_in_float32(weights: str, precision: str) -> None:
    """Infinities and nan of x, of w (columns 1 and 3) and of both; weights that are bfloat16 numbers."""
    x = np.random.default_rng(0).standard_normal((12, 128)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((128, 64)).astype(np.float32)
    x[0, 5], x[1, 7], x[2, 9], x[3, 2:4], x[4, 5], x[5, 64] = np.inf, -np.inf, np.nan, (np.inf, -np.inf), 0.0, 3.4e38
    w = np.ones_like(w) if weights == "ones" else w
    w[64] *= 0.25
    w[7, 0] = 0.0  # infinity times zero
    if weights == "inf":
        w[5, 1], w[7, 3] = np.inf, -np.inf
    with np.errstate(invalid="ignore", over="ignore"):
        exact = x.astype(np.float64) @ w.astype(np.float64)
    y = np.asarray(multiply(precision, jnp.asarray(x), jnp.asarray(w)))
    np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
    infinite = np.isinf(exact)
    np.testing.assert_array_equal(y[infinite], exact[infinite])
    assert np.isfinite(y[np.isfinite(exact)]).all()


@pytest.mark.parametrize("k", [64, 2048])
def test_highest_is_as_accurate_as_float32(k: int) -> None:
    dot = jax.jit(functools.partial(jnp.dot, precision="highest"))
    for kind in ("normal", "positive", "wide", "cancelling", "linspace"):
        x, w = operands("normal" if kind == "positive" else kind, 64, k, 256, False)
        if kind == "positive":
            x, w = jnp.abs(x), jnp.abs(w)
        ours, xla = (relative_errors(y, x, w) for y in (multiply("highest", x, w), dot(x, w)))
        # XLA's float32 chains reach 2.8 to 4.2 units of 2**-24 of the sum of magnitudes here, at either K.
        assert ours.max() <= 8 * 2.0**-24, (kind, ours.max() * 2**24, xla.max() * 2**24)
        # Which algorithm XLA takes, and how good that is, follows its timings.
        assert np.sqrt((ours**2).mean()) <= max(1.5 * np.sqrt((xla**2).mean()), 2 * 2.0**-24), kind


def test_default_is_as_accurate_as_tf32() -> None:
    for kind in ("normal", "wide", "cancelling"):
        x, w = operands(kind, 64, 4096, 256, False)
        # Two operands cut to 10 bits of fraction, and a chain of K/8 additions that truncate.
        assert relative_errors(multiply("default", x, w), x, w).max() <= 2 * 2.0**-10 + 4096 / 8 * 2.0**-22, kind


def relative_errors(y: jax.Array, x: jax.Array, w: jax.Array) -> np.ndarray:
    """Errors against float64 in units of the sum of magnitudes."""
    left, right = np.asarray(x, np.float64), np.asarray(w, np.float64)
    scale = np.abs(left) @ np.abs(right)
    return np.abs(np.asarray(y, np.float64) - left @ right) / np.where(scale == 0, 1, scale)


def compiled(
    precision: str, schedule: Any, x: jax.Array, w: jax.Array, transpose_w: bool
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    compiled: Callable[[jax.Array, jax.Array], jax.Array]
    compiled = multiply.lower(precision, x, w, transpose_w=transpose_w, schedule=schedule).compile()
    return compiled


@functools.partial(jax.jit, static_argnames=("precision", "transpose_w", "schedule"))
def multiply(precision: str, x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    if precision == "highest":
        return bf16x6.matmul(x, w, contract=split_contract(x.shape[-1]), **options)
    return tf32.matmul(x, w, contract=Tf32Contract(), **options)


def operands(kind: str, m: int, k: int, n: int, transpose_w: bool) -> tuple[jax.Array, jax.Array]:
    """Hostile activations; weights that are normal, or as wide as the activations."""
    x = hostile(m + k, (m, k))[kind]
    w = hostile(n + k, (n, k) if transpose_w else (k, n))["wide" if kind == "wide" else "normal"]
    return jnp.asarray(x), jnp.asarray(w)


@functools.cache
def hostile(seed: int, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    return hostile_rows(seed, shape, "float32")

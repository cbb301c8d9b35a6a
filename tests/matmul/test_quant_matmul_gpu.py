"""Products of int8 matrices on a Hopper GPU: the bits of the NumPy program, in every schedule."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.contract import Float8Contract, QuantContract
from pallas_kernels.matmul.hopper.int8 import quant_matmul
from pallas_kernels.matmul.schedule.hopper.int8 import float8_candidates, int8_candidates, transposes_weights
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule
from tests.operators import oracles

pytestmark = pytest.mark.gpu

# (M, K, N) and bias: ragged in each dimension, one row, large sums.
SHAPES = {
    "ragged": ((300, 1008, 528), True),
    "unaligned": ((45, 77, 21), True),
    "one row": ((1, 4096, 640), False),
    "13 rows": ((13, 1000, 520), False),
    "many rows": ((515, 512, 264), True),
    "largest sums": ((3, 131071, 16), False),
}
OTHERS = {
    "narrow": MatmulSchedule(True, 64, 16, 128, 4, blocks=132),
    "narrow, in turn": MatmulSchedule(True, 128, 48, 128, 3, 2, "tiles", blocks=3),
    "wide": MatmulSchedule(False, 64, 128, 128, 3, 2, blocks=132),
    "80 columns": MatmulSchedule(False, 64, 80, 256, 3),
    "128 rows": MatmulSchedule(False, 128, 128, 128, 4, 2, blocks=5),
    "64 rows of weights": MatmulSchedule(True, 64, 64, 384, 4),
}


def operands(m: int, k: int, n: int, groups: int = 1) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(m + n)
    x, w = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((m, k), (groups, n, k)))
    x[0], w[:, 0] = -128, -128
    row, column = (
        (rng.standard_normal(shape) * np.exp2(rng.integers(-20, 20, shape))).astype(np.float32)
        for shape in ((m,), (groups, n))
    )
    if m > 5:
        row[3:5] = np.nan, np.inf
    return x, w, row, column, rng.standard_normal(n).astype(oracles.BF16)


def expected_of(x: Any, w: Any, row: Any, column: Any, bias: Any = None, dtype: Any = oracles.BF16) -> np.ndarray:
    with np.errstate(all="ignore"):
        return with_one_nan(oracles.quantized_product(x, w.T, row, column, bias, dtype))


def with_one_nan(x: Any) -> np.ndarray:
    """Returns the array with the same nan everywhere: which one a product of nans has is the machine's."""
    array = np.array(x)
    array[np.isnan(array.astype(np.float32))] = np.nan
    return array


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_schedule_gives_the_bits_of_the_oracle(name: str, out: str, transpose_w: bool) -> None:
    (m, k, n), with_bias = SHAPES[name]
    x, w, row, column, bias = operands(m, k, n)
    given = bias if with_bias else None
    expected = expected_of(x, w[0], row, column[0], given, jnp.dtype(out))
    ranked = int8_candidates(m, k, n, transposed_w=not transpose_w, out_itemsize=jnp.dtype(out).itemsize)
    others = {label: schedule for label, schedule in OTHERS.items() if transpose_w or transposes_weights(schedule)}
    found: dict[str, Any] = {"chosen": None, **others, **ranked}
    for label, schedule in list(found.items())[:: 2 if out == "bfloat16" else 7]:
        y = quant_matmul(
            *map(jnp.asarray, (x, w[0] if transpose_w else w[0].T, row, column[0])),
            contract=QuantContract(),
            transpose_w=transpose_w,
            bias=None if given is None else jnp.asarray(given),
            out_dtype=out,
            schedule=schedule,
        )
        assert_bits_equal(with_one_nan(y), expected, err_msg=label)


@pytest.mark.parametrize(("transpose_a", "transpose_b"), [(False, False), (True, True)])
def test_the_public_function_has_them_for_every_storage(transpose_a: bool, transpose_b: bool) -> None:
    x, w, row, column, bias = operands(300, 1008, 528)
    y = jax.jit(bijax.quant_matmul, static_argnames=("transpose_a", "transpose_b"))(
        *map(jnp.asarray, (x.T if transpose_a else x, w[0] if transpose_b else w[0].T, row, column[0])),
        bias=jnp.asarray(bias),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
    )
    assert_bits_equal(with_one_nan(y), expected_of(x, w[0], row, column[0], bias))


@pytest.mark.parametrize(("m", "groups", "k", "n"), [(300, 7, 1008, 528), (64, 40, 512, 640)])
def test_rows_in_groups_have_the_bits_of_their_products(m: int, groups: int, k: int, n: int) -> None:
    x, w, row, column, _ = operands(m, k, n, groups)
    sizes = np.random.default_rng(0).multinomial(m - 20, np.full(groups, 1 / groups)).astype(np.int32)
    parts = [
        expected_of(x[end - size : end], one, row[end - size : end], scale)
        for end, size, one, scale in zip(np.cumsum(sizes), sizes, w, column, strict=True)
    ]
    run = jax.jit(bijax.moe_quant_group_gemm)
    y = run(*map(jnp.asarray, (x, row, w.swapaxes(1, 2), column, sizes)))
    assert_bits_equal(with_one_nan(y), np.concatenate([*parts, np.zeros((20, n), oracles.BF16)]))
    y = run(*map(jnp.asarray, (x, row, w.swapaxes(1, 2), column, sizes + m)))
    assert jnp.isnan(y).all()


def test_a_product_in_bfloat16_is_not_exact() -> None:
    """The control: sums in another dtype differ."""
    x, w, row, column, _ = operands(13, 1000, 520)
    scales = jnp.asarray(row)[:, None], jnp.asarray(column)[0]
    y = jnp.dot(*(jnp.asarray(a, jnp.bfloat16) for a in (x, w[0].T))).astype(jnp.float32) * scales[0] * scales[1]
    with pytest.raises(AssertionError):
        assert_bits_equal(with_one_nan(y.astype(jnp.bfloat16)), expected_of(x, w[0], row, column[0]))


@pytest.mark.parametrize(("m", "k", "n", "groups"), [(300, 1000, 256, None), (64, 512, 640, 40), (13, 4096, 128, None)])
def test_float8_sums_are_the_same_in_every_schedule_and_near_the_exact_ones(
    m: int, k: int, n: int, groups: int | None
) -> None:
    lead = () if groups is None else (groups,)
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(s), jnp.float8_e4m3fn) for s in ((m, k), (*lead, n, k)))
    row, column = jnp.ones(m), jnp.ones((*lead, n))
    sizes = np.full(groups or 1, m // (groups or 1), np.int32)
    given = None if groups is None else jnp.asarray(sizes)
    options = {"contract": Float8Contract("wgmma32"), "transpose_w": True, "sizes": given, "out_dtype": jnp.float32}
    schedules = list(float8_candidates(m, k, n, groups=groups, out_itemsize=4).values())[:6]

    def run(schedule: Any) -> np.ndarray:
        return np.asarray(jax.jit(lambda *a: quant_matmul(*a, **options, schedule=schedule))(x, w, row, column))

    with ThreadPoolExecutor(6) as pool:
        first, *others = pool.map(run, schedules)
    for schedule, other in zip(schedules[1:], others, strict=True):
        assert_bits_equal(other, first, err_msg=str(schedule))
    start = 0
    for size, weights in zip(sizes, np.asarray(w, np.float64).reshape(-1, n, k), strict=True):
        rows = np.asarray(x, np.float64)[start : start + size]
        error = np.abs(first[start : start + size] - rows @ weights.T)
        assert (error <= np.abs(rows) @ np.abs(weights.T) * 2.0**-13).all()
        start += size
    if groups is None:
        alone = jax.jit(lambda x: quant_matmul(x, w, row[:1], column, **options))(x[2:3])
        assert_bits_equal(alone, first[2:3], err_msg="alone")

"""Products of rows in groups on a Hopper GPU: every schedule gives each row the bits of a plain matmul."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal, hostile_rows
from pallas_kernels.contract import WgmmaChunkContract, WgmmaContract
from pallas_kernels.matmul.hopper.groups import group_matmul, group_weight_gradient
from pallas_kernels.matmul.hopper.launch import matmul, weight_gradient
from pallas_kernels.matmul.schedule.hopper.group_matmul import group_candidates
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule

pytestmark = pytest.mark.gpu

CONTRACT, CHUNKS = WgmmaContract(), WgmmaChunkContract()
THREADS = 12
FEW, EVERY = 4, 5  # candidates that are tried, and how far apart they are among all
EMPTY = 3  # a group without rows, whose weights are nan

# (M, G, K, N), weights stored as (N, K), operands, result: ragged in each dimension, padded, few rows of many groups.
SHAPES = {
    "ragged": ((300, 7, 1000, 528), False, "bfloat16", "float32"),
    "ragged transposed": ((300, 7, 1000, 520), True, "bfloat16", "bfloat16"),
    "float16": ((1100, 40, 512, 640), False, "float16", "float16"),
    "few rows": ((64, 256, 256, 128), False, "bfloat16", "bfloat16"),
    "unaligned": ((45, 5, 77, 21), False, "bfloat16", "float32"),
}
OTHERS = {
    "narrow": MatmulSchedule(True, 64, 8, 128, 4, blocks=132),
    "narrow, two warpgroups": MatmulSchedule(True, 64, 16, 192, 3, 2, blocks=132),
    "narrow, two pieces": MatmulSchedule(True, 128, 32, 64, 4, blocks=64),
    "narrow, in turn": MatmulSchedule(True, 64, 24, 64, 4, 2, "tiles", blocks=100),
    "wide": MatmulSchedule(False, 64, 64, 64, 4, blocks=7),
    "wide, in turn": MatmulSchedule(False, 128, 128, 64, 4, 2, "tiles", blocks=132),
    "wide, two warpgroups": MatmulSchedule(False, 64, 256, 64, 4, 2, blocks=132),
}


def loads(m: int, groups: int) -> dict[str, np.ndarray]:
    """Sizes of the groups: uneven, even, all rows in one group, half of the rows in none, no rows."""
    rng = np.random.default_rng(m)
    weights = 1 / np.arange(1, groups + 1)
    found = {
        "uneven": rng.multinomial(m, rng.permutation(weights / weights.sum())),
        "even": np.full(groups, m // groups) + (np.arange(groups) < m % groups),
        "one": np.where(np.arange(groups) == groups // 3, m, 0),
        "half": rng.multinomial(m // 2, np.full(groups, 1 / groups)),
        "none": np.zeros(groups, int),
    }
    for sizes in found.values():
        sizes[EMPTY + 1] += sizes[EMPTY]
        sizes[EMPTY] = 0
    return {name: sizes.astype(np.int32) for name, sizes in found.items()}


def operands(m: int, g: int, k: int, n: int, transpose_w: bool, dtype: str) -> tuple[jax.Array, jax.Array]:
    x = np.asarray(hostile_rows(m, (m, k), dtype)["wide"]).copy()
    for i, kind in enumerate(("inf", "cancelling", "linspace", "nan", "denormal")):
        x[i::9] = hostile_rows(i, x[i::9].shape, dtype)[kind]
    w = np.asarray(hostile_rows(n, (g, n, k) if transpose_w else (g, k, n), dtype)["normal"]).copy()
    w[EMPTY] = np.nan
    return jnp.asarray(x), jnp.asarray(w)


@pytest.mark.parametrize("name", SHAPES)
def test_every_schedule_gives_the_bits_of_a_plain_matmul(name: str) -> None:
    (m, g, k, n), transpose_w, dtype, out = SHAPES[name]
    x, w = operands(m, g, k, n, transpose_w, dtype)
    options: dict[str, Any] = {"contract": CONTRACT, "transpose_w": transpose_w, "out_dtype": out}
    one = jax.jit(lambda x, w: matmul(x, w, **options))
    plain = np.stack([np.asarray(one(x, weights)) for weights in w])
    found: dict[str, MatmulSchedule | None] = {"chosen": None, **OTHERS}
    ranked = group_candidates(m, g, k, n, transpose_w=transpose_w, out_itemsize=jnp.dtype(out).itemsize)
    found |= dict(list(ranked.items())[1 : EVERY * FEW : EVERY])
    sizes = jnp.zeros(g, jnp.int32)
    failures = []
    with ThreadPoolExecutor(THREADS) as pool:
        programs = [
            pool.submit(compiled, lambda x, w, s, t=schedule: group_matmul(x, w, s, schedule=t, **options), x, w, sizes)
            for schedule in found.values()
        ]
        for label, program in zip(found, programs, strict=True):
            for load, given in loads(m, g).items():
                group = np.repeat(np.arange(g), given)
                expected = np.zeros((m, n), plain.dtype)
                expected[: len(group)] = plain[group, np.arange(len(group))]
                try:
                    assert_bits_equal(program.result()(x, w, jnp.asarray(given)), expected)
                except Exception as error:  # every schedule that fails is named, with what went wrong
                    failures.append(f"{label}, {load}: {type(error).__name__} {str(error)[:300]}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", SHAPES)
def test_rows_that_are_left_unwritten_change_no_other_row(name: str) -> None:
    (m, g, k, n), transpose_w, dtype, out = SHAPES[name]
    x, w = operands(m, g, k, n, transpose_w, dtype)
    options: dict[str, Any] = {"contract": CONTRACT, "transpose_w": transpose_w, "out_dtype": out}
    sizes = jnp.zeros(g, jnp.int32)
    filled, unwritten = (
        compiled(lambda x, w, s, zero=zero: group_matmul(x, w, s, zero_unused=zero, **options), x, w, sizes)
        for zero in (True, False)
    )
    for given in loads(m, g).values():
        found, expected = (program(x, w, jnp.asarray(given))[: sum(given)] for program in (unwritten, filled))
        assert_bits_equal(found, expected)
    assert jnp.isnan(unwritten(x, w, sizes.at[0].set(m + 1))).all()


@pytest.mark.parametrize("sizes", [[-1, 3, 0, 0, 0], [45, 1, 0, 0, 0], [2**31 - 1, 2**31 - 1, 2, 0, 0]])
def test_sizes_that_do_not_fit_give_nan(sizes: list[int]) -> None:
    (m, g, k, n), transpose_w, dtype, _ = SHAPES["unaligned"]
    x, w = operands(m, g, k, n, transpose_w, dtype)
    given = jnp.asarray(sizes, jnp.int32)
    assert jnp.isnan(group_matmul(x, w, given, contract=CONTRACT)).all()
    assert jnp.isnan(group_weight_gradient(x, x, given, contract=CHUNKS)).all()


@pytest.mark.parametrize("out", ["float32", "bfloat16"])
@pytest.mark.parametrize(("k", "n"), [(512, 528), (1000, 21)])
def test_gradients_have_the_bits_of_the_rows_alone(k: int, n: int, out: str) -> None:
    m, g = 300, 7
    x, d = (jnp.asarray(hostile_rows(i, (m, i), "bfloat16")["normal"]) for i in (k, n))
    x = x.at[m - 1].set(jnp.nan)  # a row of no group
    alone = jax.jit(lambda x, d: weight_gradient(x, d, contract=CHUNKS, out_dtype=out))
    program = jax.jit(lambda x, d, s: group_weight_gradient(x, d, s, contract=CHUNKS, out_dtype=out))
    for load, sizes in loads(m - 1, g).items():
        y = program(x, d, jnp.asarray(sizes))
        for group, (end, size) in enumerate(zip(np.cumsum(sizes), sizes, strict=True)):
            # Rows of zeros after the group's own add exact zeros.
            own = [jnp.zeros_like(a).at[:size].set(a[end - size : end]) for a in (x, d)]
            assert_bits_equal(y[group], alone(*own), err_msg=f"{load}, group {group}")


def test_public_functions_agree_with_matmul() -> None:
    (m, g, k, n), _, dtype, _ = SHAPES["ragged"]
    shapes = (m, k), (g, k, n), (m, n)
    x, w, ct = (jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes))
    sizes = loads(m, g)["uneven"]

    def gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
        def run(x: jax.Array, w: jax.Array, sizes: Any) -> Any:
            y, pull = jax.vjp(lambda x, w: function(x, w, sizes), x, w)
            return y, *pull(ct)

        return run

    ours = jax.jit(gradients(bijax.group_matmul))(x, w, jnp.asarray(sizes))
    ragged = jax.jit(bijax.invariant(gradients(jax.lax.ragged_dot)))(x, w, jnp.asarray(sizes))
    assert_bits_equal(ragged, ours)
    one = jax.jit(gradients(lambda x, w, _: bijax.matmul(x, w)))
    group = np.repeat(np.arange(g), sizes)
    plain = [one(x, weights, None) for weights in w]
    for found, each in zip(ours[:2], zip(*(p[:2] for p in plain), strict=True), strict=True):
        assert_bits_equal(found, jnp.stack(each)[group, np.arange(m)])


def test_xla_is_not_invariant() -> None:
    """The control: stock rows change with the weights of a group that they do not belong to, or with their number."""
    (m, g, k, n), _, dtype, _ = SHAPES["ragged"]
    x, w = (jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate([(m, k), (g, k, n)]))
    stock = jax.jit(jax.lax.ragged_dot)
    sizes = jnp.asarray(loads(m, g)["uneven"])
    alone = jnp.where(jnp.arange(g) == 0, sizes, 0)
    first = int(sizes[0])
    found = stock(x, w.at[EMPTY].set(jnp.nan), sizes), stock(x[:first], w, alone)
    whole = stock(x, w, sizes)
    with pytest.raises(AssertionError):
        assert_bits_equal(found, (whole, whole[:first]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_accuracy_against_float64(dtype: str) -> None:
    m, g, k, n = 200, 4, 4096, 256
    x, w = (jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate([(m, k), (g, k, n)]))
    sizes = np.array([50, 0, 100, 50], np.int32)
    y = np.asarray(group_matmul(x, w, jnp.asarray(sizes), contract=CONTRACT, out_dtype="float32"), np.float64)
    left, right = np.asarray(x, np.float64), np.asarray(w, np.float64)
    for end, size, one in zip(np.cumsum(sizes), sizes, right, strict=True):
        rows = slice(end - size, end)
        # A chain of K/16 additions into float32 that truncate: below 2**-23 of the sum of magnitudes for each.
        bound = k / 16 * 2.0**-22 * (np.abs(left[rows]) @ np.abs(one))
        assert (np.abs(y[rows] - left[rows] @ one) <= bound).all()


def compiled(function: Callable[..., jax.Array], *arrays: jax.Array) -> Callable[..., jax.Array]:
    return jax.jit(function).lower(*arrays).compile()

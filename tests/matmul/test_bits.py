"""Matmul: a row's bits at every batch size and position, in every dtype, and the contract itself, emulated."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal, batch_variance_report, hostile_rows
from pallas_kernels.contract import MatmulContract, matmul_contract
from pallas_kernels.matmul import cpu
from pallas_kernels.matmul.cpu import launch
from pallas_kernels.matmul.cpu.forms import panels
from pallas_kernels.matmul.schedule.cpu import Step, matmul_ladder, steps_by_preference
from tests.arrays import on_device
from tests.matmul.reference import emulate
from tests.tiers import full_only

DTYPES = ("float32", "bfloat16", "float16")
KS_AND_NS = [(1, 1), (7, 5), (64, 128), (333, 77), (576, 192), (1100, 40)]


def weights(k: int, n: int, dtype: str, *, transpose: bool = False) -> jax.Array:
    w = np.random.default_rng(k + n).standard_normal((k, n)).astype(dtype)
    return jnp.asarray(np.ascontiguousarray(w.T) if transpose else w)


@pytest.mark.tier("full", fast=("(1, 5, 33)-576-192-float32",))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "n"), KS_AND_NS)
@pytest.mark.parametrize("sizes", [(1, 5, 33), (2, 17)], ids=str)
def test_rows_keep_their_bits(k: int, n: int, dtype: str, sizes: tuple[int, ...]) -> None:
    w, bias = weights(k, n, dtype), weights(1, n, dtype)[0]
    x = hostile_rows(0, (33, k), dtype)

    def product(x: jax.Array) -> jax.Array:  # one function, so that each size is compiled once
        return bijax.matmul(x, w, bias=bias)

    for kind in ("normal", "wide", "inf") if dtype == "float32" else ("cancelling",):
        assert_batch_invariant(product, jnp.asarray(x[kind]), batch_sizes=sizes)


@pytest.mark.tier("full", fast=("False",))
@pytest.mark.parametrize("transpose", [False, True])
def test_gradient_rows_keep_their_bits(transpose: bool) -> None:
    w = weights(333, 77, "float32", transpose=transpose)
    x = on_device(hostile_rows(1, (33, 333), "float32")["normal"])

    def gradient(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(bijax.matmul(x, w, transpose_w=transpose) ** 2))(x)

    # The square's derivative 2 * y is exact, so the cotangent is as invariant as the product itself.
    assert_batch_invariant(gradient, x, batch_sizes=(2, 33), modes=("jit",))


@pytest.mark.tier("full", fast=("(33, 513)-576-True",))
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("k", [576, 1100])
@pytest.mark.parametrize("sizes", [(33, 513), (1, 127, 2, 3, 5, 8, 31, 65, 257, 511, 1025)], ids=str)
def test_every_number_of_rows(k: int, transpose: bool, sizes: tuple[int, ...]) -> None:
    """Tiles, tails and every way to cut a batch into them."""
    w = weights(k, 40, "float32", transpose=transpose)
    x = on_device(hostile_rows(2, (1100, k), "float32")["normal"])
    whole = bijax.matmul(x, w, transpose_w=transpose)
    for m in sizes:
        start = (37 * m) % (1100 - m)
        rows = x[start : start + m]
        assert_bits_equal(bijax.matmul(rows, w, transpose_w=transpose), whole[start : start + m], err_msg=f"{m} rows")


@pytest.mark.tier("full")
@pytest.mark.parametrize("every", [False, full_only(True)], ids=["few", "every"])
def test_transformations_keep_the_bits(every: bool) -> None:
    w = weights(333, 77, "float32")
    x = on_device(hostile_rows(3, (24, 333), "float32")["wide"])
    y = bijax.matmul(x, w)

    def f(x: jax.Array) -> jax.Array:
        return bijax.matmul(x, w)

    stacked = jnp.stack([w, 2 * w, w - 1])
    products = [bijax.matmul(x, m) for m in stacked]
    assert_bits_equal(jax.vmap(bijax.matmul, in_axes=(None, 0))(x, stacked), jnp.stack(products))
    assert_bits_equal(jax.jit(f)(x), y)
    assert_bits_equal(jax.vmap(f)(x), y)
    assert_bits_equal(jax.lax.scan(lambda c, r: (c, f(r)), 0, x)[1], y)
    if not every:
        return
    assert_bits_equal(jax.vmap(f, in_axes=1, out_axes=1)(x.reshape(4, 6, 333)).reshape(24, 77), y)
    assert_bits_equal(jax.vmap(jax.vmap(f))(x.reshape(4, 6, 333)).reshape(24, 77), y)
    assert_bits_equal(jax.lax.map(f, x), y)
    assert_bits_equal(jax.checkpoint(f)(x), y)
    assert_bits_equal(jax.value_and_grad(lambda x: (f(x).sum(), f(x)), has_aux=True)(x)[0][1], y)
    square = bijax.matmul(x, weights(333, 333, "float32"))
    donated = jax.jit(lambda x: bijax.matmul(x, weights(333, 333, "float32")), donate_argnums=0)
    assert_bits_equal(donated(x + 0), square)
    with jax.enable_x64(True):
        assert_bits_equal(jax.jit(lambda x: f(x))(x), y)
    assert_bits_equal(bijax.matmul(jnp.stack([x] * 3), stacked), jnp.stack(products))
    assert_bits_equal(bijax.matmul(x.reshape(2, 3, 4, 333), w), y.reshape(2, 3, 4, 77))


@pytest.mark.tier("full", fast=("333-True", "1100-False"))
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("k", [5, 333, 576, 1100])
def test_the_contract_is_what_is_computed(k: int, transpose: bool) -> None:
    contract = matmul_contract(k, transpose_w=transpose)
    x = np.random.default_rng(k).standard_normal((9, k)).astype(np.float32)
    w = np.asarray(weights(k, 24, "float32"))
    y = bijax.matmul(x, w.T.copy() if transpose else w, transpose_w=transpose)
    assert_bits_equal(y, emulate(x, w, contract))


@pytest.mark.tier("full")
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("k", [333, 576, 1100])
def test_schedules_agree_or_are_not_used(k: int, transpose: bool) -> None:
    contract = matmul_contract(k, transpose_w=transpose)
    ladder = matmul_ladder(k, contract.k_block, transpose_w=transpose)
    used = [s for s in ladder if s.rows <= 64 and cpu.honours_contract(s, k, 48, contract, transpose)]
    assert len(used) >= 3, f"this machine has hardly a fast schedule: {used}"


@pytest.mark.parametrize(("transpose", "turned"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("n", [40, 192, 300])
def test_panels_of_the_weights_cover_all_columns(n: int, transpose: bool, turned: bool) -> None:
    """Small integers, whose sums are exact in any order; the last panel may repeat columns of the one before."""
    rng = np.random.default_rng(n)
    x, w = (rng.integers(-9, 10, shape).astype(np.float32) for shape in ((3, 70), (70, n)))
    form = functools.partial(panels, k_block=32, transpose_w=transpose, turned=turned)
    y = jax.jit(form)(x, w.T if transpose else w)
    assert_bits_equal(y, (x.astype(np.float64) @ w.astype(np.float64)).astype(np.float32))


def test_a_schedule_of_another_order_is_found_out() -> None:
    """The control of the comparison: one dot over the whole of K means another contract than blocks of 64."""
    assert not cpu.honours_contract(Step("whole", 8), 576, 256, MatmulContract(64), False)


@pytest.mark.tier("full")
@pytest.mark.parametrize(("k", "n", "block"), [(576, 960, 192), (192, 40, 96), (256, 192, 64), (1024, 64, 512)])
def test_a_product_of_blocks_is_used_only_if_the_whole_program_agrees(
    k: int, n: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sum of blocks only the dot is compared; the rest of the program is exact or correctly rounded."""
    agrees: Any = launch.honours_contract
    for step in (Step(form, rows) for form in ("columns", "stacked") for rows in (2, 16, 64)):
        for transpose in (False, True):
            given = step, k, n, MatmulContract(block), transpose
            by_its_dot = agrees.__wrapped__.__wrapped__(*given)
            with monkeypatch.context() as patch:
                patch.setattr(launch, "_LONGEST_SHORT", k)
                assert agrees.__wrapped__.__wrapped__(*given) == by_its_dot, given


def test_a_dot_of_blocks_with_other_bits_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = launch._STACKS["stacked"]
    given = Step("stacked", 4), 192, 24, MatmulContract(96), False
    agrees: Any = launch.honours_contract
    assert agrees.__wrapped__.__wrapped__(*given)
    one_bit = np.float32(1 + 2**-23)
    monkeypatch.setitem(launch._STACKS, "stacked", lambda *a: right(*a).at[1, 3, 7].multiply(one_bit))
    assert not agrees.__wrapped__.__wrapped__(*given)


def test_preference_never_leaves_the_ladder_empty() -> None:
    ladder = matmul_ladder(576, 192, transpose_w=False)
    for rows in (1, 3, 512, 10_000):
        steps = steps_by_preference(ladder, rows)
        assert sorted(steps) == sorted(ladder)
        assert steps[0].rows == min((s.rows for s in ladder if s.rows >= rows), default=512)


@pytest.mark.tier("full", fast=("False-False",))
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("continued_and_padded", [False, True])
def test_aligned_micro_batches_add_up_to_the_whole(continued_and_padded: bool, transpose: bool) -> None:
    w = weights(40, 24, "float32", transpose=transpose)
    bias = weights(1, 24, "float32")[0]
    x = on_device(hostile_rows(5, (384, 40), "float32")["normal"])
    g = on_device(hostile_rows(6, (384, 24), "float32")["normal"])

    def loss(params: tuple[jax.Array, jax.Array], rows: slice) -> jax.Array:
        return jnp.sum(bijax.matmul(x[rows], params[0], bias=params[1], transpose_w=transpose) * g[rows])

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    whole = gradient((w, bias), slice(None))
    total = gradient((w, bias), slice(0, 128))
    for start in (128, 256):
        total = jax.tree.map(jnp.add, total, gradient((w, bias), slice(start, start + 128)))
    assert_bits_equal(total, whole)
    if not continued_and_padded:
        return
    continued = None
    for cut in (slice(0, 256), slice(256, 384)):
        continued = bijax.ops.weight_gradient(x[cut], g[cut], transpose_w=transpose, accumulate=continued)
    assert_bits_equal(continued, whole[0])
    padded = bijax.ops.weight_gradient(
        jnp.pad(x[:200], ((0, 60), (0, 0))), jnp.pad(g[:200], ((0, 60), (0, 0))), transpose_w=transpose
    )
    assert_bits_equal(padded, bijax.ops.weight_gradient(x[:200], g[:200], transpose_w=transpose))


def test_control_plain_jax_differs() -> None:
    """The same harness finds that jnp.dot changes bits with the batch."""
    w = weights(576, 192, "float32")
    x = on_device(hostile_rows(0, (64, 576), "float32")["normal"])
    assert batch_variance_report(lambda x: jnp.dot(x, w), x, batch_sizes=(2, 64)).differing_elements > 0

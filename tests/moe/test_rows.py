"""Scatter, grouped products, SwiGLU and gather of a mixture of experts: the numbers of the oracles."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.arrays import on_device
from tests.operators import oracles
from tests.operators.lowering import assert_fenced_on_cuda
from tests.tiers import full_only

C, TOPK, EXPERTS = 5, 3, 6


def normal(seed: int, *shape: int, dtype: Any = "float32") -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def int8(seed: int, *shape: int) -> jax.Array:
    return on_device(np.random.default_rng(seed).integers(-128, 128, shape, np.int8))


def routed(seed: int, tokens: int, topk: int = TOPK, experts: int = EXPERTS) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(experts)[:topk] for _ in range(tokens)]
    return np.array(rows, np.int32).reshape(tokens, topk)


# Tokens, the experts they go to, the experts of the rank, rows, and shared experts with their tokens.
CASES: dict[str, dict[str, Any]] = {
    "all experts": {"selected": routed(0, 7), "range": (0, EXPERTS)},
    "a rank with shared experts": {"selected": routed(1, 7), "range": (2, 5), "shared": (2, 3, 4), "rows": 30},
    "one token": {"selected": routed(2, 1), "range": (0, EXPERTS), "shared": (1, 0, 1)},
    "no token": {"selected": routed(3, 0), "range": (0, EXPERTS)},
    "all to one expert, none to others": {"selected": np.full((6, 1), 4, np.int32), "range": (3, 6)},
    "no expert": {"selected": routed(4, 4), "range": (2, 2), "rows": 2},
    "padding": {"selected": np.array([[1, -1], [-1, -1], [0, 1]], np.int64), "range": (0, 2), "rows": 3},
}


def arguments(case: dict[str, Any]) -> tuple[dict[str, Any], int, int, int, int]:
    (first, end), (shared, start, per_rank) = case["range"], case.get("shared", (0, 0, 0))
    rows = case.get("rows", case["selected"].size)
    options = {
        "expert_start_idx": first,
        "expert_end_idx": end,
        "allocated_tokens": rows,
        "num_shared_experts_per_rank": shared,
        "num_tokens_offset": start,
        "num_tokens_per_rank": per_rank,
    }
    return options, rows, shared, start, per_rank


def tokens_of_rows(case: dict[str, Any], offset: np.ndarray) -> np.ndarray:
    shared, start, per_rank = case.get("shared", (0, 0, 0))
    in_front = np.tile(np.arange(start, start + per_rank), shared)
    return np.concatenate([in_front, np.where(offset < 0, -1, offset // case["selected"].shape[1])]).astype(int)


OFTEN = ("a rank with shared experts", "no token", "all to one expert, none to others", "padding")


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", CASES)
def test_rows_of_the_oracle(name: str) -> None:
    case = CASES[name]
    options, rows, shared, start, per_rank = arguments(case)
    selected, (first, end) = case["selected"], case["range"]
    x = normal(0, len(selected), C, dtype="bfloat16")
    smooth = jnp.exp(normal(1, shared + end - first, C))
    offset, count = oracles.scatter(selected, first, end, rows)
    token = tokens_of_rows(case, offset)
    padded = np.concatenate([np.asarray(x), np.zeros((1, C), oracles.BF16)])  # row -1
    expected = padded[token]

    expert = np.repeat(np.arange(shared + end - first), [per_rank] * shared + count.tolist())
    used = token >= 0
    weights, wide = normal(3, *selected.shape), normal(2, len(token), 2 * C, dtype="bfloat16")
    results = normal(4, len(token), C, dtype="bfloat16")
    in_front = {k: options[k] for k in ("num_shared_experts_per_rank", "num_tokens_per_rank")}
    placed = {**in_front, "num_tokens_offset": start}

    @jax.jit
    def everything(x: jax.Array, selected: jax.Array, count: jax.Array, offset: jax.Array) -> Any:
        return (
            bijax.moe_scatter(x, selected, **options),
            bijax.moe_scatter_dynamic_quant(x, selected, smooth, **options),
            bijax.moe_swiglu_dynamic_quant(wide, smooth, count, **in_front),
            bijax.moe_gather(results, offset, weights, **placed),
            bijax.moe_gather(results, offset, weights, preferred_element_type=jnp.float32, **placed),
            bijax.swiglu(wide.astype(jnp.float32)),
        )

    copied, scattered, activated, back, wide_back, middle = everything(x, selected, count, offset)
    assert_bits_equal(copied, (expected, count, offset))
    assert_bits_equal(bijax.moe_scatter(x, selected, **options), copied, err_msg="known")
    for (y, scale, *rest), rows_before in ((scattered, expected), (activated, middle)):
        wanted = oracles.quantize(np.asarray(rows_before)[used], np.asarray(smooth)[expert])
        assert_bits_equal((y[used], scale[used]), wanted)
        assert not np.asarray(y)[~used].any()
        assert not np.asarray(scale)[~used].any()
        assert_bits_equal(rest, [count, offset][: len(rest)])
    for found, dtype in ((back, oracles.BF16), (wide_back, np.float32)):
        assert_bits_equal(found, oracles.gather(results, offset, weights, shared, start, per_rank, dtype))


@pytest.mark.parametrize("count", [[2, 0, 5], full_only([0, 9, 0]), [0, 0, 0]], ids=str)
def test_products_of_the_oracle(count: list[int]) -> None:
    x, w, scale = int8(0, 9, 40), int8(1, 3, 40, 8), jnp.exp(normal(2, 9))
    columns = jnp.exp(normal(3, 3, 8))
    y = jax.jit(bijax.moe_quant_group_gemm)(x, scale, w, columns, np.int32(count))
    expert = np.repeat(np.arange(3), count)
    expected = np.zeros((9, 8), oracles.BF16)
    given = [np.asarray(array) for array in (x, w, scale, columns)]  # whose parts are no programs
    for row, e in enumerate(expert):
        of_row, of_expert, row_scale, column_scales = given[0][[row]], given[1][e], given[2][[row]], given[3][e]
        one = oracles.quantized_product(of_row, of_expert, row_scale, column_scales)
        expected[row] = one[0]
        if row == 0:
            assert_bits_equal(bijax.moe_quant_matmul(of_row, row_scale, of_expert, column_scales), one)
    assert_bits_equal(y, expected)
    bad = columns.at[2].set(jnp.nan), scale.at[8].set(jnp.nan)
    rows = bijax.moe_quant_group_gemm(x, bad[1], w, bad[0], count, preferred_element_type="float32")
    assert np.isnan(rows).all(1).tolist() == [e == 2 for e in expert] + [False] * (9 - len(expert)) or sum(count) == 9

    xf, wf = normal(4, 9, 40, dtype="bfloat16"), normal(5, 3, 40, 8, dtype="bfloat16")
    z = bijax.group_matmul(xf, wf, count)
    exact, rows, weights = np.zeros((9, 8)), np.asarray(xf, np.float64), np.asarray(wf, np.float64)
    for row, e in enumerate(expert):
        exact[row] = rows[row] @ weights[e]
    assert np.abs(np.asarray(z, np.float64) - exact).max() <= 2.0**-8 * np.abs(exact).max()
    assert not np.asarray(z[sum(count) :], np.float32).any()


def test_swiglu() -> None:
    x = normal(0, 4, 3, 14) * 4
    exact = oracles.swiglu(x)
    assert np.abs(bijax.swiglu(x) - exact).max() <= 1e-6 * np.abs(exact).max()
    half = bijax.swiglu(x.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    assert bijax.swiglu(jnp.ones((0, 4))).shape == (0, 2)


@pytest.mark.tier("full")
def test_gradients_of_the_16_bit_path() -> None:
    """The layer's gradients in float32 are those of plain JAX within rounding."""
    x, selected = normal(0, 6, C), routed(1, 6)
    weights = jax.nn.softmax(normal(2, 6, TOPK))
    up, down = normal(3, EXPERTS, C, 8), normal(4, EXPERTS, 4, C)
    shared = {"num_shared_experts_per_rank": 1, "num_tokens_offset": 2, "num_tokens_per_rank": 3}

    def ours(x: jax.Array, weights: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        rows, count, offset = bijax.moe_scatter(x, selected, expert_end_idx=EXPERTS, **shared)
        h = bijax.group_matmul(bijax.swiglu(bijax.group_matmul(rows[3:], up, count)), down, count)
        return bijax.moe_gather(jnp.concatenate([rows[:3] * 2, h]), offset, weights, **shared)

    def plain(x: jax.Array, weights: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        gate, value = jnp.split(jnp.einsum("tc,tkcf->tkf", x, up[selected], precision="highest"), 2, -1)
        rows = jnp.einsum("tkf,tkfc->tkc", jax.nn.silu(gate) * value, down[selected], precision="highest")
        return (rows * weights[..., None]).sum(1).at[2:5].add(2 * x[2:5])

    g = normal(5, 6, C)
    y, pull = jax.vjp(ours, x, weights, up, down)
    expected, plain_pull = jax.vjp(plain, x, weights, up, down)
    for found, wanted in zip((y, *pull(g)), (expected, *plain_pull(g)), strict=True):
        assert np.abs(found - wanted).max() <= 1e-5 * max(1, np.abs(wanted).max())


@pytest.mark.tier("full")
def test_what_is_traced_and_does_not_fit_is_nan() -> None:
    x, selected = normal(0, 4, C), np.zeros((4, 2), np.int32)
    options: dict[str, Any] = {"expert_end_idx": 2, "allocated_tokens": 5, "num_shared_experts_per_rank": 1}
    y, count, _ = jax.jit(lambda x, s: bijax.moe_scatter(x, s, **options))(x, selected)
    assert np.isnan(y).all(1).tolist() == [False] * 4 + [True] * 5
    assert count.tolist() == [8, 0]
    scale = jax.jit(lambda x, s: bijax.moe_scatter_dynamic_quant(x, s, **options))(x, selected)[1]
    assert np.isnan(scale).tolist() == [False] * 4 + [True] * 5

    @jax.jit
    def by_count(count: jax.Array) -> Any:
        quantised = int8(0, 4, C), jnp.ones(4), int8(1, 2, C, 3), jnp.ones((2, 3))
        return (
            bijax.group_matmul(x, jnp.ones((2, C, 3)), count),
            bijax.moe_quant_group_gemm(*quantised, count, preferred_element_type="float32"),
            bijax.moe_swiglu_dynamic_quant(x[:, :4], None, count)[1],
        )

    for count in ([3, 2], [-1, 2], [2**31 - 1, 2**31 - 1]):
        assert all(np.isnan(result).all() for result in by_count(np.int32(count)))

    gather = jax.jit(lambda o: bijax.moe_gather(x, o, jnp.ones((3, 2))))
    assert np.isnan(gather(np.int32([0, 1, 2, 2]))).all(1).tolist() == [False, True, False]
    assert np.isnan(gather(np.int32([0, 1, 2, 6]))).all()
    assert gather(np.int32([-5, -1, -1, 1]))[0].tolist() == x[3].tolist()


_OPERATIONS_ALONE = """
import jax, jax.numpy as jnp, bijax
from bijax.hlo import inspect_for

def quantised(x, s):
    return bijax.moe_scatter_dynamic_quant(x, s, expert_end_idx=4, num_shared_experts_per_rank=1)

with bijax.lowering_for("sm_80"):
    x, s = jax.ShapeDtypeStruct((6, 8), jnp.bfloat16), jax.ShapeDtypeStruct((6, 2), jnp.int32)
    report = inspect_for("cuda", quantised, x, s)
    assert report.invariant, report
    plain = inspect_for("cuda", lambda x: x / x.astype(jnp.float32).sum(-1, keepdims=True), x)
    assert not plain.invariant
"""


@pytest.mark.tier("fault")
def test_operations_are_fenced_where_nothing_else_of_the_library_is_used() -> None:
    subprocess.run([sys.executable, "-c", _OPERATIONS_ALONE], check=True, cwd=Path(__file__).parents[2])


def test_what_is_lowered_for_cuda_is_fenced() -> None:
    bf16, i8, i32, f32 = jnp.bfloat16, jnp.int8, jnp.int32, jnp.float32
    options = {"expert_end_idx": 4, "num_shared_experts_per_rank": 1}
    assert_fenced_on_cuda(lambda x, s: bijax.moe_scatter_dynamic_quant(x, s, **options), ((6, 8), bf16), ((6, 2), i32))
    assert_fenced_on_cuda(
        bijax.moe_quant_group_gemm, ((6, 8), i8), ((6,), f32), ((4, 8, 3), i8), ((4, 3), f32), ((4,), i32)
    )
    assert_fenced_on_cuda(bijax.moe_swiglu_dynamic_quant, ((6, 8), bf16), ((4, 4), f32), ((4,), i32))
    assert_fenced_on_cuda(bijax.moe_gather, ((6, 8), bf16), ((6,), i32), ((3, 2), f32))

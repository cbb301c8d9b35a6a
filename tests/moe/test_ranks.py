"""A whole layer of experts: a token's bits among others, and with its experts on 1, 2, 4 and 8 ranks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal, batch_variance_report
from tests.tiers import full_only

EXPERTS, TOPK, SHARED, C, F = 8, 3, 2, 24, 16


def normal(seed: int, *shape: int, dtype: Any = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def int8(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-127, 128, shape, np.int8)


ROUTER = normal(0, C, EXPERTS)
SMOOTH = np.exp(normal(1, SHARED + EXPERTS, C)), np.exp(normal(2, SHARED + EXPERTS, F))
UP, DOWN = int8(3, SHARED + EXPERTS, C, 2 * F), int8(4, SHARED + EXPERTS, F, C)
SCALES = tuple(np.exp(normal(i, SHARED + EXPERTS, n)) / np.float32(1e4) for i, n in ((5, 2 * F), (6, C)))


def on_rank(x: jax.Array, selected: jax.Array, rank: int, ranks: int, allocated: int | None) -> tuple[Any, Any, Any]:
    """Returns a rank's rows of shared experts, its other rows, and their offsets.

    Shared experts are cut first, and then their tokens.
    """
    each = EXPERTS // ranks
    experts = slice(SHARED + rank * each, SHARED + (rank + 1) * each)
    number = max(1, SHARED // ranks)
    first = rank * SHARED // ranks
    parts = max(1, ranks // SHARED)
    tokens = -(-x.shape[0] // parts)
    start = min(x.shape[0], rank % parts * tokens) if parts > 1 else 0
    length = min(tokens, x.shape[0] - start)

    def of(a: jax.Array) -> jax.Array:
        return jnp.concatenate([a[first : first + number], a[experts]])

    def multiply(rows: jax.Array, scale: jax.Array, w: jax.Array, columns: jax.Array, count: jax.Array) -> jax.Array:
        split = number * length
        in_front = [
            bijax.moe_quant_matmul(rows[s], scale[s], w[i], columns[i])
            for i, s in enumerate(slice(i * length, (i + 1) * length) for i in range(number))
        ]
        own = bijax.moe_quant_group_gemm(rows[split:], scale[split:], w[number:], columns[number:], count)
        return jnp.concatenate([*in_front, own])

    rows, scale, count, offset = bijax.moe_scatter_dynamic_quant(
        x,
        selected,
        of(SMOOTH[0]),
        expert_start_idx=rank * each,
        expert_end_idx=(rank + 1) * each,
        allocated_tokens=allocated,
        num_shared_experts_per_rank=number,
        num_tokens_offset=start,
        num_tokens_per_rank=length,
    )
    h = multiply(rows, scale, of(UP), of(SCALES[0]), count)
    q, q_scale = bijax.moe_swiglu_dynamic_quant(
        h, of(SMOOTH[1]), count, num_shared_experts_per_rank=number, num_tokens_per_rank=length
    )
    y = multiply(q, q_scale, of(DOWN), of(SCALES[1]), count)
    return y[: number * length], y[number * length :], offset


def layer(x: jax.Array, ranks: int = 1, allocated: int | None = None) -> jax.Array:
    scores = bijax.moe_gating_gemm(x.astype(jnp.float32), ROUTER)
    selected, weights = bijax.moe_softmax_topk(scores, TOPK)
    shared, own, offset = zip(*(on_rank(x, selected, r, ranks, allocated) for r in range(ranks)), strict=True)
    return bijax.moe_gather(
        jnp.concatenate([*shared, *own]), jnp.concatenate(offset), weights, num_shared_experts_per_rank=SHARED
    )


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    x = np.array(normal(7, 12, C))
    x[3:7] = x[3]  # several tokens with the same experts
    return jnp.asarray(x).astype(jnp.bfloat16)


@pytest.mark.parametrize(("ranks", "allocated"), [(2, 40), full_only(4, 40), full_only(4, None), full_only(8, None)])
def test_the_number_of_ranks_and_rows_changes_no_bit(tokens: jax.Array, ranks: int, allocated: int | None) -> None:
    one, several = jax.jit(lambda x: (layer(x), layer(x, ranks, allocated)))(tokens)
    assert np.isfinite(np.asarray(one, np.float32)).all()
    assert np.asarray(one, np.float32).any(1).all()
    assert_bits_equal(several, one)


@pytest.mark.tier("full")
def test_tokens_keep_their_bits_among_others(tokens: jax.Array) -> None:
    assert_batch_invariant(layer, tokens, batch_sizes=(1, 12), neighbours=("nan",), modes=("jit",))
    y = jax.jit(layer)(tokens)
    assert_bits_equal(jax.jit(bijax.invariant(layer))(tokens), y, err_msg="under the transform")
    assert_bits_equal(jax.jit(jax.vmap(layer))(tokens[:2, None])[:, 0], y[:2], err_msg="vmap")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert_bits_equal(jax.jit(layer)(tokens), y, err_msg="x64 and strict promotion")


def test_audits_find_nothing_variant(tokens: jax.Array) -> None:
    def variant(fn: Any, *arrays: jax.Array) -> list[str]:
        return [o.primitive for o in bijax.audit(fn, *arrays).operations if o.verdict == "variant"]

    assert not variant(layer, tokens)
    assert variant(plain, *[tokens.astype(jnp.float32)] * 2)


W = normal(8, EXPERTS, C, 2 * F), normal(9, EXPERTS, F, C)


def trained(x: jax.Array, g: jax.Array) -> Any:
    """The 16-bit path in float32, with the gradient of its tokens."""

    def forward(x: jax.Array) -> jax.Array:
        selected, weights = bijax.moe_softmax_topk(bijax.moe_gating_gemm(x, ROUTER), TOPK)
        rows, count, offset = bijax.moe_scatter(x, selected, expert_end_idx=EXPERTS)
        h = bijax.group_matmul(bijax.swiglu(bijax.group_matmul(rows, W[0], count)), W[1], count)
        return bijax.moe_gather(h, offset, weights)

    y, pull = jax.vjp(forward, x)
    return y, *pull(g)


def plain(x: jax.Array, g: jax.Array) -> Any:
    def forward(x: jax.Array) -> jax.Array:
        weights, selected = jax.lax.top_k(jax.nn.softmax(x @ ROUTER), TOPK)
        offset = jnp.argsort(selected.reshape(-1))
        count = jnp.bincount(selected.reshape(-1), length=EXPERTS).astype(jnp.int32)
        gate, up = jnp.split(jax.lax.ragged_dot(x[offset // TOPK], W[0], count), 2, -1)
        h = jax.lax.ragged_dot(jax.nn.silu(gate) * up, W[1], count)
        return jnp.zeros_like(x).at[offset // TOPK].add(h * weights.reshape(-1)[offset, None])

    y, pull = jax.vjp(forward, x)
    return y, *pull(g)


@pytest.mark.tier("full")
def test_the_16_bit_path_and_its_gradient() -> None:
    x, g = normal(10, 12, C), normal(11, 12, C)
    options: dict[str, Any] = {"batch_sizes": (1, 12), "neighbours": ("given",), "modes": ("jit",)}
    assert_batch_invariant(trained, x, g, **options)
    assert batch_variance_report(plain, x, g, **options).differing_elements, "the control must differ"

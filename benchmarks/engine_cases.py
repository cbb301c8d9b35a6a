"""The row operators of an inference engine as programs to time, each with the same step in plain JAX."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp

import bijax

TOPK: Final = 8
EXPERTS: Final = 256
HEADS: Final = (32, 8, 128)  # queries, keys and columns of a head
SLOT: Final = 1024  # tokens of a slot of a cache

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Case:
    """One operator at one size.

    Attributes:
        name: The operator.
        tokens: Tokens.
        columns: Columns of a token.
        ours: The library's form.
        plain: The same step in plain JAX.
        make: Makes arguments from a key.
        moved: Bytes that have to be read and written.
        donated: Arguments that the results take the place of, in the order of the first results.
    """

    name: str
    tokens: int
    columns: int
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    make: Callable[[jax.Array], Arrays]
    moved: int
    donated: tuple[int, ...] = ()


def cases(tokens: int, columns: int, num_experts: int = EXPERTS) -> Iterator[Case]:
    """Yields the operators for tokens of bfloat16."""
    rows, kept = tokens * TOPK, tokens * columns
    wide = 2 * rows * columns

    def case(name: str, ours: Any, plain: Any, make: Any, moved: int, width: int = columns) -> Case:
        return Case(name, tokens, width, ours, plain, make, moved)

    def token(key: jax.Array, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.random.normal(key, shape or (tokens, columns), dtype)

    def smooth(key: jax.Array, *shape: int) -> jax.Array:
        return jnp.exp(jax.random.normal(key, shape or (columns,)))

    def experts(key: jax.Array) -> jax.Array:
        return jax.lax.top_k(jax.random.normal(key, (tokens, num_experts)), TOPK)[1]

    def counts(key: jax.Array) -> jax.Array:
        return jnp.bincount(experts(key).reshape(-1), length=num_experts).astype(jnp.int32)

    yield case(
        "scale_dynamic_quant",
        bijax.scale_dynamic_quant,
        lambda x, s: _quantize(x.astype(jnp.float32) * s),
        lambda key: (token(key), smooth(key)),
        3 * kept,
    )
    yield case(
        "add_rms_norm_dynamic_quant",
        lambda x, r, w, s: bijax.add_rms_norm_dynamic_quant(x, w, s, residual=r),
        _norm_and_quantize,
        lambda key: (token(key), token(key), smooth(key), smooth(key)),
        7 * kept,
    )
    yield case(
        "moe_softmax_topk",
        lambda x: bijax.moe_softmax_topk(x, TOPK),
        _softmax_topk,
        lambda key: (token(key, tokens, num_experts),),
        tokens * (2 * num_experts + 6 * TOPK),
        num_experts,
    )
    yield case(
        "moe_scatter",
        lambda x, e: bijax.moe_scatter(x, e, expert_end_idx=num_experts),
        functools.partial(_scatter, num_experts=num_experts),
        lambda key: (token(key), experts(key)),
        2 * kept + wide,
    )
    yield case(
        "moe_scatter_dynamic_quant",
        lambda x, e, s: bijax.moe_scatter_dynamic_quant(x, e, s, expert_end_idx=num_experts),
        functools.partial(_scatter_and_quantize, num_experts=num_experts),
        lambda key: (token(key), experts(key), smooth(key, num_experts, columns)),
        2 * kept + rows * columns,
    )
    yield case(
        "swiglu",
        bijax.swiglu,
        lambda x: _swiglu(x).astype(x.dtype),
        lambda key: (token(key, tokens, 2 * columns),),
        6 * kept,
    )
    yield case(
        "moe_swiglu_dynamic_quant",
        bijax.moe_swiglu_dynamic_quant,
        _swiglu_and_quantize,
        lambda key: (token(key, rows, columns), smooth(key, num_experts, columns // 2), counts(key)),
        wide + rows * columns // 2,
        columns // 2,
    )
    yield case(
        "moe_gather",
        bijax.moe_gather,
        _gather,
        lambda key: (
            token(key, rows, columns),
            jax.random.permutation(key, rows).astype(jnp.int32),
            smooth(key, tokens, TOPK),
        ),
        wide + 2 * kept,
    )
    q, kv, d = HEADS
    heads = q + 2 * kv
    yield case(
        "rotary_embedding",
        lambda x, s, c, p: bijax.rotary_embedding(x, s, c, q_head_num=q, kv_head_num=kv, position_ids=p),
        _rotate,
        lambda key: (
            token(key, max(1, tokens // SLOT), min(tokens, SLOT), heads, d),
            *(token(key, 8192, d) for _ in range(2)),
            jnp.zeros(max(1, tokens // SLOT), jnp.int32),
        ),
        4 * tokens * heads * d,
        heads * d,
    )
    batch, length = max(1, tokens // SLOT), min(tokens, SLOT)
    yield Case(
        "store_kv_cache",
        tokens,
        2 * kv * d,
        lambda k_cache, v_cache, k, v, ids, past: bijax.store_kv_cache(
            k, v, k_cache, v_cache, kv_ids=ids, kv_lens=past
        ),
        _store,
        lambda key: (
            *(jnp.zeros((batch + 1, kv, SLOT, d), jnp.bfloat16) for _ in range(2)),
            *(token(key, batch, length, kv, d) for _ in range(2)),
            jnp.arange(batch, dtype=jnp.int32),
            jnp.zeros(batch, jnp.int32),
        ),
        8 * tokens * kv * d,
        donated=(0, 1),
    )


def _quantize(h: jax.Array) -> Arrays:
    scale = jnp.max(jnp.abs(h), axis=-1, keepdims=True) / 127
    return jnp.round(h / scale).astype(jnp.int8), scale[..., 0]


def _norm_and_quantize(x: jax.Array, r: jax.Array, w: jax.Array, s: jax.Array) -> Arrays:
    h = x + r
    f = h.astype(jnp.float32)
    f = f * jax.lax.rsqrt(jnp.mean(f * f, axis=-1, keepdims=True) + 1e-6) * w
    return h, *_quantize(f * s)


def _softmax_topk(x: jax.Array) -> Arrays:
    weights, selected = jax.lax.top_k(jax.nn.softmax(x.astype(jnp.float32)), TOPK)
    return selected, (weights / weights.sum(-1, keepdims=True)).astype(x.dtype)


def _scatter(x: jax.Array, experts: jax.Array, *, num_experts: int) -> Arrays:
    order = jnp.argsort(experts.reshape(-1))
    return x[order // TOPK], jnp.bincount(experts.reshape(-1), length=num_experts), order


def _scatter_and_quantize(x: jax.Array, experts: jax.Array, smooth: jax.Array, *, num_experts: int) -> Arrays:
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    h = x[order // TOPK].astype(jnp.float32) * smooth[flat[order]]
    return *_quantize(h), jnp.bincount(flat, length=num_experts), order


def _swiglu(x: jax.Array) -> jax.Array:
    gate, up = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jax.nn.silu(gate) * up


def _swiglu_and_quantize(x: jax.Array, smooth: jax.Array, counts: jax.Array) -> Arrays:
    expert = jnp.repeat(jnp.arange(counts.size), counts, total_repeat_length=x.shape[0])
    return _quantize(_swiglu(x) * smooth[expert])


def _gather(rows: jax.Array, offset: jax.Array, weights: jax.Array) -> jax.Array:
    place = jnp.zeros_like(offset).at[offset].set(jnp.arange(offset.size, dtype=offset.dtype))
    parts = rows[place.reshape(weights.shape)].astype(jnp.float32) * weights[..., None]
    return parts.sum(1).astype(rows.dtype)


def _rotate(qkv: jax.Array, sin: jax.Array, cos: jax.Array, first: jax.Array) -> jax.Array:
    q, kv, _ = HEADS
    position = first[:, None] + jnp.arange(qkv.shape[1])
    x = qkv[:, :, : q + kv].astype(jnp.float32)
    s, c = (t[position].astype(jnp.float32)[:, :, None] for t in (sin, cos))
    low, high = jnp.split(x, 2, axis=-1)
    y = x * c + jnp.concatenate([-high, low], -1) * s
    return qkv.at[:, :, : q + kv].set(y.astype(qkv.dtype))


def _store(
    k_cache: jax.Array, v_cache: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, past: jax.Array
) -> Arrays:
    slot, place = ids[:, None], past[:, None] + jnp.arange(k.shape[1])
    return k_cache.at[slot, :, place].set(k), v_cache.at[slot, :, place].set(v)

"""Attention on a Hopper GPU: prefill, chunks, decode and pages give the same bits, in any batch."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from flax_layers import Llama
from tests.attention.calls_on_gpu import KINDS, Call, array, run
from tests.layers import small_llama as small

pytestmark = pytest.mark.gpu

LENGTH: Final = 2304
HEADS: Final = 8
KEY_HEADS: Final = 2
TOKENS: Final = (0, 1, 63, 127, 128, 129, 500, 1023, 1024, 1025, 1500, 2047, 2048, 2288)
"""Positions around the edges of tiles, blocks and splits."""

OTHER_KINDS: Final = ((96, "bfloat16"), (192, "float16"), (256, "bfloat16"))
WINDOW: Final = (1300, 0)

Results = tuple[jax.Array, jax.Array]

causal = functools.partial(bijax.dot_product_attention, is_causal=True, return_residual=True)
windowed = functools.partial(causal, local_window_size=WINDOW)
full = functools.partial(bijax.dot_product_attention, return_residual=True)
paged = functools.partial(bijax.paged_attention, return_residual=True)


@functools.cache
def arrays(size: int, dtype: str) -> tuple[jax.Array, ...]:
    """Queries, keys and values of two sequences."""
    return tuple(array(seed, 2, LENGTH, n, size, dtype=dtype) for seed, n in enumerate((HEADS, KEY_HEADS, KEY_HEADS)))


@functools.cache
def whole(size: int, dtype: str, function: Callable[..., Results] = causal) -> Results:
    """Both sequences at once: what everything else is compared with."""
    out, lse = jax.jit(function)(*arrays(size, dtype))
    return out, lse


def until(x: jax.Array, lengths: Any) -> jax.Array:
    """Copies of a sequence (S, K, H) that hold nan after their lengths (n,)."""
    inside = jnp.arange(x.shape[0])[None, :, None, None] < jnp.asarray(lengths)[:, None, None, None]
    return jnp.where(inside, x[None], jnp.nan).astype(x.dtype)


def decoded(size: int, dtype: str, count: int, function: Callable[..., Results] = causal) -> Call:
    """The call that gives `count` queries from each of `TOKENS` on of the first sequence, as a batch."""
    q, k, v = (x[0] for x in arrays(size, dtype))
    starts = np.array(TOKENS)
    queries = jnp.stack([q[t : t + count] for t in TOKENS])
    lengths = starts + count

    def call(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, lengths: jax.Array) -> Results:
        return function(q, k, v, query_offset=starts, key_value_seq_lengths=lengths)

    return call, (queries, until(k, lengths), until(v, lengths), starts, lengths)


def same_tokens(found: Results, expected: Results, count: int) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert_bits_equal(ours, jnp.stack([theirs[0, t : t + count] for t in TOKENS]))


@pytest.mark.parametrize(("size", "dtype"), KINDS)
def test_alone_again_and_longer(size: int, dtype: str) -> None:
    q, k, v = arrays(size, dtype)
    expected = whole(size, dtype)
    room = tuple(jnp.pad(x, ((0, 0), (0, 72), (0, 0), (0, 0)), constant_values=jnp.nan) for x in (k, v))
    calls: list[Call] = [
        (causal, (q[1:], k[1:], v[1:])),
        (lambda *x: causal(*x, key_value_seq_lengths=np.full(2, LENGTH)), (q, *room)),
        (causal, tuple(jnp.concatenate([x, x[:1]]) for x in (q, k, v))),
    ]
    alone, longer, three = run(calls)
    assert_bits_equal(alone, tuple(x[1:] for x in expected))
    assert_bits_equal(longer, expected)
    assert_bits_equal(tuple(x[:2] for x in three), expected)
    assert_bits_equal(tuple(x[2:] for x in three), tuple(x[:1] for x in expected))
    program = jax.jit(causal)
    for _ in range(5):
        assert_bits_equal(program(q, k, v), expected)


@pytest.mark.parametrize(("size", "dtype"), KINDS)
def test_decode_is_prefill(size: int, dtype: str) -> None:
    counts = (1, 2, 3, 8, 16)
    one, arguments = decoded(size, dtype, 1)
    for count, found in zip(counts, run([decoded(size, dtype, n) for n in counts]), strict=True):
        same_tokens(found, whole(size, dtype), count)
    program = jax.jit(one)
    for i, t in enumerate(TOKENS):
        alone = program(*(x[i : i + 1] for x in arguments))
        assert_bits_equal(alone, tuple(x[:1, t : t + 1] for x in whole(size, dtype)))


def test_cudnn_decode_is_not_prefill() -> None:
    """The control: the same comparison of what JAX has for this GPU."""
    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    q, k, v = arrays(*KINDS[0])
    expected = jax.jit(functools.partial(cudnn, is_causal=True))(q, k, v)
    last = jax.jit(cudnn)(q[:, -1:], k, v)
    assert (np.asarray(last) != np.asarray(expected[:, -1:])).any()


@pytest.mark.parametrize(("size", "dtype"), KINDS)
def test_pages(size: int, dtype: str) -> None:
    _, k, v = (x[0] for x in arrays(size, dtype))
    _, (queries, *_, starts, _) = decoded(size, dtype, 3)
    lengths = starts + 3

    def call(page: int) -> Call:
        entries = LENGTH // page
        order = np.random.default_rng(page).permutation(len(TOKENS) * entries + 5)[: len(TOKENS) * entries]
        table = order.reshape(len(TOKENS), entries)

        def pages(x: jax.Array) -> jax.Array:
            cache = jnp.full((order.size + 5, page, KEY_HEADS, size), jnp.nan, x.dtype)
            return cache.at[table].set(until(x, lengths).reshape(*table.shape, page, KEY_HEADS, size))

        return paged, (queries, pages(k), pages(v), table, lengths)

    calls = [call(page) for page in (16, 32, 128, 256)]
    for found in run(calls):
        same_tokens(found, whole(size, dtype), 3)
    # Many queries, also from pages of a size of which no block is made.
    q, few = arrays(size, dtype)[0], slice(2000, lengths[-1])
    _, keys, values, table, _ = calls[0][1]
    order = np.random.default_rng(0).permutation(LENGTH // 12)
    odd = (x.reshape(-1, 12, KEY_HEADS, size)[np.argsort(order)] for x in (k, v))
    found, of_odd = run(
        [
            (paged, (q[:1, few], keys, values, table[-1:], lengths[-1:])),
            (paged, (q[:1, 1000:1384], *odd, order[None], np.array([1384]))),
        ]
    )
    assert_bits_equal(found, tuple(x[:1, few] for x in whole(size, dtype)))
    assert_bits_equal(of_odd, tuple(x[:1, 1000:1384] for x in whole(size, dtype)))


@pytest.mark.parametrize(("size", "dtype"), OTHER_KINDS)
def test_other_widths(size: int, dtype: str) -> None:
    q, k, v = arrays(size, dtype)
    expected, (queries, keys, values, _, lengths) = whole(size, dtype), decoded(size, dtype, 3)[1]
    chunk, order = slice(1000, 1384), np.random.default_rng(0).permutation(len(TOKENS) * LENGTH // 64)
    table = order.reshape(len(TOKENS), -1)
    shape = (*table.shape, 64, KEY_HEADS, size)
    pages = [jnp.zeros((order.size, *shape[2:]), x.dtype).at[table].set(x.reshape(shape)) for x in (keys, values)]
    part, until_end = q[:, chunk], tuple(x[:, : chunk.stop] for x in (k, v))
    poisoned = v.at[0, 1100, 0, 3].set(jnp.nan)
    results = run(
        [
            decoded(size, dtype, 1),
            decoded(size, dtype, 3),
            (paged, (queries, *pages, table, lengths)),
            (functools.partial(causal, query_offset=chunk.start), (part, *until_end)),
            (causal, (q, k, poisoned)),
        ]
    )
    for count, found in zip((1, 3, 3), results, strict=False):
        same_tokens(found, expected, count)
    assert_bits_equal(results[3], tuple(x[:, chunk] for x in expected))
    sees = np.zeros(expected[0].shape[:3], bool)
    sees[0, 1100:, : HEADS // KEY_HEADS] = True
    for ours, zero_fill in zip(results[4], expected, strict=True):
        assert_bits_equal(np.asarray(ours)[~sees], np.asarray(zero_fill)[~sees])
        assert np.isnan(np.asarray(ours, np.float32)[sees]).all()


@pytest.mark.parametrize(("size", "dtype"), KINDS)
def test_chunks(size: int, dtype: str) -> None:
    q, k, v = arrays(size, dtype)
    chunks = ((1000, 384), (1984, 320), (1023, 64), (960, 129), (1024, 7), (2040, 17), (1008, 33), (2200, 100))

    def call(start: int, count: int) -> Call:
        keys, values = (jnp.concatenate([until(x, np.array([start + count])) for x in both]) for both in (k, v))
        return functools.partial(causal, query_offset=start, key_value_seq_lengths=np.full(2, start + count)), (
            q[:, start : start + count],
            keys,
            values,
        )

    for (start, count), found in zip(chunks, run([call(*chunk) for chunk in chunks]), strict=True):
        assert_bits_equal(found, tuple(x[:, start : start + count] for x in whole(size, dtype)))


@pytest.mark.parametrize(("size", "dtype"), KINDS)
def test_full_and_window(size: int, dtype: str) -> None:
    q, k, v = arrays(size, dtype)
    all_keys, window, last = run(
        [(full, (q, k, v)), (windowed, (q, k, v)), (full, (q[:, -1:], k, v))],
    )
    assert_bits_equal(tuple(x[:, -1] for x in all_keys), tuple(x[:, -1] for x in whole(size, dtype)))
    assert_bits_equal(last, tuple(x[:, -1:] for x in all_keys))
    for count, found in zip((1, 5), run([decoded(size, dtype, n, windowed) for n in (1, 5)]), strict=True):
        same_tokens(found, window, count)


@pytest.mark.parametrize(
    ("size", "dtype", "function"),
    [*((*kind, f) for f in (causal, windowed, full) for kind in KINDS), *((*kind, causal) for kind in OTHER_KINDS)],
)
def test_errors(size: int, dtype: str, function: Callable[..., Results]) -> None:
    """Against float64: the largest error of an output is that of rounding weights and results to 16 bits."""
    found, lse = whole(size, dtype, function)
    q, k, v = (np.asarray(x[0, :, ::n], np.float64) for x, n in zip(arrays(size, dtype), (4, 1, 1), strict=True))
    scores = np.einsum("thd,shd->hts", q, k) / size**0.5
    i, j = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None]
    seen = (j <= i) if function is not full else np.ones((LENGTH, LENGTH), bool)
    if function is windowed:
        seen &= j >= i - WINDOW[0]
    scores = np.where(seen, scores, -np.inf)
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    expected = np.einsum("hts,shd->thd", weights / total, v)
    magnitude = np.einsum("hts,shd->thd", weights / total, np.abs(v))
    unit = float(jnp.finfo(dtype).eps)
    assert (np.abs(np.asarray(found[0, :, ::4], np.float64) - expected) <= 1.5 * unit * magnitude).all()
    exact = (largest + np.log(total))[..., 0].T
    assert np.abs(np.asarray(lse[0, :, ::4], np.float64) - exact).max() < 1e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("size", "dtype"), KINDS)
def test_bad_values_reach_only_those_who_see_them(size: int, dtype: str, bad: float) -> None:
    q, k, v = arrays(size, dtype)
    at = 1500
    poisoned = v.at[0, at, 0, 3].set(bad)
    expected = whole(size, dtype)
    window = jax.jit(windowed)(q, k, poisoned)
    out, lse = jax.jit(causal)(q, k, poisoned)
    sees = np.zeros(expected[0].shape[:3], bool)
    sees[0, at:, : HEADS // KEY_HEADS] = True
    for ours, zero_fill in zip((out, lse), expected, strict=True):
        assert_bits_equal(np.asarray(ours)[~sees], np.asarray(zero_fill)[~sees])
        assert np.isnan(np.asarray(ours, np.float32)[sees]).all()
    np.testing.assert_array_equal(np.isnan(np.asarray(window[1])), sees)

    def from_position(start: int, count: int, *_: Any) -> Call:
        return functools.partial(causal, query_offset=start, key_value_seq_lengths=np.full(2, start + count)), (
            q[:, start : start + count],
            k,
            poisoned,
        )

    cuts = ((1495, 8), (1499, 3), (1437, 64), (1472, 200), (1500, 1), (1499, 1), (1600, 16))
    for (start, count), found in zip(cuts, run([from_position(*cut) for cut in cuts]), strict=True):
        assert_bits_equal(found, (out[:, start : start + count], lse[:, start : start + count]))


def test_bad_values_behind_a_window_leave_no_trace() -> None:
    size, dtype = KINDS[0]
    q, k, v = arrays(size, dtype)
    near = functools.partial(causal, local_window_size=(200, 0))
    poisoned = v.at[:, 1000].set(jnp.nan)
    zero_fill, dirty = jax.jit(near)(q, k, v), jax.jit(near)(q, k, poisoned)
    sees = np.zeros(LENGTH, bool)
    sees[1000:1201] = True
    for ours, theirs in zip(dirty, zero_fill, strict=True):
        assert_bits_equal(np.asarray(ours)[:, ~sees], np.asarray(theirs)[:, ~sees])
        assert np.isnan(np.asarray(ours, np.float32)[:, sees]).all()
    starts = np.array([999, 1000, 1200, 1201])
    lengths = starts + 1

    def decode(q: jax.Array, k: jax.Array, v: jax.Array) -> Results:
        return near(q, k, v, query_offset=starts, key_value_seq_lengths=lengths)

    token = jnp.stack([q[0, t : t + 1] for t in starts])
    found = jax.jit(decode)(token, *(jnp.broadcast_to(x[:1], (4, *x.shape[1:])) for x in (k, poisoned)))
    assert_bits_equal(found, tuple(jnp.stack([x[0, t : t + 1] for t in starts]) for x in dirty))


@pytest.mark.parametrize(("size", "dtype"), KINDS)
def test_gradients(size: int, dtype: str) -> None:
    q, k, v = (x[:, :300] for x in arrays(size, dtype))
    g = array(7, *q.shape, dtype=dtype)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *x: bijax.dot_product_attention(*x, is_causal=True), q, k, v)
        return out, pull(g)

    whole_batch, alone = run([(both, (q, k, v, g)), (both, tuple(x[1:] for x in (q, k, v, g)))])
    assert_bits_equal(alone, jax.tree.map(lambda x: x[1:], whole_batch))
    assert_bits_equal(whole_batch[0], whole(size, dtype)[0][:, :300])

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")

    with jax.default_matmul_precision("highest"):
        expected = jax.jit(lambda q, k, v, g: jax.vjp(plain, q, k, v)[1](g))(
            *(x.astype("float32") for x in (q, k, v, g))
        )
    for ours, theirs in zip(whole_batch[1], expected, strict=True):
        distance = np.linalg.norm(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64))
        assert distance <= 2 * float(jnp.finfo(dtype).eps) * np.linalg.norm(np.asarray(theirs, np.float64))


def test_vmap_scan_and_eager() -> None:
    size, dtype = KINDS[1]
    q, k, v = (x[:, :200] for x in arrays(size, dtype))
    expected = tuple(x[:, :200] for x in whole(size, dtype))
    one = functools.partial(bijax.dot_product_attention, is_causal=True, return_residual=True)
    assert_bits_equal(one(q, k, v), expected)
    assert_bits_equal(jax.vmap(one)(q, k, v), expected)
    assert_bits_equal(jax.lax.scan(lambda c, x: (c, one(*x)), 0, (q, k, v))[1], expected)


HALF: Final = dataclasses.replace(small.CONFIG, num_heads=4, num_kv_heads=2, head_dim=64)


def test_a_model_decodes_what_it_prefilled() -> None:
    checkpoint = small.Checkpoint(HALF, small.weights(HALF), tokenizer=None)  # type: ignore[arg-type]
    model = Llama.from_checkpoint(checkpoint, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    rows = small.sequences()
    expected = small.in_full(model, rows)
    for chunk, make in ((1, small.contiguous), (16, small.paged), (40, small.paged)):
        assert_bits_equal(small.in_chunks(model, rows, chunk, make), expected)
    assert_bits_equal(small.in_full(model, rows[1:2])[0], expected[1])

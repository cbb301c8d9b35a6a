"""Latent attention: a query's bits in any batch, chunk and cache, and what it computes."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal, bits, hostile_rows
from pallas_kernels.errors import UnsupportedError
from tests.arrays import on_device, ones, zeros
from tests.attention.reference import reference, visible_keys
from tests.eight_bits import composed
from tests.jax_triton.packages import needs_jax_triton

HEADS, WIDTH, VALUES, SCALE = 4, 12, 8, 0.2
LENGTH, CAPACITY, PAGE = 150, 192, 16


@functools.cache
def sequences(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Queries (B, T, N, W) and latents (B, T, W) of one sequence of every hostile kind, the last one plain."""
    found = []
    for seed, shape in enumerate(((LENGTH, HEADS, WIDTH), (LENGTH, WIDTH))):
        kinds = hostile_rows(seed, shape, dtype)
        kinds["linspace"] = (kinds["linspace"].astype(np.float32) / 50).astype(kinds["linspace"].dtype)
        plain = np.random.default_rng(seed).standard_normal(shape).astype(kinds["linspace"].dtype)
        found.append(np.stack([*(kinds[name] for name in sorted(kinds)), plain]))
    return found[0], found[1]


@jax.jit
def attend(query: jax.Array, latents: jax.Array, offsets: jax.Array, used: jax.Array) -> jax.Array:
    """The queries that are used, from an offset on, of sequences that end with them."""
    return bijax.latent_attention(
        query,
        latents,
        value_size=VALUES,
        scale=SCALE,
        query_offset=offsets,
        query_seq_lengths=used,
        key_value_seq_lengths=offsets + used,
    )


@jax.jit
def attend_pages(query: jax.Array, pages: jax.Array, table: jax.Array, lengths: jax.Array) -> jax.Array:
    return bijax.paged_latent_attention(query, pages, table, lengths, value_size=VALUES, scale=SCALE)


@jax.jit
def plain(query: jax.Array, latents: jax.Array, offsets: jax.Array) -> jax.Array:
    """The same in JAX's own operations, the control."""
    scores = jnp.einsum("btnw,bsw->bnts", query, latents, preferred_element_type=jnp.float32) * SCALE
    seen = jnp.arange(latents.shape[1]) <= (offsets[:, None] + jnp.arange(query.shape[1]))[..., None]
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf)).astype(query.dtype)
    return jnp.einsum("bnts,bsv->btnv", weights, latents[..., :VALUES])


@functools.cache
def whole(dtype: str) -> np.ndarray:
    q, c = sequences(dtype)
    zero = np.zeros(len(q), np.int32)
    return np.asarray(attend(q, c, zero, zero + LENGTH))


def cache_of(latents: np.ndarray, lengths: np.ndarray, garbage: float) -> np.ndarray:
    """Room for more latents than each sequence has, with garbage in it."""
    cache = np.full((len(latents), CAPACITY, WIDTH), garbage).astype(latents.dtype)
    for row, length in enumerate(lengths):
        cache[row, :length] = latents[row, :length]
    return cache


def pages_of(cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same in pages of any order, and their table."""
    table = np.random.default_rng(0).permutation(cache.size // (PAGE * WIDTH)).reshape(len(cache), -1).astype(np.int32)
    pages = np.empty((table.size, PAGE, WIDTH), cache.dtype)
    pages[table] = cache.reshape(*table.shape, PAGE, WIDTH)
    return pages, table


def check_chunk(dtype: str, rows: slice, starts: np.ndarray, size: int, garbage: float, *, in_pages: bool) -> None:
    """Checks `size` tokens from each start on of some sequences, at different positions in one batch."""
    q, c = (x[rows] for x in sequences(dtype))
    queries = np.stack([x[s : s + size] for x, s in zip(q, starts, strict=True)])
    expected = np.stack([x[s : s + size] for x, s in zip(whole(dtype)[rows], starts, strict=True)])
    cache = cache_of(c, starts + size, garbage)
    if in_pages:
        found = attend_pages(queries, *pages_of(cache), starts + size)
    else:
        found = attend(queries, cache, starts, starts * 0 + size)
    assert_bits_equal(found, expected, err_msg=f"{dtype} {rows} {starts} {size=}")


@pytest.mark.tier("full", fast=("float32",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_decoding_chunks_and_pages_give_the_bits_of_the_prompt(dtype: str) -> None:
    """A batch of every kind of sequence, each at a position of its own, and one alone; the control differs."""
    count = len(sequences(dtype)[0])
    garbage = iter([np.nan, np.inf, -3.0, 0.0] * 50)
    for first in (0, 60, 126, 127):
        starts = ((first + 17 * np.arange(count)) % LENGTH).astype(np.int32)
        check_chunk(dtype, slice(None), starts, 1, next(garbage), in_pages=False)
    check_chunk(dtype, slice(0, 1), starts[:1], 1, next(garbage), in_pages=True)
    # Rounding to 16 bits hides what differs in plain JAX on some processors, so the control is in float32.
    q, c = (x[-1:].astype(np.float32) for x in sequences(dtype))
    prompt = np.asarray(plain(q, c, np.zeros(1, np.int32)))
    differing = 0
    for at in (60, 127, 149):
        token = np.asarray(plain(q[:, at : at + 1], c, np.full(1, at, np.int32)))
        differing += int((bits(token) != bits(prompt[:, at : at + 1])).sum())
    assert differing, "plain JAX gives a token the same bits too: the comparison proves nothing"


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("dtype", "size", "batches"),
    [("float32", 1, range(1, 9)), ("bfloat16", 1, (1, 2, 5, 8)), ("bfloat16", 7, (3, 8)), ("float32", 64, (2,))],
    ids=str,
)
def test_batches_of_one_to_eight_at_other_positions(dtype: str, size: int, batches: Sequence[int]) -> None:
    rng = np.random.default_rng(1)
    for batch in batches:
        for in_pages in (False, True):
            starts = rng.integers(0, LENGTH - size + 1, batch).astype(np.int32)
            check_chunk(dtype, slice(0, batch), starts, size, np.nan, in_pages=in_pages)


@pytest.mark.tier("full")
def test_every_position_alone() -> None:
    for at in range(LENGTH):
        check_chunk(
            "bfloat16", slice(None), np.full(len(sequences("bfloat16")[0]), at, np.int32), 1, np.inf, in_pages=False
        )


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_attention_whose_values_are_columns_of_its_keys(dtype: str) -> None:
    """The bits of `dot_product_attention` with a second array, and of its gradients: of keys plus of values."""
    q, c = (on_device(np.concatenate([x[-1:], x[-1:, ::-1]])) for x in sequences(dtype))
    cotangent = on_device(np.random.default_rng(5).standard_normal((*q.shape[:3], VALUES)), dtype)
    latent = functools.partial(bijax.latent_attention, value_size=VALUES, scale=SCALE)
    separate = functools.partial(bijax.dot_product_attention, scale=SCALE, is_causal=True)
    out, pull = jax.vjp(latent, q, c)
    expected, pull_expected = jax.vjp(separate, q, c[:, :, None], c[:, :, None, :VALUES])
    assert_bits_equal(out, expected)
    dq, dc = pull(cotangent)
    of_queries, of_keys, of_values = pull_expected(cotangent)
    total = np.array(of_keys[:, :, 0], np.float32)
    total[..., :VALUES] += np.asarray(of_values[:, :, 0], np.float32)
    assert_bits_equal((dq, dc), (of_queries, jnp.asarray(total, dtype)))
    assert_bits_equal(jax.vmap(latent)(q[:, None], c[:, None])[:, 0], expected)
    assert_bits_equal(jax.vmap(latent, (0, None))(jnp.stack([q, q[::-1]]), c)[0], expected)


def test_values_are_not_an_array_of_their_own() -> None:
    """The kernel has one operand of latents, and the program no slice of them."""
    query, latents = jnp.zeros((2, 3, HEADS, WIDTH)), jnp.zeros((2, 9, WIDTH))
    jaxpr = str(
        jax.make_jaxpr(functools.partial(bijax.latent_attention, value_size=VALUES, scale=SCALE))(query, latents)
    )
    assert "bijax_attention" in jaxpr
    assert f"{VALUES}]" in jaxpr, "the results have this width"
    assert f"2,9,1,{VALUES}]" not in jaxpr
    assert f"2,9,{VALUES}]" not in jaxpr


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_latents_of_8_bits(dtype: str) -> None:
    """The same bits in prefill, in decode and in pages, and those that the contract says."""
    q, c = (jnp.asarray(x[-2:], jnp.bfloat16) for x in sequences("bfloat16"))
    scale = jnp.full(WIDTH if dtype == "int8" else (), 1 / 30, jnp.float32)
    cache, stored = bijax.store_latent_cache(c, jnp.zeros(c.shape, dtype), latent_scale=scale)
    assert bool(stored.all())
    attend = jax.jit(functools.partial(bijax.latent_attention, value_size=VALUES, scale=SCALE, latent_scale=scale))
    prompt = attend(q, cache)

    def separate(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return bijax.latent_attention(q, k[:, :, 0], value_size=VALUES, scale=SCALE)

    factors = np.broadcast_to(np.asarray(scale), (1, WIDTH))
    caches = cache[:, :, None], cache[:, :, None]
    assert_bits_equal(prompt, composed(separate, q, caches, (factors, factors[:, :VALUES])))
    table = np.random.default_rng(0).permutation(2 * LENGTH // 10).reshape(2, -1)
    pages, _ = bijax.store_paged_latent_cache(c, table, jnp.zeros((table.size, 10, WIDTH), dtype), latent_scale=scale)
    paged = bijax.paged_latent_attention(
        q[:, 140:141], pages, table, 141, value_size=VALUES, scale=SCALE, latent_scale=scale
    )
    assert_bits_equal(paged, prompt[:, 140:141])
    with pytest.raises(UnsupportedError, match=r"bijax\.latent_attention has no gradient with quantised"):
        jax.grad(lambda q: attend(q, cache).astype(jnp.float32).sum())(q)


@pytest.mark.tier("full")
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-6), ("bfloat16", 1e-2)])
def test_float64_at_the_shape_of_deepseek(dtype: str, bound: float) -> None:
    """Sixteen heads, 512 + 64 columns, of which 512 are values."""
    rng = np.random.default_rng(3)
    q, c = (on_device(rng.standard_normal(shape), dtype) for shape in ((1, 200, 16, 576), (1, 200, 576)))
    scale = 192**-0.5 / 2
    out = bijax.latent_attention(q, c, value_size=512, scale=scale)
    with jax.enable_x64(True):
        wide = [np.asarray(x[0], np.float64) for x in (q, c)]
        seen = visible_keys(200, 200, causal=True)
        expected, _ = reference(wide[0], wide[1][:, None], wide[1][:, None, :512], seen, scale)
    np.testing.assert_allclose(np.asarray(out[0], np.float64), expected, rtol=bound, atol=bound)
    token = bijax.latent_attention(q[:, 130:131], c, value_size=512, scale=scale, query_offset=130)
    assert_bits_equal(token, out[:, 130:131])


@needs_jax_triton
@pytest.mark.tier("full")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_gpus_serve_576_columns_under_one_contract(architecture: str) -> None:
    """Prefill, decode and pages of DeepSeek's shape lower for a GPU under the same contract."""
    scale: dict[str, Any] = {"value_size": 512, "scale": 0.1}
    queries = [jax.ShapeDtypeStruct((2, t, 128, 576), "bfloat16") for t in (256, 1)]
    latents, pages = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((2, 256, 576), (9, 64, 576)))
    table = np.array([[0, 1, 2, 3], [4, 5, 6, 7]])
    calls = [(functools.partial(bijax.latent_attention, **scale), (q, latents)) for q in queries]
    calls.append((lambda q, p: bijax.paged_latent_attention(q, p, table, 200, **scale), (queries[1], pages)))
    with bijax.lowering_for(architecture):
        ids = [bijax.contracts(function, *arrays, platform="cuda").ids for function, arrays in calls]
        assert ids[0] == ids[1] == ids[2]
        assert any(name.startswith("attention/") and "mma16" in name for name in ids[0])
        for function, arrays in calls:
            text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
            assert ("mosaic_gpu" if architecture == "sm_90" else "triton") in text
        wide = jax.ShapeDtypeStruct((1, 4, 2, 592), "bfloat16"), jax.ShapeDtypeStruct((1, 8, 592), "bfloat16")
        with pytest.raises(UnsupportedError, match="at most 576 elements, got 592"):
            jax.jit(calls[0][0]).trace(*wide).lower(lowering_platforms=("cuda",))


QUERY, LATENTS = np.zeros((2, 3, HEADS, WIDTH), np.float32), np.zeros((2, 9, WIDTH), np.float32)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"query": QUERY[0]}, ValueError, r"query must have the dimensions \(B, T, N, W\), got float32\[3,4,12\]"),
        ({"query": QUERY[:, :, :0]}, ValueError, "at least one head"),
        ({"latents": LATENTS[..., :10]}, ValueError, r"latents must have the dimensions \(B, S, W\), .*\[2,9,10\]"),
        ({"latents": LATENTS[:1]}, ValueError, "as many sequences .*got query .* and latents of 1 sequences"),
        ({"latents": LATENTS.astype(jnp.bfloat16)}, TypeError, "must share one dtype.*latents bfloat16"),
        ({"latents": LATENTS.astype("int8")}, ValueError, "latent_scale is needed for latents of int8.*got none"),
        ({"latent_scale": ones(())}, ValueError, "latent_scale is needed .*belongs to no other, got one"),
        (
            {"latents": LATENTS.astype("int8"), "latent_scale": ones(3)},
            ValueError,
            r"latent_scale must have the shape \(\), or \(12,\)",
        ),
        ({"value_size": 13}, ValueError, r"value_size must be in \[1, 12\], .*got 13"),
        ({"value_size": 0}, ValueError, r"value_size must be in \[1, 12\], .*got 0"),
        ({"value_size": 8.0}, TypeError, "value_size must be an integer"),
        ({"scale": None}, TypeError, "scale must be a number, got None"),
        ({"is_causal": 2}, TypeError, "is_causal must be True or False"),
        ({"query_offset": -1}, ValueError, r"query_offset must be in .*got -1"),
        ({"query_seq_lengths": [3, 4]}, ValueError, r"query_seq_lengths must be in \[0, 3\].*got 4 for sequence 1"),
        ({"key_value_seq_lengths": [10, 0]}, ValueError, r"key_value_seq_lengths must be in \[0, 9\].*got 10"),
    ],
)
def test_wrong_arguments(given: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments: dict[str, Any] = {"query": QUERY, "latents": LATENTS, "value_size": VALUES, "scale": SCALE, **given}
    with pytest.raises(error, match=rf"bijax\.latent_attention: .*{match}"):
        bijax.latent_attention(arguments.pop("query"), arguments.pop("latents"), **arguments)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"latent_pages": zeros((3, 0, WIDTH))}, "a page must hold at least 1 latent"),
        ({"page_table": [[0, 1]]}, r"page_table must have the shape \(2, pages of a sequence\), got .*\[1,2\]"),
        ({"page_table": [[0, 9], [1, 2]]}, r"page_table must hold pages in \[0, 3\).*got 9 for sequence 0, entry 1"),
        ({"lengths": 9}, r"lengths must be in \[0, 8\].*got 9"),
        ({"lengths": 2}, "query_offset must be in .*lengths counts the latents of the queries too"),
    ],
)
def test_wrong_pages(given: dict[str, Any], match: str) -> None:
    arguments: dict[str, Any] = {"latent_pages": zeros((3, 4, WIDTH)), "page_table": [[0, 1], [1, 2]], "lengths": 7}
    arguments |= given
    with pytest.raises(ValueError, match=rf"bijax\.paged_latent_attention: .*{match}"):
        bijax.paged_latent_attention(QUERY, *arguments.values(), value_size=VALUES, scale=SCALE)

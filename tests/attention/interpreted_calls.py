"""Attention by Triton's interpreter, compared with float64: a program that `test_jax_triton.py` runs.

TRITON_INTERPRET=1 python -m tests.attention.interpreted_calls CASE
"""

import dataclasses
import sys
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from bijax.testing import assert_bits_equal
from pallas_kernels.attention import jax_triton
from pallas_kernels.attention.call import OF_SCORES, AttentionCall, AttentionOptions, AttentionResults
from pallas_kernels.attention.schedule.jax_triton import BackwardTiles, Tile
from pallas_kernels.contract import MmaAttentionContract
from pallas_kernels.target import Target
from tests.arrays import on_device
from tests.attention.reference import visible_keys
from tests.jax_triton.interpreted import interpret_launches
from tests.jax_triton.interpreter_instructions import interpret_instructions

QUERIES, KEYS, HEADS, KEY_HEADS, SIZE = 7, 50, 4, 2, 24
CONTRACT: Final = MmaAttentionContract(16, 16, split=32)
TILE: Final = Tile(16, 4, 1)
APART: Final = Tile(16, 4, 1, apart=True)
COLUMNS: Final = Tile(16, 4, 1, apart=True, columns=16)
LOOPS: Final = Tile(16, 4, 1, loops=True)
HELD: Final = Tile(16, 4, 1, held=True)
OFFSETS, USED, LENGTHS = (30, 20), (7, 5), (50, 37)
LIMITS: Final = jnp.array([OFFSETS, USED, LENGTHS], jnp.int32).T
LAUNCH: Final[dict[str, Any]] = {"contract": CONTRACT, "target": Target.parse("sm_80")}


def random(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape), dtype)


def call_of(dtype: str = "float32", value_size: int = SIZE, **optional: Any) -> AttentionCall:
    """A causal call of two sequences."""
    options = {name: optional.pop(name) for name in ("window", "soft_cap") if name in optional}
    q, k, v = (
        random(seed, 2, *shape, dtype=dtype)
        for seed, shape in enumerate(((QUERIES, HEADS, SIZE), (KEYS, KEY_HEADS, SIZE), (KEYS, KEY_HEADS, value_size)))
    )
    return AttentionCall(q, k, v, LIMITS, AttentionOptions(0.2, causal=True, **options), **optional)


def seen_by(call: AttentionCall) -> np.ndarray:
    """Which keys a query sees, (B, 1, T, S), or with the heads of the mask."""
    options = call.options
    seen = [
        visible_keys(QUERIES, KEYS, causal=True, window=options.window, offset=o, query_length=t, key_length=s)
        for o, t, s in zip(OFFSETS, USED, LENGTHS, strict=True)
    ]
    return np.stack(seen)[:, None] & np.asarray(True if call.mask is None else call.mask)


def reference(call: AttentionCall) -> Any:
    """Returns a function of queries, keys, values and the bias, in the precision of its arguments."""
    seen = seen_by(call)
    position = np.array(OFFSETS)[:, None] + np.arange(QUERIES)
    distance = (np.arange(KEYS) - position[..., None])[:, None]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        k, v = (jnp.repeat(x, HEADS // KEY_HEADS, axis=2) for x in (k, v))
        found = jnp.einsum("btnh,bsnh->bnts", q, k) * call.options.scale
        if call.options.soft_cap is not None:
            found = call.options.soft_cap * jnp.tanh(found / call.options.soft_cap)
        found = found + bias
        if call.alibi_slopes is not None:
            found = found + jnp.asarray(call.alibi_slopes, q.dtype)[:, :, None, None] * distance
        found = jnp.where(seen, found, -jnp.inf)
        some = seen.any(-1)
        column = jnp.full((*found.shape[:3], 1), -jnp.inf)
        if call.sinks is not None:
            column = jnp.where(some[..., None], jnp.asarray(call.sinks, q.dtype)[:, :, None, None], -jnp.inf)
        lse = jax.scipy.special.logsumexp(jnp.concatenate([found, column], axis=-1), axis=-1)
        weights = jnp.exp(found - jnp.where(some, lse, 0.0)[..., None])
        return jnp.einsum("bnts,bsnh->btnh", weights, v), jnp.moveaxis(lse, 1, 2)

    return attend


def float64(x: Any) -> Any:
    return jnp.asarray(np.asarray(x, np.float64))


def compare(found: Any, expected: Any, bound: float) -> None:
    assert len(found) == len(expected)
    for ours, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float64), np.asarray(right), atol=bound, rtol=bound)


def forward(call: AttentionCall, bound: float) -> None:
    compare(jax_triton.attention(call, tile=TILE, **LAUNCH), expected_of(call), bound)


def expected_of(call: AttentionCall) -> Any:
    arrays = [float64(x) for x in (call.query, call.key, call.value, 0.0 if call.bias is None else call.bias)]
    return jax.jit(reference(call))(*arrays)


def pages() -> None:
    """From pages of a size of which no block is made, and of one of which one is; a page outside makes results nan."""
    call = call_of(window=(20, 0))
    whole = jax_triton.attention(call, tile=TILE, **LAUNCH)
    compare(whole, expected_of(call), 1e-5)
    for page in (10, 16):
        entries = -(-KEYS // page)
        table = np.random.default_rng(0).permutation(2 * entries + 3)[: 2 * entries].reshape(2, entries)

        def cache(x: jax.Array, page: int = page, table: np.ndarray = table) -> jax.Array:
            full = jnp.pad(x, ((0, 0), (0, -KEYS % page), (0, 0), (0, 0)), constant_values=jnp.nan)
            pages = jnp.zeros((table.size + 3, page, *x.shape[2:]), x.dtype)
            return pages.at[table].set(full.reshape(*table.shape, page, *x.shape[2:]))

        paged = dataclasses.replace(
            call, key=cache(call.key), value=cache(call.value), page_table=jnp.asarray(table, jnp.int32)
        )
        compare(jax_triton.attention(paged, tile=TILE, **LAUNCH), whole, 0.0)
    outside = dataclasses.replace(paged, page_table=paged.page_table.at[0, 1].set(table.size + 3))
    found = jax_triton.attention(outside, tile=TILE, **LAUNCH)
    for ours, right in zip(found, whole, strict=True):
        assert np.isnan(ours[0]).all()
        np.testing.assert_array_equal(ours[1], right[1])


def apart() -> None:
    """Each split in a loop or a program of its own, with and without keys in it: the bits of one loop for all."""
    for call in (call_of(), call_of("float16", window=(12, 0), sinks=random(6, 1, HEADS))):
        for split in (32, 16):
            launch = LAUNCH | {"contract": dataclasses.replace(CONTRACT, split=split)}
            whole = jax_triton.attention(call, tile=TILE, **launch)
            for tile in (LOOPS, HELD, APART, COLUMNS):
                assert_bits_equal(jax_triton.attention(call, tile=tile, **launch), whole)
    three = {**LAUNCH, "contract": MmaAttentionContract(16, 16, split=48)}  # blocks of a split: not a power of two
    whole = jax_triton.attention(call_of(), tile=TILE, **three)
    assert_bits_equal(jax_triton.attention(call_of(), tile=COLUMNS, **three), whole)


def options() -> None:
    """Cap, sinks, slopes, a bias and a mask that leaves some rows no key, values of another width."""
    pairs: dict[str, Any] = {"bias": random(4, 1, HEADS, QUERIES, KEYS), "mask": random(5, 2, 1, 1, KEYS) > -1}
    heads: dict[str, Any] = {"alibi_slopes": jnp.array([[0.1, 0.2, 0.3, 0.4]]), "sinks": random(6, 1, HEADS)}
    forward(call_of(soft_cap=2.0, value_size=8, **pairs, **heads), 1e-5)
    forward(call_of("bfloat16", soft_cap=2.0, **pairs), 2e-2)
    mask = (random(7, 1, HEADS, QUERIES, 1) > 0) & jnp.ones((1, HEADS, QUERIES, KEYS), bool)
    forward(call_of("float16", mask=mask), 2e-3)


def eight_bits() -> None:
    """Keys and values of 8 bits with their scales."""
    for stored in ("int8", "float8_e4m3fn"):
        call = call_of()
        widths = (SIZE, SIZE) if stored == "int8" else (1, 1)
        key, value = ((20 * x).astype(stored) for x in (call.key, call.value))
        scales = [jnp.exp(random(s, 1, KEY_HEADS, w)) / 20 for s, w in zip((7, 8), widths, strict=True)]
        whole = dataclasses.replace(
            call,
            key=(key.astype(jnp.float32) * scales[0][:, None]),
            value=(value.astype(jnp.float32) * scales[1][:, None]),
        )
        expected = reference(whole)(*(float64(x) for x in (whole.query, whole.key, whole.value)), 0.0)
        own = dataclasses.replace(call, key=key, value=value, key_scale=scales[0], value_scale=scales[1])
        compare(jax_triton.attention(own, tile=TILE, **LAUNCH), expected, 2e-5)


def gradients() -> None:
    """The gradients of queries, keys, values and a bias."""
    pairs: dict[str, Any] = {"bias": random(4, 2, HEADS, QUERIES, KEYS), "mask": random(5, 2, 1, 1, KEYS) > -1}
    slopes = jnp.array([[0.1, 0.2, 0.3, 0.4]])
    for call, bound in (
        (call_of(window=(9, 3)), 1e-5),
        (call_of("float16", soft_cap=2.0, value_size=8, alibi_slopes=slopes, **pairs), 1e-2),
    ):
        arrays = [float64(x) for x in (call.query, call.key, call.value)]
        bias = float64(np.zeros((2, HEADS, QUERIES, KEYS)) if call.bias is None else call.bias)
        cotangent = random(3, 2, QUERIES, HEADS, call.value.shape[3], dtype=call.query.dtype.name)
        (out, lse), pull = jax.vjp(reference(call), *arrays, bias)
        expected = pull((float64(cotangent), jnp.zeros_like(lse)))
        own = call.only(*OF_SCORES)
        results = AttentionResults(out.astype(call.query.dtype), lse.astype(jnp.float32), cotangent)
        found = jax_triton.gradients(own, results, tiles=BackwardTiles(TILE, TILE), **LAUNCH)
        compare((*found, jax_triton.score_gradients(own, results, tile=TILE, **LAUNCH)), expected, bound)


def latents() -> None:
    """Values that are the first columns of the keys: the results and gradients of an array of their own."""
    for dtype, width in (("float32", 16), ("bfloat16", 8)):
        separate = call_of(dtype)
        separate = dataclasses.replace(separate, value=separate.key[..., :width])
        shared = dataclasses.replace(
            separate, value=None, options=dataclasses.replace(separate.options, latent_value_size=width)
        )
        whole = jax_triton.attention(separate, tile=TILE, **LAUNCH)
        compare(whole, expected_of(separate), 1e-5 if dtype == "float32" else 2e-2)
        compare(jax_triton.attention(shared, tile=TILE, **LAUNCH), whole, 0.0)
        results = AttentionResults(*whole, random(3, 2, QUERIES, HEADS, width, dtype=dtype))
        options = {"tiles": BackwardTiles(TILE, TILE), **LAUNCH}
        expected = jax_triton.gradients(separate, results, **options)
        compare(jax_triton.gradients(shared, results, **options), expected, 0.0)
    for dtype in ("float32", "bfloat16"):  # values of whole pieces, which are read once
        key = random(1, 2, KEYS, KEY_HEADS, 160, dtype=dtype)
        call = dataclasses.replace(call_of(dtype), query=random(0, 2, QUERIES, HEADS, 160, dtype=dtype))
        for latent in (key, key.at[0, 33, 0, 3].set(jnp.inf).at[0, 2, 1, 5].set(jnp.nan).at[1, 37:].set(jnp.nan)):
            separate = dataclasses.replace(call, key=latent, value=latent[..., :128])
            options = dataclasses.replace(call.options, latent_value_size=128)
            shared = dataclasses.replace(separate, value=None, options=options)
            whole = jax_triton.attention(separate, tile=TILE, **LAUNCH)
            for tile in (TILE, HELD, APART):
                assert_bits_equal(jax_triton.attention(shared, tile=tile, **LAUNCH), whole)


def not_finite() -> None:
    """A value or key that is not finite makes those queries nan that see it, and no other."""
    call = call_of()
    whole = jax_triton.attention(call, tile=TILE, **LAUNCH)
    poisoned = call.value.at[0, 33, 0, 3].set(jnp.inf).at[0, 2, 1, 5].set(jnp.nan).at[1, 37:].set(jnp.nan)
    sees = np.zeros((2, QUERIES, HEADS), bool)
    sees[0, 3:, :2] = sees[0, :, 2:] = True
    for tile in (TILE, HELD, APART, COLUMNS):
        found = jax_triton.attention(dataclasses.replace(call, value=poisoned), tile=tile, **LAUNCH)
        for ours, right in zip(found, whole, strict=True):
            assert_bits_equal(np.asarray(ours)[~sees], np.asarray(right)[~sees])
            assert np.isnan(np.asarray(ours)[sees]).all()


CASES: Final = {
    "pages": pages,
    "apart": apart,
    "options": options,
    "8 bits": eight_bits,
    "gradients": gradients,
    "not finite": not_finite,
    "latents": latents,
}

if __name__ == "__main__":
    interpret_launches()
    interpret_instructions()
    with jax.enable_x64(True), np.errstate(all="ignore"):
        CASES[sys.argv[1]]()
    print("compared")

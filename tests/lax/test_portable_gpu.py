"""Products and attention on a GPU by XLA programs, and what is made of products: the same bits alone and in a batch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal, hostile_rows
from pallas_kernels.contract import RoundedMatmulContract

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 7, 16, 17, 33)


def rows(seed: int, m: int, k: int, dtype: str = "float32", kind: str = "normal") -> jax.Array:
    return jnp.asarray(np.asarray(hostile_rows(seed, (m, k), "float32")[kind]), dtype)


def rounded(x: np.ndarray, w: np.ndarray, dtype: Any) -> np.ndarray:
    """The contract in numpy: every product and every sum is rounded."""
    block = RoundedMatmulContract().k_block
    total = np.zeros((x.shape[0], w.shape[1]), dtype)
    for start in range(0, x.shape[1], block):
        chain = np.zeros_like(total)
        for k in range(start, min(start + block, x.shape[1])):
            chain = chain + x[:, k, None].astype(dtype) * w[k].astype(dtype)
        total = total + chain
    return total


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("k", [40, 333, 1100])
def test_products_have_the_bits_of_their_contract(k: int, dtype: str, transpose_w: bool) -> None:
    with jax.enable_x64(dtype == "float64"), bijax.prefer_backend("portable"):
        x, w = rows(0, 33, k, dtype), rows(1, k, 70, dtype)
        sums = "float64" if dtype == "float64" else "float32"
        run = functools.partial(bijax.matmul, transpose_w=transpose_w, preferred_element_type=sums)
        if dtype == "float64":
            run = bijax.invariant(lambda x, w: x @ (w.T if transpose_w else w))
        whole = jax.jit(run)(x, w.T if transpose_w else w)
        assert_bits_equal(whole, rounded(np.asarray(x), np.asarray(w), np.dtype(sums)))
        for size in SIZES:
            assert_bits_equal(jax.jit(run)(x[:size], w.T if transpose_w else w), whole[:size])
        if dtype == "float32":  # the control: fused multiply-adds would give other bits
            fused = np.zeros((33, 70), np.float32)
            for i in range(k):
                fused = (np.asarray(x)[:, i, None].astype(np.float64) * np.asarray(w)[i] + fused).astype(np.float32)
            assert (fused != np.asarray(whole)).any()


@pytest.mark.parametrize("kind", ["wide", "inf", "linspace"])
def test_gradients_have_the_bits_of_their_contract(kind: str) -> None:
    x, w, g = rows(0, 300, 20, kind=kind), rows(1, 20, 70), rows(2, 300, 70)
    with bijax.prefer_backend("portable"):
        found = jax.jit(lambda x, w, g: jax.vjp(lambda w: bijax.matmul(x, w), w)[1](g)[0])(x, w, g)
    assert_bits_equal(found, rounded(np.asarray(x).T, np.asarray(g), np.dtype("float32")))


LENGTH = 150


def attention_arrays(size: int, dtype: str) -> tuple[jax.Array, ...]:
    """Queries of 4 heads, keys and values of 2 heads, and cotangents, of 3 sequences."""
    shapes = [(3, LENGTH, heads, size) for heads in (4, 2, 2, 4)]
    return tuple(jax.random.normal(jax.random.key(i), s).astype(dtype) for i, s in enumerate(shapes))


MMA_KINDS = [(40, "float32"), (128, "float32"), (256, "float32"), (40, "bfloat16"), (128, "bfloat16"), (256, "float16")]


PORTABLE_KINDS = [("portable", 40, "float32"), ("portable", 128, "bfloat16")]


@pytest.mark.parametrize(("backend", "size", "dtype"), [("jax_triton", *kind) for kind in MMA_KINDS] + PORTABLE_KINDS)
def test_attention_and_its_gradients_keep_their_bits(backend: str, size: int, dtype: str) -> None:
    """The Triton kernels, also where this GPU has others (a bias brings every call to them), and the XLA programs."""
    with bijax.prefer_backend(backend):
        check_attention(size, dtype)


def check_attention(size: int, dtype: str) -> None:
    q, k, v, g = attention_arrays(size, dtype)
    bias = jax.random.normal(jax.random.key(4), (1, 4, LENGTH, LENGTH))

    @jax.jit
    def run(q: Any, k: Any, v: Any, g: Any, bias: Any, offset: Any, used: Any) -> Any:
        attend = functools.partial(
            bijax.dot_product_attention,
            bias=bias,
            is_causal=True,
            query_offset=offset,
            key_value_seq_lengths=used,
            return_residual=True,
        )
        out, pull, lse = jax.vjp(attend, q, k, v, has_aux=True)
        return (out, lse, *pull(g))

    whole = run(q, k, v, g, bias, 0, LENGTH)
    for i in range(3):
        alone = run(*(x[i : i + 1] for x in (q, k, v, g)), bias, 0, LENGTH)
        assert_bits_equal(alone, tuple(x[i : i + 1] for x in whole))
    # Chunks of queries, one query, and garbage after the length.
    for part, used in ((slice(60, 130), 130), (slice(70, 71), 71)):
        cache = (x.at[:, used:].set(jnp.nan) for x in (k, v))
        found = run(q[:, part], *cache, g[:, part], bias[:, :, part], part.start, used)
        assert_bits_equal(found[:3], tuple(x[:, part] for x in whole[:3]))

    def plain(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, bias, is_causal=True, implementation="xla")

    with jax.default_matmul_precision("highest"):
        wide = (x.astype("float32") for x in (q, k, v))
        out, pull = jax.vjp(plain, *wide)
        expected = (out, *pull(g.astype("float32")))
    # The tensor core cuts the sums of float32 parts where it adds them, up to 48 times in a head of 128.
    bound = 3e-5 if dtype == "float32" else 2 * float(jnp.finfo(dtype).eps)
    for ours, right in zip((whole[0], *whole[2:]), expected, strict=True):
        error = np.linalg.norm(np.asarray(ours, np.float64) - np.asarray(right, np.float64))
        assert error <= bound * np.linalg.norm(np.asarray(right, np.float64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_and_masks_give_the_bits_of_contiguous_keys(dtype: str) -> None:
    q, k, v, _ = attention_arrays(96, dtype)
    attend = jax.jit(functools.partial(bijax.dot_product_attention, return_residual=True))
    if dtype == "float32":
        table = np.random.default_rng(0).permutation(3 * 15).reshape(3, 15)
        pages = [jnp.zeros((45, 10, 2, 96), dtype).at[table].set(x.reshape(3, 15, 10, 2, 96)) for x in (k, v)]
        paged = bijax.paged_attention(q[:, :5], *pages, table, LENGTH, is_causal=False, return_residual=True)
        assert_bits_equal(paged, attend(q[:, :5], k, v))
    mask = jnp.arange(LENGTH) < 100
    masked = attend(q, k, v, mask=mask)
    spoilt = (jnp.where(mask[:, None, None], x, jnp.inf) for x in (k, v))
    assert_bits_equal(attend(q, *spoilt, mask=mask), masked)
    short = attend(q, k, v, mask=jnp.ones(1, bool), key_value_seq_lengths=np.full(3, 100))
    assert_bits_equal(masked, short)


def test_attention_inside_shard_map() -> None:
    q, k, v, _ = attention_arrays(40, "float32")
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    by_batch = jax.sharding.PartitionSpec("batch")
    attend = functools.partial(bijax.dot_product_attention, is_causal=True)
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(by_batch,) * 3, out_specs=by_batch)
    assert_bits_equal(jax.jit(mapped)(q, k, v), jax.jit(attend)(q, k, v))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_convolutions_and_their_gradients_keep_their_bits(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        x, g = (jnp.asarray(rows(i, 9, 10 * 10 * 8), dtype).reshape(9, 10, 10, 8) for i in range(2))
        w = jnp.asarray(rows(2, 9 * 8, 8), dtype).reshape(3, 3, 8, 8)

        def convolve(x: Any, w: Any) -> Any:
            return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

        def of_examples(x: Any, g: Any, w: Any) -> Any:
            out, pull = jax.vjp(lambda x: convolve(x, w), x)
            return out, pull(g)[0]

        assert_alone_as_in_a_batch(bijax.invariant(of_examples), (x, g), w)

        def of_weights(x: Any, g: Any, w: Any) -> Any:
            return jax.vmap(lambda x, g: jax.vjp(lambda w: convolve(x[None], w), w)[1](g[None])[0])(x, g)

        assert_alone_as_in_a_batch(bijax.invariant(of_weights), (x, g), w)


@pytest.mark.parametrize("batch_axis", [0, 1])
def test_products_in_float64_keep_their_bits(batch_axis: int) -> None:
    with jax.enable_x64(True):
        x, w = rows(0, 64, 96, "float64"), rows(1, 96, 40, "float64")
        layer = bijax.invariant(lambda x, w: jnp.tanh(jax.nn.softplus(x) @ w))
        if batch_axis:
            layer = bijax.invariant(lambda x, w: (w.T @ jax.nn.softplus(x.T)).T)
        assert_alone_as_in_a_batch(layer, (x,), w)


def assert_alone_as_in_a_batch(f: Callable[..., Any], batched: tuple[jax.Array, ...], *others: jax.Array) -> None:
    compiled = jax.jit(f)
    whole = compiled(*batched, *others)
    for size in (1, 2, 5, 33):
        part = compiled(*(x[:size] for x in batched), *others)
        assert_bits_equal(part, jax.tree.map(lambda y, size=size: y[:size], whole))


def test_plain_products_do_not() -> None:
    """The control: XLA's own products change a row's bits with the batch."""
    x, w = rows(0, 129, 576), rows(1, 576, 192)
    with pytest.raises(AssertionError):
        assert_batch_invariant(
            functools.partial(jnp.matmul, precision="highest"),
            x,
            w,
            batch_axes=(0, None),
            batch_sizes=(1, 2, 7, 64, 129),
            modes=("jit",),
        )

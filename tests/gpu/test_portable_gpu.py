"""Products on a GPU without a kernel of their own: the Triton kernel, and what is made of it, alone and in a batch."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_batch_invariant, assert_bits_equal, hostile_rows
from pallas_kernels.contract import ChunkContract, MatmulContract
from pallas_kernels.ops.matmul import triton
from pallas_kernels.schedule.triton_matmul import FEW_ROWS, MANY_ROWS
from tests.bitwise.test_matmul import emulate

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 7, 16, 17, 33)


def rows(seed: int, m: int, k: int, dtype: str = "float32", kind: str = "normal") -> jax.Array:
    return jnp.asarray(np.asarray(hostile_rows(seed, (m, k), "float32")[kind]), dtype)


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("k", [40, 333, 1100])
def test_the_kernel_computes_the_contract(k: int, transpose_w: bool) -> None:
    contract = MatmulContract(192)
    x, w = np.asarray(rows(0, 33, k)), np.asarray(rows(1, k, 70))
    expected = emulate(x, w, contract)
    for tile in (FEW_ROWS, MANY_ROWS):
        multiply = functools.partial(triton.matmul, contract=contract, transpose_w=transpose_w, tile=tile)
        assert_bits_equal(jax.jit(multiply)(x, w.T.copy() if transpose_w else w), expected)


def test_the_kernel_computes_the_contract_of_gradients() -> None:
    x, g = np.asarray(rows(0, 300, 20)), np.asarray(rows(1, 300, 70))
    expected = emulate(np.ascontiguousarray(x.T), g, MatmulContract(128))
    for tile in (FEW_ROWS, MANY_ROWS):
        assert_bits_equal(
            jax.jit(functools.partial(triton.weight_gradient, contract=ChunkContract(), tile=tile))(x, g), expected
        )


@pytest.mark.parametrize("kind", ["normal", "wide", "inf", "linspace"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_rows_of_the_kernel_keep_their_bits(dtype: str, kind: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        contract = MatmulContract(128, dtype="float64" if dtype == "float64" else "float32")
        x, w = rows(0, 33, 200, dtype, kind), rows(1, 200, 70, dtype)
        multiply = jax.jit(functools.partial(triton.matmul, contract=contract))
        whole = multiply(x, w)
        for size in SIZES:
            assert_bits_equal(multiply(x[:size], w), whole[:size])
        assert_bits_equal(multiply(x[::-1], w)[::-1], whole)
        assert_bits_equal(multiply(jnp.stack([x, x]), jnp.stack([w, w])), jnp.stack([whole, whole]))
        assert_bits_equal(multiply(x, w[:, :5]), whole[:, :5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [40, 128, 256])
def test_gradients_of_attention_keep_their_bits(size: int, dtype: str) -> None:
    q, k, v, g = (jnp.asarray(rows(i, 3 * 70 * 2, size), dtype).reshape(3, 70, 2, size) for i in range(4))

    @jax.jit
    def gradients(q: Any, k: Any, v: Any, g: Any) -> Any:
        out, pull = jax.vjp(functools.partial(bijax.dot_product_attention, is_causal=True), q, k, v)
        return out, pull(g)

    whole = gradients(q, k, v, g)
    for i in range(3):
        assert_bits_equal(
            gradients(*(x[i : i + 1] for x in (q, k, v, g))), jax.tree.map(lambda x, i=i: x[i : i + 1], whole)
        )


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

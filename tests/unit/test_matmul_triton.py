"""The Triton matmul on a CPU: which elements it multiplies, at every size and storage, and what it refuses.

Small integers are summed exactly in any order, so each result has one set of bits. The order itself is a GPU's matter.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.testing import assert_bits_equal
from pallas_kernels.contract import ChunkContract, MatmulContract, WgmmaContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.pallas_triton import matmul, weight_gradient
from pallas_kernels.matmul.schedule.pallas_triton import FEW_ROWS, MANY_ROWS, TritonTile


def integers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


@pytest.mark.tier("full", fast=("1-64-64-512-False", "3-9-1-4-True"))
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize(
    ("m", "k", "n", "block"), [(1, 64, 64, 512), (17, 333, 5, 192), (70, 200, 130, 67), (3, 9, 1, 4)]
)
def test_every_element_is_the_sum_of_its_products(m: int, k: int, n: int, block: int, transpose_w: bool) -> None:
    x, w = integers(0, m, k), integers(1, k, n)
    stored = jnp.asarray(w.T if transpose_w else w)
    for tile in (FEW_ROWS, MANY_ROWS):
        y = matmul(
            jnp.asarray(x), stored, contract=MatmulContract(block), transpose_w=transpose_w, tile=tile, interpret=True
        )
        assert_bits_equal(y, x @ w)


@pytest.mark.tier("full", fast=("bfloat16", "float64"))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(dtype: str) -> None:
    x, w = integers(0, 4, 40), integers(1, 40, 24)
    with jax.enable_x64(dtype == "float64"):
        contract = MatmulContract(16, dtype="float64" if dtype == "float64" else "float32")
        y = matmul(jnp.asarray(x, dtype), jnp.asarray(w, dtype), contract=contract, interpret=True)
        assert y.dtype == contract.dtype
        assert_bits_equal(y, (x @ w).astype(contract.dtype))


def test_stacks() -> None:
    x, w = integers(0, 2, 3, 5, 40), integers(1, 2, 3, 40, 24)
    contract = MatmulContract(512)
    y = matmul(jnp.asarray(x), jnp.asarray(w), contract=contract, interpret=True)
    assert_bits_equal(y, x @ w)
    y = matmul(jnp.asarray(x[0, 0]), jnp.asarray(w), contract=contract, interpret=True)
    assert_bits_equal(y, x[0, 0] @ w)


def test_gradients_continue_a_sum() -> None:
    x, g = integers(0, 2, 300, 20), integers(1, 2, 300, 70)
    whole = weight_gradient(jnp.asarray(x), jnp.asarray(g), contract=ChunkContract(), interpret=True)
    assert_bits_equal(whole, x.swapaxes(1, 2) @ g)
    total = None
    for rows in (slice(0, 256), slice(256, 300)):
        total = weight_gradient(
            jnp.asarray(x[:, rows]),
            jnp.asarray(g[:, rows]),
            contract=ChunkContract(),
            accumulate=total,
            interpret=True,
        )
    assert total is not None
    assert_bits_equal(total, whole)


def test_a_first_block_of_minus_zero_stays() -> None:
    """A product that underflows to -0 is the sum; a gradient adds it to the zero at its start."""
    x, w = jnp.full((1, 1), -1e-30), jnp.full((1, 1), 1e-30)
    assert np.signbit(np.float32(-1e-30) * np.float32(1e-30))
    gradient = weight_gradient(x, w, contract=ChunkContract(), interpret=True)
    assert not np.signbit(np.asarray(gradient)).any()


def test_empty_operands() -> None:
    contract = MatmulContract(512)
    assert_bits_equal(matmul(jnp.ones((3, 0)), jnp.ones((0, 2)), contract=contract), np.zeros((3, 2), np.float32))
    assert matmul(jnp.ones((0, 4)), jnp.ones((4, 2)), contract=contract).shape == (0, 2)
    one = jnp.ones((4, 2))
    assert_bits_equal(
        weight_gradient(jnp.ones((0, 4)), jnp.ones((0, 2)), contract=ChunkContract(), accumulate=one), one
    )


def test_what_it_refuses() -> None:
    x, w = jnp.ones((3, 4)), jnp.ones((4, 2))
    with pytest.raises(UnsupportedError, match="expected a MatmulContract, got WgmmaContract"):
        matmul(x, w, contract=WgmmaContract())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"got x \[3, 4\] and w \[3, 2\]"):
        matmul(x, w[:3], contract=MatmulContract(512))
    with pytest.raises(UnsupportedError, match="expected a ChunkContract"):
        weight_gradient(x, x, contract=MatmulContract(512))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"accumulate \[2, 2\]"):
        weight_gradient(x, x, contract=ChunkContract(), accumulate=jnp.ones((2, 2)))
    with jax.enable_x64(True), pytest.raises(UnsupportedError, match="adds in float32"):
        weight_gradient(x.astype("float64"), x, contract=ChunkContract())
    with pytest.raises(ValueError, match="depth must be a power of two"):
        TritonTile(16, 16, depth=8)

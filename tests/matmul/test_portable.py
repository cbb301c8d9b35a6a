"""The XLA programs of products for any GPU, on a CPU: which elements they multiply, at every size and storage.

Small integers are summed exactly in any order, so each result has one set of bits. The order itself is a GPU's matter.
"""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.testing import assert_bits_equal
from pallas_kernels.contract import RoundedChunkContract, RoundedMatmulContract, WgmmaContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.portable import matmul, weight_gradient


def integers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


@pytest.mark.tier("full", fast=("3-9-1-True",))
@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 64), (17, 333, 5), (70, 200, 130), (3, 9, 1)])
def test_every_element_is_the_sum_of_its_products(m: int, k: int, n: int, transpose_w: bool) -> None:
    x, w = integers(0, m, k), integers(1, k, n)
    stored = jnp.asarray(w.T if transpose_w else w)
    y = matmul(jnp.asarray(x), stored, contract=RoundedMatmulContract(), transpose_w=transpose_w)
    assert_bits_equal(y, x @ w)


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(dtype: str) -> None:
    x, w = integers(0, 4, 40), integers(1, 40, 24)
    with jax.enable_x64(dtype == "float64"):
        contract = RoundedMatmulContract(dtype="float64" if dtype == "float64" else "float32")
        y = matmul(jnp.asarray(x, dtype), jnp.asarray(w, dtype), contract=contract, out_dtype=contract.dtype)
        assert y.dtype == contract.dtype
        assert_bits_equal(y, (x @ w).astype(contract.dtype))


@pytest.mark.tier("full")
def test_stacks() -> None:
    x, w = integers(0, 2, 3, 5, 40), integers(1, 2, 3, 40, 24)
    contract = RoundedMatmulContract()
    y = matmul(jnp.asarray(x), jnp.asarray(w), contract=contract)
    assert_bits_equal(y, x @ w)
    y = matmul(jnp.asarray(x[0, 0]), jnp.asarray(w), contract=contract)
    assert_bits_equal(y, x[0, 0] @ w)


@pytest.mark.tier("full")
def test_gradients_continue_a_sum() -> None:
    x, g = integers(0, 2, 300, 20), integers(1, 2, 300, 70)
    whole = weight_gradient(jnp.asarray(x), jnp.asarray(g), contract=RoundedChunkContract())
    assert_bits_equal(whole, x.swapaxes(1, 2) @ g)
    total = None
    for rows in (slice(0, 256), slice(256, 300)):
        total = weight_gradient(
            jnp.asarray(x[:, rows]),
            jnp.asarray(g[:, rows]),
            contract=RoundedChunkContract(),
            accumulate=total,
        )
    assert total is not None
    assert_bits_equal(total, whole)


def test_empty_operands() -> None:
    contract = RoundedMatmulContract()
    assert_bits_equal(matmul(jnp.ones((3, 0)), jnp.ones((0, 2)), contract=contract), np.zeros((3, 2), np.float32))
    assert matmul(jnp.ones((0, 4)), jnp.ones((4, 2)), contract=contract).shape == (0, 2)
    one = jnp.ones((4, 2))
    assert_bits_equal(
        weight_gradient(jnp.ones((0, 4)), jnp.ones((0, 2)), contract=RoundedChunkContract(), accumulate=one), one
    )


def test_what_it_refuses() -> None:
    x, w = jnp.ones((3, 4)), jnp.ones((4, 2))
    with pytest.raises(UnsupportedError, match=r"expected a RoundedMatmulContract with .*, got WgmmaContract"):
        matmul(x, w, contract=WgmmaContract())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="blocks of a multiple of 32, got RoundedMatmulContract"):
        matmul(x, w, contract=RoundedMatmulContract(48))
    with pytest.raises(UnsupportedError, match="expected a RoundedChunkContract"):
        weight_gradient(x, x, contract=RoundedMatmulContract())  # type: ignore[arg-type]
    with jax.enable_x64(True), pytest.raises(UnsupportedError, match="adds in float32"):
        weight_gradient(x.astype("float64"), x, contract=RoundedChunkContract())
    with pytest.raises(ValueError, match="k_block must be at least 1, got 0"):
        RoundedMatmulContract(0)
    with pytest.raises(ValueError, match="dtype must be float32 or float64, got 'bfloat16'"):
        RoundedMatmulContract(dtype="bfloat16")
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        RoundedChunkContract(0)


_WITHOUT_PACKAGES = """
import warnings
import jax
import bijax
from pallas_kernels import packages

packages._is_installed = lambda name: name != "triton"
x, w = jax.ShapeDtypeStruct((8, 64), "bfloat16"), jax.ShapeDtypeStruct((64, 32), "bfloat16")

def used(function, *arrays, architecture):
    return set(bijax.contracts(function, *arrays, platform="cuda", architecture=architecture).ids)

def attend(q):
    return bijax.dot_product_attention(q, q, q)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert used(bijax.matmul, x, w, architecture="sm_80") == {"matmul/v1/f32-rounded-chain128-fold"}
    q = jax.ShapeDtypeStruct((1, 8, 2, 16), "float32")
    assert "attention/v1/f32-rounded-keys128-online" in used(attend, q, architecture="sm_90")
(warning,) = (w for w in caught if "bijax: the kernel" in str(w.message))
assert "triton not installed; `pip install triton` installs what is missing" in str(warning.message)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert used(bijax.matmul, x, w, architecture="sm_75") == {"matmul/v1/f32-rounded-chain128-fold"}
    lowered = jax.jit(lambda x, w: bijax.matmul(x, w))
    with bijax.lowering_for("sm_75"):
        text = lowered.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
assert "stablehlo.dot" not in text and "custom_call" not in text
assert text.count("stablehlo.xor") >= 32  # products are fenced from sums
"""


def test_what_serves_without_the_packages_and_on_older_gpus() -> None:
    subprocess.run([sys.executable, "-c", _WITHOUT_PACKAGES], check=True, cwd=Path(__file__).parents[2])

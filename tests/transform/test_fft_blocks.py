"""Fourier transforms by XLA's library on a CPU: the bits of a row in any batch, at any place, next to any others."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests.tiers import full_only, tiered

Transform = Callable[[jax.Array], jax.Array]

TRANSFORMS: dict[str, Transform] = {
    "fft": jnp.fft.fft,
    "ifft": jnp.fft.ifft,
    "rfft": lambda z: jnp.fft.rfft(z.real),
    "irfft": lambda z: jnp.fft.irfft(z[..., : z.shape[-1] // 2 + 1], z.shape[-1]),
}
LENGTHS = [33, 100, *map(full_only, (67, 96, 131, 512, 1000, 1009, 2048, 2049, 4099))]
"""Powers of two, products, primes; the last two are transformed one at a time."""

HOSTILE = [np.nan, np.inf, -np.inf, 3e38, 1e-40, 0.0]


def signals(rows: int, *shape: int, dtype: str = "complex64") -> np.ndarray:
    numbers = np.random.default_rng(5).standard_normal((2, rows, *shape))
    return (numbers[0] + 1j * numbers[1]).astype(dtype)


def parts(z: jax.Array) -> np.ndarray:
    array = np.asarray(z)
    return np.stack([array.real, array.imag]) if array.dtype.kind == "c" else array[None]


@pytest.mark.parametrize("name", tiered(TRANSFORMS, fast=["fft", "irfft"]))
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", ["complex64", full_only("complex128")])
def test_a_row_has_the_same_bits_in_any_batch(name: str, n: int, dtype: str) -> None:
    with jax.enable_x64(dtype == "complex128"):
        run = jax.jit(bijax.invariant(TRANSFORMS[name]))
        z = signals(19, n, dtype=dtype)
        whole = parts(run(z))
        for size in (1, 2, 7, 8, 9, 16):
            assert_bits_equal(parts(run(z[:size])), whole[:, :size], err_msg=f"batch of {size}")
        for place in range(9):  # every place of a block, and the first of the next one
            hostile = np.empty_like(z)
            hostile[:] = np.resize(np.array(HOSTILE), (19, 1)).astype(dtype)
            hostile[place] = z[0]
            assert_bits_equal(parts(run(hostile))[:, place], whole[:, 0], err_msg=f"place {place}")


def test_plain_jax_follows_the_batch() -> None:
    z = signals(19, 1000)
    differing = []
    for run in (jax.jit(jnp.fft.fft), jax.jit(bijax.invariant(jnp.fft.fft))):
        differing.append(int((parts(run(z))[:, :1] != parts(run(z[:1]))).sum()))
    assert differing[0] > 0
    assert differing[1] == 0


@pytest.mark.parametrize("transform", [jnp.fft.fft2, full_only(jnp.fft.ifftn), full_only(jnp.fft.irfft2)])
def test_several_axes_are_those_of_one_axis(transform: Transform) -> None:
    z = signals(9, 40, 9)
    run = jax.jit(bijax.invariant(lambda z: jax.vmap(transform)(z)))
    whole = parts(run(z))
    for size in (1, 3):
        assert_bits_equal(parts(run(z[:size])), whole[:, :size])
    np.testing.assert_allclose(whole, parts(jax.vmap(transform)(z)), atol=1e-4)


@pytest.mark.parametrize(("n", "block"), [(33, "8x33"), (2048, "8x2048"), (2049, "2049")])
@pytest.mark.parametrize("rows", [1, 20])
def test_the_library_is_given_a_fixed_number_of_transforms(n: int, block: str, rows: int) -> None:
    run = jax.jit(bijax.invariant(jnp.fft.fft))
    text = run.trace(jax.ShapeDtypeStruct((rows, n), jnp.complex64)).lower(lowering_platforms=("cpu",)).as_text()
    assert set(re.findall(r"stablehlo\.fft .*-> tensor<(.*)xcomplex<f32>>", text)) == {block}


def test_contracts_name_the_blocks() -> None:
    found = [bijax.contracts(bijax.invariant(jnp.fft.fft), signals(2, n), platform="cpu").ids for n in (33, 2049)]
    assert found == [("fft/v1/blocks-of-8",), ("fft/v1/blocks-of-1",)]
    short = bijax.contracts(bijax.invariant(jnp.fft.fft), signals(2, 32), platform="cpu").ids
    assert not any(name.startswith("fft") for name in short)

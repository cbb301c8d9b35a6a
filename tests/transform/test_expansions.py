"""Factorisations, transforms, complex numbers: the bits of a matrix or a row alone are those in any batch."""

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.testing import assert_bits_equal
from tests.tiers import tiered

BATCH = 8
KEPT = [1, 4, 7]
"""Rows that stay as they are among hostile ones."""
HOSTILE = [np.inf, np.nan, 3e38, 0.0, -1e-40]

Program = Callable[[jax.Array], Any]


def real(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((BATCH, *shape)).astype(np.float32)


def paired(*shape: int) -> np.ndarray:
    return (real(*shape) + 1j * real(*shape, seed=1)).astype(np.complex64)


def gram(x: jax.Array) -> jax.Array:
    return x @ x.conj().swapaxes(-1, -2) + jnp.eye(x.shape[-1])


def factorise(x: jax.Array) -> Any:
    solved = lax.linalg.triangular_solve(x, x[:, :3], left_side=False, lower=False, transpose_a=True)
    return jnp.linalg.cholesky(gram(x)), solved, lax.linalg.lu(x)


def logarithms(x: jax.Array) -> jax.Array:
    return jnp.log(jnp.diagonal(jnp.linalg.cholesky(gram(x)), axis1=1, axis2=2)).sum()


def likelihood(x: jax.Array) -> jax.Array:
    """Of a Gaussian process: the gradient holds products and triangular systems."""
    white = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(gram(x)), x[:, :, :1], lower=True)
    return (white * white).sum() + logarithms(x) + jnp.linalg.slogdet(x)[1].sum()


def every(x: jax.Array, *sizes: int) -> Any:
    """Every factorisation of the upper left corners."""
    corners = [x[:, :n, :n] for n in sizes]
    kinds = (jnp.linalg.eigh, jnp.linalg.svd, lax.linalg.lu, lax.linalg.qr, jnp.linalg.inv)
    return [([kind(a) for kind in kinds], jnp.linalg.cholesky(gram(a))) for a in corners]


def factors(x: jax.Array) -> Any:
    return lax.linalg.lu(x), lax.linalg.qr(x), jnp.linalg.inv(x), jnp.linalg.cholesky(gram(x))


def scalars_of(function: Program) -> Program:
    """The gradient of a number that is made of all results."""
    return jax.grad(lambda x: sum(jnp.sin(jnp.abs(r)).sum() for r in jax.tree.leaves(function(x))))


def transforms(z: jax.Array) -> Any:
    """A length of two factors, and a prime one of a real signal."""
    return jnp.fft.fft(z), jnp.fft.rfft(z.real[:, :67])


def other_transforms(z: jax.Array) -> Any:
    return jnp.fft.irfft(z[:, :19]), jnp.fft.ifft(z[:, :33]), jnp.fft.fft2(z.reshape(-1, 7, 10))


MATRIX = np.multiply.outer(np.linspace(0, 1, 12), np.linspace(-1, 1, 9) + 0.3j).astype(np.complex64)


def numbers(z: jax.Array) -> Any:
    return jnp.exp(z * z[:, :1]) / (1 + jnp.abs(z)), z @ MATRIX, z.sum(1), z[:, 0] == z[:, 1]


def functions(z: jax.Array) -> Any:
    curve = jnp.log(z) * jnp.sqrt(z) + jnp.tanh(z) * z**3 + jnp.sin(z) + z ** (1.5 + 0.5j)
    horner = jnp.polyval(MATRIX[:4, 1], z)
    return curve, horner, z.prod(1), jnp.cumsum(z, 1), jnp.cumprod(z, 1), jnp.var(z, 1)


def turned(x: jax.Array) -> jax.Array:
    """Rotary position embedding in complex form."""
    z = lax.complex(x[..., ::2], x[..., 1::2]) * jnp.exp(1j * jnp.arange(x.shape[1])[:, None] * 0.1 ** jnp.arange(6.0))
    return jnp.stack([z.real, z.imag], -1).reshape(x.shape)


def mixed(x: jax.Array) -> Any:
    numbers = jnp.round(x * 8).astype(jnp.int8)
    weights = (jnp.arange(x.shape[1] * 5).reshape(-1, 5) % 11 - 5).astype(jnp.float32) / 3
    dot = functools.partial(lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ())))
    eights = x.astype(jnp.float8_e4m3fn), weights.astype(jnp.float8_e4m3fn)
    return dot(numbers, weights), dot(*eights, preferred_element_type=jnp.float32)


def incomplete(x: jax.Array) -> jax.Array:
    return jax.scipy.special.betainc(jnp.abs(x) + 0.1, 3 * jnp.abs(x[:, ::-1]) + 0.2, jax.nn.sigmoid(x))


def multiplied(x: jax.Array) -> Any:
    """Complex numbers multiplied where places meet, where they do not, and where some are outside."""
    places, y = jnp.array([3, 3, 0, -1, 20, 5, 3]), x[:, 5:]
    rows = jax.vmap(lambda x, y: (x.at[places].multiply(y), x.at[places].multiply(y, mode="clip")))(x, y)
    return rows, x.at[:, 1:-1].multiply(2), x.at[:, jnp.array([2, 0])].multiply(y[:, :2], unique_indices=True)


def tridiagonal(x: jax.Array) -> Any:
    """Tridiagonal systems, whose pivots are exchanged or not, with gradients, and operations that JAX writes out."""

    def solved(x: jax.Array) -> jax.Array:
        below, above = x[..., 0].at[..., 0].set(0), x[..., 2].at[..., -1].set(0)
        return lax.linalg.tridiagonal_solve(below, x[..., 1], above, x[..., 3:])

    def product(x: jax.Array) -> jax.Array:
        return lax.linalg.symmetric_product(x, x[..., :1] + x[..., :1].mT, alpha=0.3, beta=1.7)

    def turned(x: jax.Array) -> jax.Array:
        packed, factors = jnp.linalg.qr(x, mode="raw")
        return lax.linalg.ormqr(packed.mT, factors, x, transpose=True)

    return solved(x), product(x), turned(x), jax.grad(lambda x: jnp.sin(solved(x)).sum())(x)


CASES: dict[str, tuple[Program, np.ndarray]] = {
    "factorisations": (factorise, real(6, 6)),
    "every factorisation by LAPACK": (lambda x: every(x, 1, 3, 16), real(16, 16)),
    "more of LAPACK": (lambda x: every(x, 2, 6, 25), real(25, 25)),
    "most of LAPACK": (lambda x: (factors(x), jnp.linalg.svd(x[:, :32, :32])), real(48, 48)),
    "every factorisation that is written out": (lambda x: every(x, 49), real(49, 49)),
    "QR": (jnp.linalg.qr, real(6, 4)),
    "QR of many rows": (jnp.linalg.qr, real(49, 4)),
    "a factorisation in blocks": (lambda x: (jnp.linalg.cholesky(gram(x)), lax.linalg.lu(x)), real(66, 66)),
    "systems in blocks": (lambda x: jnp.linalg.solve(x, x[:, :, :2]), real(66, 66)),
    "complex factorisations": (lambda x: (factorise(x), jnp.linalg.qr(x)), paired(5, 5)),
    "gradients of Cholesky": (jax.grad(logarithms), real(5, 5)),
    "gradients of factorisations": (jax.grad(likelihood), real(5, 5)),
    "eigenvalues": (lambda x: lax.linalg.eigh(x, symmetrize_input=False), real(5, 5)),
    "singular values": (lambda x: jnp.linalg.svd(x, full_matrices=False), real(5, 3)),
    "singular values of many rows": (lambda x: jnp.linalg.svd(x, full_matrices=False), real(33, 3)),
    "gradients of eigenvalues": (scalars_of(lambda x: jnp.linalg.eigh(x + x.swapaxes(1, 2))), real(4, 4)),
    "gradients of singular values": (scalars_of(lambda x: jnp.linalg.svd(x, full_matrices=False)), real(4, 3)),
    "gradients of QR": (scalars_of(jnp.linalg.qr), real(4, 3)),
    "transforms": (transforms, paired(70)),
    "other transforms": (other_transforms, paired(70)),
    "gradients of transforms": (scalars_of(jnp.fft.rfft), real(50)),
    "complex numbers": (numbers, paired(12)),
    "complex functions": (functions, paired(12)),
    "rotary embedding": (lambda x: (turned(x), jax.grad(lambda x: jnp.sin(turned(x)).sum())(x)), real(9, 12)),
    "mixed products": (mixed, real(12)),
    "tridiagonal systems": (tridiagonal, real(7, 5)),
    "scatters that multiply": (multiplied, paired(12)),
    "betainc": (incomplete, real(12)),
}
QUICK_ALONE = ["factorisations", "complex numbers", "rotary embedding"]


@functools.cache
def compiled(name: str) -> Program:
    return jax.jit(bijax.invariant(CASES[name][0]))


@functools.cache
def whole(name: str) -> Any:
    return compiled(name)(CASES[name][1])


def rows(results: Any, which: Any) -> Any:
    """Returns some rows, of complex numbers the parts."""
    leaves = (np.asarray(r)[which] for r in jax.tree.leaves(results))
    return [np.stack([r.real, r.imag]) if r.dtype.kind == "c" else r for r in leaves]


@pytest.mark.tier("full", fast=("transforms", "rotary embedding"))
@pytest.mark.parametrize("name", CASES)
def test_rows_do_not_mind_their_neighbours_nor_their_place(name: str) -> None:
    run, x = compiled(name), CASES[name][1]
    hostile = x.copy()
    for row in set(range(BATCH)) - set(KEPT):
        hostile[row] = HOSTILE[row % len(HOSTILE)]
    assert_bits_equal(rows(run(hostile), KEPT), rows(whole(name), KEPT), err_msg="hostile neighbours")
    order = np.roll(np.arange(BATCH), 3)
    assert_bits_equal(rows(run(x[order]), slice(None)), rows(whole(name), order), err_msg="moved")


@pytest.mark.parametrize("name", tiered(CASES, fast=QUICK_ALONE))
def test_rows_alone_have_the_bits_of_the_batch(name: str) -> None:
    x = CASES[name][1]
    for row in (0, 5):
        assert_bits_equal(rows(compiled(name)(x[row : row + 1]), [0]), rows(whole(name), [row]))


@pytest.mark.parametrize("name", tiered(CASES, fast=[]))
def test_rows_do_not_mind_loops_and_maps(name: str) -> None:
    function, x = CASES[name]

    def one(row: jax.Array) -> Any:
        return jax.tree.map(lambda r: r[0], function(row[None]))

    for transformed in (jax.vmap(one), lambda x: lax.map(one, x)):
        actual = jax.jit(bijax.invariant(transformed))(x)
        assert_bits_equal(rows(actual, slice(None)), rows(whole(name), slice(None)))
    for size in (2, 3, 7):
        actual = compiled(name)(x[:size])
        assert_bits_equal(rows(actual, slice(None)), rows(whole(name), slice(0, size)), err_msg=f"batch of {size}")


def test_plain_jax_follows_the_batch() -> None:
    z, w = paired(300), paired(40, 300)[0].T
    differing = []
    for wrap in (lambda f: f, bijax.invariant):
        run = jax.jit(wrap(lambda z: z @ w))
        batch, alone = run(z), run(z[5:6])
        differing.append(int((np.asarray(batch)[5] != np.asarray(alone)[0]).sum()))
    assert differing[0] > 0
    assert differing[1] == 0


def test_what_fails_is_what_fails_in_jax() -> None:
    """A matrix that is not positive definite is nan as a whole, and a column of zeros has no pivot."""
    not_positive, singular = jnp.array([[1.0, 2.0], [2.0, 1.0]]), jnp.array([[0.0, 1.0], [0.0, 2.0]])
    found, (factors, pivots, order) = jax.jit(bijax.invariant(lambda a, b: (jnp.linalg.cholesky(a), lax.linalg.lu(b))))(
        not_positive, singular
    )
    np.testing.assert_array_equal(np.isnan(found), [[True, False], [True, True]])
    assert factors.tolist() == [[0.0, 1.0], [0.0, 2.0]]
    assert (pivots.tolist(), order.tolist()) == ([0, 1], [0, 1])


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_library_is_given_single_matrices_alone(platform: str) -> None:
    traced = jax.jit(bijax.invariant(lambda x: (factorise(x), jnp.linalg.eigh(x), jnp.fft.rfft(x))))
    with bijax.lowering_for("sm_90"):
        lowered = traced.trace(jax.ShapeDtypeStruct((2, 6, 6), jnp.float32)).lower(lowering_platforms=(platform,))
    text = lowered.as_text()
    for library in ("cusolver", "cublas", "stablehlo.fft", "stablehlo.cholesky", "stablehlo.triangular_solve"):
        assert library not in text, library
    calls = dict(re.findall(r"custom_call @(lapack_\w+)\(.* : (\(.*\)) ->", text))
    found = {"lapack_spotrf_ffi", "lapack_sgetrf_ffi", "lapack_ssyevd_ffi"} if platform == "cpu" else set()
    assert set(calls) == found
    assert set(calls.values()) <= {"(tensor<6x6xf32>)"}


def test_audits_and_contracts_see_what_is_inside() -> None:
    found = bijax.audit(bijax.invariant(jnp.linalg.cholesky), jnp.eye(70), platform="cpu")
    (operation,) = (o for o in found.operations if o.primitive == "cholesky")
    assert operation.verdict == "replaced"
    assert any(name.startswith("matmul/") for name in operation.contracts)
    assert found.invariant
    small = bijax.contracts(bijax.invariant(jnp.linalg.cholesky), jnp.eye(48), platform="cpu")
    assert "lapack/v1/one-matrix" in small.ids
    assert not any("lapack" in name for name in operation.contracts)


PLACES = """
import os
os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
import jax, numpy as np, bijax
jax.config.update("jax_enable_x64", True)
x = np.repeat(np.random.default_rng(0).standard_normal((1, 7, 7)), 4, axis=0)
for wrap in (lambda f: f, bijax.invariant):
    factors = np.asarray(jax.jit(wrap(jax.lax.linalg.lu))(x)[0]).view(np.uint64)
    print(int((factors != factors[:1]).any((1, 2)).sum()))
"""


@pytest.mark.tier("fault")
def test_equal_matrices_of_a_stack_have_equal_factors() -> None:
    """OpenBLAS's code for processors without FMA adds in an order that depends on where a matrix starts."""
    done = subprocess.run([sys.executable, "-c", PLACES], capture_output=True, text=True, check=True)
    plain, invariant = map(int, done.stdout.split())
    assert invariant == 0
    if plain == 0:
        pytest.skip("this BLAS, or this processor, has no such order")

"""Factorisations, transforms and functions of complex numbers against float64: errors with stated bounds."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.transform.expansions import _lapack
from tests.tiers import full_only

WRITTEN_OUT = pytest.mark.parametrize("written_out", [False, True])
"""Whether small matrices are not given to LAPACK: as on a GPU."""
DTYPES = ["float32", full_only("float64"), full_only("complex64"), full_only("complex128")]


def matrices(dtype: str, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((3, *shape))
    return (x + 1j * rng.standard_normal(x.shape) if dtype.startswith("c") else x).astype(dtype)


def run(function: Callable[..., Any], *args: np.ndarray) -> Any:
    """Returns what a function returns under the transform, in 64 bits; dtypes and shapes are those of JAX."""
    with jax.enable_x64(any(a.dtype.itemsize == 16 or a.dtype == np.float64 for a in args)):
        found = jax.jit(bijax.invariant(function))(*args)
        stock = jax.eval_shape(function, *args)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(stock), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    return jax.tree.map(lambda r: np.asarray(r).astype(np.result_type(np.asarray(r), np.float64)), found)


def adjoint(a: np.ndarray) -> np.ndarray:
    return a.conj().swapaxes(-1, -2)


def assert_close(found: np.ndarray, wanted: np.ndarray, dtype: str, units: float) -> None:
    """Asserts that the largest error is no more than so many units in the last place of the largest number."""
    error = np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-30)
    assert error <= units * np.finfo(dtype).eps, error / np.finfo(dtype).eps


@pytest.mark.parametrize("n", [6, full_only(64), full_only(65), full_only(130)])
@pytest.mark.parametrize("dtype", DTYPES)
@WRITTEN_OUT
def test_triangles(dtype: str, n: int, written_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if written_out:
        monkeypatch.setattr(_lapack, "contract_of", lambda *_: None)
    x = matrices(dtype, n, n)
    gram = x @ adjoint(x) + n * np.eye(n, dtype=dtype)

    def program(gram: jax.Array, x: jax.Array) -> Any:
        lower = jnp.linalg.cholesky(gram, symmetrize_input=False)
        kinds = {"lower": True, "transpose_a": True, "conjugate_a": True}
        return lower, lax.linalg.triangular_solve(lower, x[:, :2], **kinds), lax.linalg.lu(x)

    lower, solved, (factors, pivots, order) = run(program, gram, x)
    assert_close(lower @ adjoint(lower), gram, dtype, 4 * n)
    assert_close(solved @ adjoint(lower), x[:, :2].astype(lower.dtype), dtype, 4 * n)
    unit, upper = np.tril(factors, -1) + np.eye(n), np.triu(factors)
    permuted = np.take_along_axis(x, order.astype(int)[..., None], axis=1)
    assert_close(unit @ upper, permuted.astype(unit.dtype), dtype, 4 * n)
    largest = np.abs(np.stack([unit.real, unit.imag])).max() if dtype.startswith("c") else np.abs(unit).max()
    assert largest <= 1.0001 * (2**0.5 if dtype.startswith("c") else 1)
    assert pivots.shape == (3, n)


@pytest.mark.parametrize("perturb", [False, full_only(True)])
@pytest.mark.parametrize("n", [67, full_only(1), full_only(2), full_only(3)])
@pytest.mark.parametrize("dtype", ["float32", full_only("float64")])
def test_tridiagonal_systems(dtype: str, n: int, perturb: bool) -> None:
    x = matrices(dtype, 6, n)
    x[:, 0, 0] = x[:, 2, -1] = 0
    wide = x.astype(np.float64)
    dense = np.zeros((3, n, n))
    for offset, diagonal in ((-1, wide[:, 0, 1:]), (0, wide[:, 1]), (1, wide[:, 2, :-1])):
        rows = np.arange(max(0, -offset), n - max(0, offset))
        dense[:, rows, rows + offset] = diagonal
    right = x[:, 3:].swapaxes(1, 2)
    solve = functools.partial(lax.linalg.tridiagonal_solve, perturb_singular=perturb)
    found = run(lambda x, right: solve(x[:, 0], x[:, 1], x[:, 2], right), x, right)
    for a, got, b in zip(dense, found, right, strict=True):  # pivots are not on the diagonal: as by a dense solver
        scale = np.abs(a).sum(1).max() * np.abs(got).max()
        assert np.abs(a @ got - b).max() <= 4 * np.finfo(dtype).eps * scale


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", ["float32", full_only("float64")])
def test_what_jax_writes_out_by_itself(dtype: str) -> None:
    x = matrices(dtype, 7, 5)
    wide = x.astype(np.float64)
    gram = wide.swapaxes(1, 2) @ wide + 3 * np.eye(5)

    def program(x: jax.Array, triangle: jax.Array) -> Any:
        packed, factors = jnp.linalg.qr(x, mode="raw")
        turned = lax.linalg.ormqr(packed.mT, factors, x, transpose=True)
        product = lax.linalg.symmetric_product(x, x[:, :, :1] + x[:, :, :1].mT, alpha=0.3, beta=1.7)
        return turned, product, lax.map(lambda each: lax.linalg.cholesky_update(*each), (triangle, x[:, 0]))

    turned, product, updated = run(program, x, np.linalg.cholesky(gram).swapaxes(1, 2).astype(dtype))
    upper = turned[:, :5]
    assert np.abs(np.tril(turned, -1)).max() <= 60 * np.finfo(dtype).eps * np.abs(x).max()
    assert_close(upper.swapaxes(1, 2) @ upper, wide.swapaxes(1, 2) @ wide, dtype, 60)
    column = wide[:, :, :1]
    expected = 0.3 * wide @ wide.swapaxes(1, 2) + 1.7 * (column + column.swapaxes(1, 2))
    assert_close(product, expected, dtype, 30)
    assert_close(updated.swapaxes(1, 2) @ updated, gram + wide[:, 0, :, None] * wide[:, 0, None], dtype, 60)


@pytest.mark.tier("full")
def test_singular_tridiagonal_systems_are_nan_and_the_others_are_not() -> None:
    diagonal = np.ones((2, 4), np.float32)
    diagonal[0, 2] = 0
    nothing, right = np.zeros((2, 4), np.float32), np.ones((2, 4, 1), np.float32)
    found = run(lax.linalg.tridiagonal_solve, nothing, diagonal, nothing, right)
    assert np.isnan(found[0]).all()
    np.testing.assert_array_equal(found[1], right[1])
    solve = functools.partial(lax.linalg.tridiagonal_solve, perturb_singular=True)
    assert np.isfinite(run(solve, nothing, diagonal, nothing, right)).all()


@pytest.mark.tier("full")
@pytest.mark.parametrize("shape", [(6, 4), full_only((4, 6)), full_only((1, 1)), full_only((33, 20))])
@pytest.mark.parametrize("dtype", DTYPES)
@WRITTEN_OUT
def test_orthogonal_factors(
    dtype: str, shape: tuple[int, int], written_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if written_out:
        monkeypatch.setattr(_lapack, "contract_of", lambda *_: None)
    x = matrices(dtype, *shape)
    x[2] = np.outer(x[2, :, 0], x[2, 0])  # of rank 1: the other vectors are orthonormal all the same
    square = x @ adjoint(x)
    n = max(shape)

    def program(x: jax.Array, square: jax.Array) -> Any:
        vectors, values = lax.linalg.eigh(square)
        return jnp.linalg.qr(x), (vectors, values), jnp.linalg.svd(x, full_matrices=True)

    (q, r), (vectors, values), (u, s, v) = run(program, x, square)
    for orthogonal in (q, vectors, u, adjoint(v)):
        assert_close(adjoint(orthogonal) @ orthogonal, np.eye(orthogonal.shape[-1]), dtype, 8 * n)
    assert_close(q @ r, x.astype(q.dtype), dtype, 8 * n)
    assert (np.tril(r, -1) == 0).all()
    assert_close(vectors * values[:, None, :] @ adjoint(vectors), square.astype(q.dtype), dtype, 8 * n)
    assert_close(values, np.linalg.eigvalsh(square.astype(q.dtype)), dtype, 8 * n)
    k = min(shape)
    assert_close(u[..., :k] * s[:, None, :] @ v[:, :k], x.astype(q.dtype), dtype, 8 * n)
    assert_close(s, np.linalg.svd(x.astype(q.dtype), compute_uv=False), dtype, 8 * n)
    assert (np.diff(s) <= 0).all()
    assert (np.diff(values) >= 0).all()


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [("complex64", (60, 67)), full_only("complex64", (1, 2, 31, 61, 128, 1000)), full_only("complex128", (60, 134))],
)
def test_transforms(dtype: str, lengths: tuple[int, ...]) -> None:
    z = matrices(dtype, max(lengths))
    found = run(lambda z: [(jnp.fft.fft(z[:, :n]), jnp.fft.ifft(z[:, :n])) for n in lengths], z)
    for n, (forth, back) in zip(lengths, found, strict=True):
        wide = z[:, :n].astype(np.complex128)
        assert_close(forth, np.fft.fft(wide), dtype, 8 + n**0.5)
        assert_close(back, np.fft.ifft(wide), dtype, 8 + n**0.5)


@pytest.mark.parametrize("n", [12, full_only(45)])
def test_transforms_of_several_axes_and_of_real_signals(n: int) -> None:
    x = matrices("float32", 4, n)
    half = np.fft.rfft2(x.astype(np.float64)).astype(np.complex64)
    there, back = run(lambda x, half: (jnp.fft.rfft2(x), jnp.fft.irfft2(half, s=(4, n))), x, half)
    assert_close(there, np.fft.rfft2(x.astype(np.float64)), "float32", 16)
    assert_close(back, x.astype(np.float64), "float32", 16)


FUNCTIONS = [
    *"exp exp2 expm1 log log2 log1p sqrt square sin cos tan sinh cosh tanh".split(),
    *"abs conj angle reciprocal sign positive".split(),
]
REFERENCES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "sign": lambda z: z / np.abs(z),
    # NumPy's complex log1p adds 1 first, which loses a small real part of the result.
    "log1p": lambda z: np.log1p(z.real * (2 + z.real) + z.imag**2) / 2 + 1j * np.arctan2(z.imag, 1 + z.real),
}


@pytest.mark.parametrize("dtype", [full_only("complex64"), full_only("complex128")])
def test_functions_of_complex_numbers(dtype: str) -> None:
    z = (matrices(dtype, 400) * 2).ravel()
    z[:6] = [0.001 + 0.0005j, 1 + 1e-4j, -2, 3j, -1e-3j, 30 - 0.5j]
    found = run(lambda z: {name: getattr(jnp, name)(z) for name in FUNCTIONS}, z)
    wide = z.astype(np.complex128)
    for name, result in found.items():
        wanted = REFERENCES.get(name, getattr(np, name))(wide)
        scale = 30 if name in ("exp", "exp2", "expm1", "sinh", "cosh", "sin", "cos", "tan", "tanh") else 4
        error = np.abs(result - wanted) / np.abs(wanted)
        assert error.max() <= scale * np.finfo(dtype).eps, (name, error.max() / np.finfo(dtype).eps, z[error.argmax()])


def test_polynomials_of_complex_numbers() -> None:
    z, coefficients = matrices("complex64", 4).ravel(), np.array([1 - 2j, 0.5, 3j, -1 + 1j], np.complex64)
    (value,) = run(lambda z: (jnp.polyval(coefficients, z),), z)
    wide = z.astype(complex)
    scale = np.polyval(np.abs(coefficients), np.abs(wide))
    assert (np.abs(value - np.polyval(coefficients.astype(complex), wide)) <= 1e-6 * scale).all()


def test_arithmetic_of_complex_numbers_and_its_edges() -> None:
    inf, big = np.inf, 3e38
    z = np.array([1 + 2j, -3 + 0.5j, big + big * 1j, 0, complex(inf, 1), complex(-inf, 0), -4, 2j], np.complex64)
    w = np.array([2 - 1j, 0.25 + 3j, big - big * 1j, 1, 1 + 1j, 2, -2, 1j], np.complex64)
    found = run(lambda z, w: (z * w, z / w, jnp.abs(z / 4), jnp.exp(z), jnp.sqrt(z), w**3, w**-2), z[:], w)
    product, quotient, size, power, root, cube, inverse = found
    finite = np.isfinite(z)
    plain = finite & (np.abs(z.real) < 1e3)
    with np.errstate(invalid="ignore"):
        wide, other = z.astype(complex), w.astype(complex)
        np.testing.assert_allclose(product[plain], (wide * other)[plain], rtol=1e-6)
        np.testing.assert_allclose(quotient[finite], (wide / other)[finite], rtol=1e-6)  # no overflow on the way
        np.testing.assert_allclose(size, np.abs(wide / 4), rtol=1e-6)
    np.testing.assert_allclose(power[plain], np.exp(wide[plain]), rtol=1e-6)
    assert power[5] == 0
    np.testing.assert_allclose(root[plain], np.sqrt(wide[plain]), rtol=1e-6)
    np.testing.assert_allclose(cube[plain], (other**3)[plain], rtol=1e-6)
    np.testing.assert_allclose(inverse[plain], (other**-2)[plain], rtol=1e-6)


def test_functions_of_complex_numbers_at_their_edges() -> None:
    """Where a part overflows, is zero, or is almost too small; NumPy's numbers, in float64 or from symmetries."""
    inf = np.inf
    small = np.array([1.2e-38j, 3e-38, 1e-37 + 1e-37j, -2e-38, 1e-30], np.complex64)
    cut = np.array([complex(-4, -0.0), complex(-4, 0.0)], np.complex64)
    left = np.array([-129 - 0.03j, -87.5 + 1j, -1000 + 1j, complex(-inf, 2)], np.complex64)
    real = np.array([complex(inf, 0), complex(-inf, -0.0), complex(300, 0), complex(-300, -0.0)], np.complex64)

    def program(small: jax.Array, cut: jax.Array, left: jax.Array, real: jax.Array) -> Any:
        turned = lax.complex(lax.imag(real), lax.real(real))
        unknown = jnp.power(0 * small, complex(1, np.nan))
        roots = jnp.sqrt(small), lax.rsqrt(small), jnp.sqrt(cut)
        return *roots, jax.nn.sigmoid(left), jnp.sinh(real), jnp.cosh(real), jnp.sin(turned), jnp.cos(turned), unknown

    parts = jax.jit(bijax.invariant(program))(small, cut, left, real)
    root, inverse, of_cut, logistic, sinh, cosh, sin, cos, nans = map(np.asarray, parts)
    np.testing.assert_allclose(root, np.sqrt(small.astype(complex)), rtol=1e-6)
    np.testing.assert_allclose(inverse, 1 / np.sqrt(small.astype(complex)), rtol=1e-6)
    np.testing.assert_array_equal(of_cut.imag, [-2, 2])
    np.testing.assert_allclose(logistic, [0, np.exp(np.complex128(-87.5 + 1j)), 0, 0], rtol=2e-6, atol=1e-38)
    for found, wanted in ((sinh, [inf, -inf, inf, -inf]), (cosh, [inf] * 4)):
        np.testing.assert_array_equal(found, np.array(wanted) + 0j)
    assert np.isinf(sin.imag).all()
    assert not sin.real.any()
    np.testing.assert_array_equal(cos.real, [inf] * 4)
    assert not cos.imag.any()
    assert np.isnan(nans).all()


@pytest.mark.tier("full")
def test_incomplete_beta_function() -> None:
    x = np.linspace(0.01, 0.99, 50).astype(np.float32)
    wide = x.astype(np.float64)
    found = run(lambda x: jax.scipy.special.betainc(2.0, 3.0, x), x)
    assert_close(found, 6 * wide**2 - 8 * wide**3 + 3 * wide**4, "float32", 40)


def test_products_of_integers_and_floats() -> None:
    weights = np.linspace(0.01, 0.99, 12).astype(np.float32)
    numbers = (np.arange(-24, 24).reshape(4, 12) * 5).astype(np.int8)
    found = run(lambda numbers, weights: lax.dot(numbers, weights), numbers, weights)
    assert_close(found, numbers.astype(np.float64) @ weights.astype(np.float64), "float32", 16)

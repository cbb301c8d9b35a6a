"""Programs are lowered for GPUs, and have one fingerprint, whatever the number of rows and of dimensions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels import packages

ROWS = (1, 2, 9, 64, 65, 1000)
TARGETS = ("sm_90", "sm_80")
DTYPES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"))


def shaped(*shape: int, dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def to_real(x: jax.Array) -> Any:
    return x.astype(jnp.float32), x.astype(jnp.int32), jnp.mean(x.astype(jnp.float16), -1)


def real_product(x: jax.Array) -> jax.Array:
    return lax.dot_general(x, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def lowered(function: Callable[..., Any], *arrays: jax.ShapeDtypeStruct, target: str = "sm_90") -> str:
    with bijax.lowering_for(target):
        program = jax.jit(bijax.invariant(function)).trace(*arrays)
        return str(program.lower(lowering_platforms=("cuda",)).as_text())


def fingerprints(function: Callable[..., Any], arrays: Callable[[int], Any], target: str) -> set[tuple[str, ...]]:
    found = (bijax.contracts(function, *arrays(n), platform="cuda", architecture=target) for n in ROWS)
    return {manifest.terms for manifest in found}


def weight_gradient(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.grad(lambda w: jnp.sum(jnp.square((x @ w).astype(jnp.float32))))(w)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtypes", DTYPES)
def test_a_gradient_of_weights_has_one_contract(dtypes: tuple[str, str], target: str) -> None:
    def arrays(rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return shaped(96, 40, dtype=dtypes[1]), shaped(rows, 96, dtype=dtypes[0])

    assert len(fingerprints(bijax.invariant(weight_gradient), arrays, target)) == 1


@pytest.mark.parametrize(("dtypes", "kernels"), list(zip(DTYPES, (2, 1, 2), strict=True)))
def test_sums_of_limbs_over_one_row_are_computed_by_the_kernel(dtypes: tuple[str, str], kernels: int) -> None:
    """They are not the rounded product, and a batch that is cut after 128 rows may end in one row."""
    text = lowered(weight_gradient, shaped(96, 40, dtype=dtypes[1]), shaped(1, 96, dtype=dtypes[0]))
    assert text.count("custom_call @mosaic_gpu") == kernels  # the product, and its sum over the row


def test_the_sum_over_one_row_is_the_last_one_of_a_batch() -> None:
    rng = np.random.default_rng(0)
    x, g = rng.standard_normal((129, 24), np.float32), rng.standard_normal((129, 40), np.float32)

    @jax.jit
    @bijax.invariant
    def total(x: jax.Array, g: jax.Array) -> jax.Array:
        return lax.dot_general(x, g, (((0,), (0,)), ((), ())))

    assert_bits_equal(total(x, g), np.asarray(total(x[:128], g[:128])) + np.asarray(total(x[128:], g[128:])))


@pytest.mark.parametrize("target", TARGETS)
def test_rows_that_are_quantised_before_or_after_they_are_picked_have_one_fingerprint(target: str) -> None:
    def scattered(x: jax.Array, experts: jax.Array) -> Any:
        return bijax.moe_scatter_dynamic_quant(x, experts, expert_end_idx=8)

    def arrays(rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return shaped(rows, 96, dtype="bfloat16"), shaped(rows, 2, dtype="int32")

    (terms,) = fingerprints(scattered, arrays, target)
    assert "quantize/v1/f32-int8 bfloat16 -> int8,float32" in terms


VECTORS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "vector @ matrix": (jnp.matmul, ((64,), (64, 32))),
    "vector @ matrix, gradient": (jax.grad(lambda v, w: jnp.sum((v @ w).astype(jnp.float32))), ((64,), (64, 32))),
    "vector @ vector": (jnp.dot, ((64,), (64,))),
    "vector * number": (lambda v, s: jnp.tensordot(v, s, 0), ((64,), ())),
    "number * number": (lambda v, s: jnp.tensordot(v, s, 0), ((), ())),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", VECTORS)
def test_products_of_vectors_are_lowered_where_jax_triton_is_installed(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_is_installed", lambda name: True)
    function, shapes = VECTORS[name]
    assert lowered(lambda *arrays: function(*arrays), *(shaped(*shape, dtype=dtype) for shape in shapes))


MIXED = (
    ("float32", "float8_e4m3fn"),
    ("float8_e5m2", "bfloat16"),
    ("float8_e4m3fn", "float8_e5m2"),
    ("bfloat16", "int4"),
    ("uint4", "float16"),
    ("complex64", "float8_e5m2"),
)


@pytest.mark.parametrize("dtypes", MIXED)
def test_products_of_dtypes_that_jax_does_not_promote(dtypes: tuple[str, str]) -> None:
    """Plain JAX multiplies them; only sums of such dtypes have no dtype."""
    rng = np.random.default_rng(0)
    x, w = (
        jnp.asarray(rng.integers(0, 7, shape), dtype) for shape, dtype in zip(((3, 8), (8, 5)), dtypes, strict=True)
    )

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())))

    expected = jax.eval_shape(product, x, w)
    for target in TARGETS:
        assert lowered(product, like(x), like(w), target=target)
    result = jax.jit(bijax.invariant(product))(x, w)
    wide = np.complex64 if "complex64" in dtypes else np.float32
    exact = jnp.asarray(np.asarray(x.astype(wide)) @ np.asarray(w.astype(wide))).astype(expected.dtype)
    assert result.dtype == expected.dtype
    assert_bits_equal(jnp.real(result), jnp.real(exact))
    assert_bits_equal(jnp.imag(result), jnp.imag(exact))


@pytest.mark.parametrize("function", [to_real, real_product])
def test_the_real_part_of_complex_numbers(function: Callable[..., Any]) -> None:
    """A conversion to a dtype without imaginary parts, and a product with such a result, have that of plain JAX."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-9, 9, (3, 8)) + 1j * rng.integers(-9, 9, (3, 8)), jnp.complex64)
    for target in TARGETS:
        assert lowered(lambda x: function(x), like(x), target=target)
    found, expected = (jax.tree.leaves(jax.jit(f)(x)) for f in (bijax.invariant(function), function))
    for a, b in zip(found, expected, strict=True):
        assert_bits_equal(a, b)

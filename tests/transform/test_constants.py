"""Programs that compute with constants alone, some of them with subnormal numbers, on a CPU."""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.testing import assert_bits_equal
from tests.arrays import on_device
from tests.tiers import tiered

Program = Callable[[jax.Array], jax.Array]

WIDTH: Final = 13
SMALL: Final = np.float32([2.3e-39] * 3 + [1e-38] + [-7e-40] * 9)
OTHER: Final = (np.linspace(1, 3, WIDTH) * 0.9e-38).astype(np.float32)
PRODUCT_IS_SMALL: Final = np.full(WIDTH, 1e-20, np.float32)


def rows(constant: Any, x: jax.Array) -> jax.Array:
    """The constant for each row: for one row XLA repeats nothing."""
    return jnp.broadcast_to(jnp.asarray(constant), x.shape)


@jax.jit
def twice(x: jax.Array) -> jax.Array:
    return 2 * x


@jax.custom_jvp
def tripled(x: jax.Array) -> jax.Array:
    return 3 * x


tripled.defjvp(lambda x, t: (tripled(x[0]), 3 * t[0]))

PROGRAMS: Final[dict[str, Program]] = {
    "sum": lambda x: rows(SMALL, x) + jnp.float32(1e-39),
    "sum in bfloat16": lambda x: jnp.full_like(x, 1e-39, jnp.bfloat16) + jnp.bfloat16(1e-39),
    "sum in float64": lambda x: rows(np.full(WIDTH, 1e-310), x) + np.float64(1e-310),
    "difference of usual numbers": lambda x: rows(OTHER, x) - np.float32(1.5e-38),
    "product of usual numbers": lambda x: rows(PRODUCT_IS_SMALL, x) * rows(PRODUCT_IS_SMALL, x),
    "product of scalars": lambda x: x + jnp.float32(1e-20) * jnp.full((), 1e-20, jnp.float32) * 1e38,
    "quotient": lambda x: rows(OTHER, x) / 7,
    "square root": lambda x: jnp.sqrt(rows(SMALL, x)),
    "comparison": lambda x: jnp.where(rows(SMALL, x) > 0, 1.0, 2.0),
    "maximum": lambda x: jnp.maximum(rows(SMALL, x), 0.0),
    "order": lambda x: jnp.sort(rows(SMALL, x), axis=-1),
    "exponential": lambda x: jnp.exp(rows(SMALL, x) * 1e38),
    "logarithm": lambda x: jnp.log(jnp.abs(rows(SMALL, x))),
    "sum over columns": lambda x: jnp.sum(rows(SMALL, x), axis=-1),
    "product of matrices": lambda x: rows(SMALL, x) @ jnp.ones((WIDTH, 3)),
    "chosen": lambda x: jnp.where(x > 0, rows(SMALL, x), rows(OTHER, x)) + jnp.float32(1e-39),
    "bfloat16 of float32": lambda x: rows(SMALL, x).astype(jnp.bfloat16),
    "float32 of float64": lambda x: rows(np.full(WIDTH, 2.3e-39), x).astype(jnp.float32) * 3,
    "complex": lambda x: jnp.abs(lax.complex(rows(SMALL, x), rows(SMALL, x))),
    "in a function": lambda x: twice(rows(SMALL, x)),
    "of a function": lambda x: rows(twice(jnp.float32(0.4e-38)), x) * 0.5,
    "in a rule": lambda x: tripled(rows(SMALL, x)),
    "in a loop": lambda x: lax.scan(lambda c, _: (c * 0.5, None), rows(OTHER, x), None, length=2)[0],
    "in a branch": lambda x: lax.cond(x[0, 0] > 9, lambda c: c, lambda c: c * 0.5, rows(OTHER, x)),
    "in a loop that ends when it likes": lambda x: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] * 0.5), (0, rows(OTHER, x))
    )[1],
}
# What XLA, or LLVM in the loop below, computes in another way at compile time than at run time.
FOLDED: Final[dict[str, Program]] = {
    "test for zero": lambda x: rows(SMALL, x).astype(bool),
    "test for zero of chosen numbers": lambda x: jnp.where(x > -9, SMALL, 0).astype(bool),
    "any": lambda x: jnp.any(jnp.where(x > -9, SMALL, 0), axis=-1),
    "bfloat16 of integers": lambda x: rows(np.arange(WIDTH) + (2**24 + 2**16 + 1), x).astype(jnp.bfloat16),
    "places": lambda x: rows(np.float32(1), x) * jnp.arange(WIDTH) * np.float32(1e-39),
    "order with places": lambda x: rows(jnp.argsort(jnp.asarray(OTHER * np.float32([0.1, -0.1] * 6 + [1]))), x),
    "bits": lambda x: lax.bitcast_convert_type(rows(np.arange(WIDTH) * 2**12, x), jnp.float32) + SMALL,
    "reduced precision": lambda x: lax.reduce_precision(rows(np.float16([3e-5, 6e-8] * 6 + [1]), x), 5, 2),
    "sign": lambda x: jnp.sign(jnp.where(x > -9, SMALL, 0)),
    "sum of chosen numbers": lambda x: jnp.where(x > -9, SMALL, 0) + np.float32(1e-39),
}
PROGRAMS |= FOLDED
FEW: Final = (
    "sum in bfloat16",
    "product of usual numbers",
    "in a function",
    "bfloat16 of float32",
    "in a loop",
    *FOLDED,
)


@pytest.mark.parametrize("name", tiered(PROGRAMS, fast=FEW))
def test_a_constant_row_is_the_same_for_one_and_for_several(name: str) -> None:
    with jax.enable_x64(name.endswith("float64")):
        program = bijax.invariant(PROGRAMS[name])
        x = on_device(np.random.default_rng(0).standard_normal((8, WIDTH)).astype(np.float32))
        alone = np.asarray(jax.jit(program)(x[:1]))
        for count in (3, 8):
            assert_bits_equal(np.asarray(jax.jit(program)(x[:count]))[:1], alone, err_msg=str(count))
        assert_bits_equal(np.asarray(program(x[:3]))[:1], alone, err_msg="operation by operation")
        assert_bits_equal(np.asarray(jax.jit(jax.vmap(lambda x: program(x[None])[0]))(x))[:1], alone, err_msg="mapped")
        looped = jax.jit(lambda x: lax.map(lambda row: program(row[None])[0], x))
        assert_bits_equal(np.asarray(looped(x))[:1], alone, err_msg="in a loop of plain JAX")


def test_plain_jax_keeps_subnormal_numbers_of_one_row() -> None:
    """The control."""
    program = jax.jit(PROGRAMS["sum in bfloat16"])
    one, several = (np.asarray(program(jnp.zeros((n, WIDTH), jnp.float32))) for n in (1, 3))
    assert (one[0] != several[0]).any()


def test_usual_constants_are_left_to_xla() -> None:
    def program(x: jax.Array) -> jax.Array:
        return x + rows(np.float32(np.arange(WIDTH)), x) * 0.125

    def small(x: jax.Array) -> jax.Array:
        return x + rows(PRODUCT_IS_SMALL, x) * 0.125

    x = jax.ShapeDtypeStruct((3, WIDTH), jnp.float32)
    fences = [jax.jit(bijax.invariant(f)).lower(x).as_text().count("stablehlo.or ") for f in (program, small)]
    # One is that of the product; one more hides constants that are added with JAX 0.11.
    more = jax.__version_info__ < (0, 12)
    assert fences == [1 + more, 2 + more]


ZERO: Final = on_device(np.zeros(4, np.float32))
ADDED: Final[dict[str, Program]] = {
    "number": lambda x: x + 0.0,
    "array": lambda x: ZERO + x,
    "part of an array": lambda x: x + jnp.arange(8.0)[:1],
    "mask": lambda x: x + jnp.where(jnp.arange(4) > 9, -1e9, 0.0),
    "in bfloat16": lambda x: (x.astype(jnp.bfloat16) + 0).astype(jnp.float32),
    "complex": lambda x: jnp.imag(lax.complex(x, x) + 0),
    "carried by a loop": lambda x: lax.scan(lambda c, _: (c + x, None), jnp.zeros_like(x), None, length=1)[0],
    "in a function": lambda x: jax.jit(lambda x, y: x + y)(x, jnp.zeros(4)),
}


@pytest.mark.tier("fault")
@pytest.mark.parametrize("name", ADDED)
def test_a_zero_is_added(name: str) -> None:
    """-0 + 0 is 0, also where the second zero is a constant, and where a loop over rows or time runs once."""
    program = bijax.invariant(ADDED[name])
    x = on_device(np.float32([[-0.0, 0.0, 1.5, -2.0]] * 3))
    expected = np.float32([[0.0, 0.0, 1.5, -2.0]] * 3)
    assert_bits_equal(jax.jit(program)(x), expected)
    assert_bits_equal(program(x), expected, err_msg="operation by operation")
    assert_bits_equal(jax.jit(program)(x[:1]), expected[:1], err_msg="one row")
    assert_bits_equal(jax.jit(lambda: program(x))(), expected, err_msg="constant rows")
    assert_bits_equal(jax.jit(lambda x: lax.map(program, x))(x), expected, err_msg="in a loop of plain JAX")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA:CPU")
def test_xla_leaves_out_the_addition_of_a_constant_zero() -> None:
    """The control."""
    x = on_device(np.float32([-0.0]))
    assert np.signbit(jax.jit(lambda x: x + ZERO[:1])(x)).all()
    assert not np.signbit(jax.jit(lambda x, y: x + y)(x, ZERO[:1])).any()

"""Results are rounded whatever uses them: XLA:CPU leaves out roundings to 16 bits, and squares of square roots."""

from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.testing import assert_bits_equal

Function = Callable[[jax.Array], jax.Array]

SHAPE: Final = (16, 300)
OPERATIONS: Final[dict[str, Callable[..., jax.Array]]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "rem": lax.rem,
    "sqrt": lambda x, y: jnp.sqrt(abs(x)),
}


def less(x: jax.Array) -> jax.Array:
    return x - x.max(-1, keepdims=True)


FORMS: Final[dict[str, Function]] = {
    "transposed": lambda x: jnp.exp(less(x).T).T,
    "flat": lambda x: jnp.exp(less(x).reshape(-1)).reshape(x.shape),
    "columns apart": lambda x: jnp.concatenate([jnp.exp(less(x)[:, :7]), jnp.exp(less(x)[:, 7:])], 1),
    "checkpoint": lambda x: jnp.exp(jax.checkpoint(less)(x)),
    "a branch": lambda x: jnp.exp(lax.cond(x[0, 0] > -100, less, lambda x: x, x)),
    "chosen": lambda x: jnp.exp(jnp.where(x > -100, less(x), 0)),
    "picked": lambda x: jnp.exp(jnp.take(less(x), jnp.arange(x.shape[1]), axis=1)),
    "carried by a scan": lambda x: lax.scan(lambda c, r: (less(r), jnp.exp(c)), less(x[0]), jnp.roll(x, -1, 0))[1],
    "one row at a time": lambda x: lax.map(lambda r: jnp.exp(less(r)), x),
    "vmap": jax.vmap(lambda r: jnp.exp(less(r))),
}


def numbers(dtype: str, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(SHAPE) * 3, dtype)


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_a_program_changes_no_bit(form: str) -> None:
    x = numbers("bfloat16")
    whole = jax.jit(bijax.invariant(lambda x: jnp.exp(less(x))))(x)
    assert_bits_equal(jax.jit(bijax.invariant(FORMS[form]))(x), whole)
    assert_bits_equal(bijax.invariant(FORMS[form])(x), whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_conversion_gets_the_rounded_number(name: str, dtype: str) -> None:
    x, y = numbers(dtype), numbers(dtype, 1)

    def program(x: jax.Array, y: jax.Array) -> jax.Array:
        return OPERATIONS[name](x, y).astype(jnp.float32)

    exact = {"add": np.add, "sub": np.subtract, "rem": np.fmod, "sqrt": lambda x, y: np.sqrt(abs(x))}[name]
    expected = exact(np.asarray(x, np.float64), np.asarray(y, np.float64)).astype(x.dtype).astype(np.float32)
    assert_bits_equal(jax.jit(bijax.invariant(program))(x, y), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_square_of_a_root_is_a_product_of_roots(dtype: str) -> None:
    x = numbers(dtype)
    root = jax.jit(bijax.invariant(lambda x: jnp.sqrt(abs(x))))(x)
    expected = jax.jit(bijax.invariant(lambda r: r * r))(root)
    for program in (lambda x: jnp.sqrt(abs(x)) ** 2, lambda x: jnp.sqrt(abs(x)) * jnp.sqrt(abs(x))):
        assert_bits_equal(jax.jit(bijax.invariant(program))(x), expected)
        assert_bits_equal(bijax.invariant(program)(x), expected)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA:CPU")
def test_xla_makes_its_argument_of_the_square_of_a_root() -> None:
    """The control."""

    def square(root: jax.Array) -> jax.Array:
        return root * root

    x = numbers("float32")
    assert (jax.jit(lambda x: square(jnp.sqrt(abs(x))))(x) == abs(x)).all()
    assert (square(jnp.sqrt(abs(x))) != abs(x)).sum() > x.size // 4


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA:CPU")
def test_xla_leaves_roundings_out() -> None:
    """The control: without bijax, a conversion gets the sum before it is rounded."""
    x, y = numbers("bfloat16"), numbers("bfloat16", 1)
    found = jax.jit(lambda x, y: (x + y).astype(jnp.float32))(x, y)
    assert (np.asarray(found) != np.asarray(x + y, np.float32)).sum() > x.size // 4

"""Sums and maxima under `bijax.invariant` on a GPU, where XLA compiles them together with what they are taken of."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.testing import assert_bits_equal

pytestmark = pytest.mark.gpu

Program = Callable[[jax.Array], tuple[jax.Array, ...]]

BEFORE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "exp": lambda x: jnp.exp(x - 1.5),
    "tanh": lambda x: jnp.tanh(x * 0.7) * x,
    "product": lambda x: x * x + x * 3.1,
    "division": lambda x: x / (jnp.abs(x) + 0.3),
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x) + 0.1),
    "transposed": lambda x: jnp.exp(x).swapaxes(1, 2).swapaxes(0, 1).swapaxes(0, 1).swapaxes(1, 2) * x,
}
ROWS = 33


def with_others(before: Callable[[jax.Array], jax.Array]) -> Program:
    """What is reduced, its maximum and its sum, over columns and over rows of each entry, and a softmax of it."""

    def program(x: jax.Array) -> tuple[jax.Array, ...]:
        y = before(x)
        most, total = y.max(-1), y.sum(-1)
        return y, most, total, y.sum(1), y.max((1, 2)), jax.nn.softmax(y), (y == most[..., None]).any(-1)

    return program


@pytest.mark.parametrize("columns", [77, 2048, 25000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", BEFORE)
def test_entries_keep_their_bits(name: str, dtype: str, columns: int) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, 5, columns)), dtype)
    program = jax.jit(bijax.invariant(with_others(BEFORE[name])))
    whole = program(x)
    assert np.asarray(whole[-1]).all()  # the maximum is one of the elements
    for size in (1, 2, 8):
        assert_bits_equal(program(x[3 : 3 + size]), tuple(a[3 : 3 + size] for a in whole))
    # Alone, a reduction has the bits that it has among others.
    for i, alone in ((1, lambda y: y.max(-1)), (2, lambda y: y.sum(-1)), (3, lambda y: y.sum(1))):
        assert_bits_equal(jax.jit(bijax.invariant(lambda x, alone=alone: alone(BEFORE[name](x))))(x), whole[i])


def test_sums_are_those_of_the_cpu() -> None:
    """Additions alone, in the order of one contract."""
    x = np.random.default_rng(1).standard_normal((7, 3, 2500)).astype(np.float32)

    def program(x: jax.Array) -> tuple[jax.Array, ...]:
        return x.sum(-1), x.sum((0, 2)), x.sum(0), x.max(1), x.min((0, 1))

    found = jax.jit(bijax.invariant(program))(x)
    with jax.default_device(jax.devices("cpu")[0]):
        assert_bits_equal(found, jax.jit(bijax.invariant(program))(x))


def test_plain_sums_differ() -> None:
    """The control: some rows in smaller company, of lengths for which XLA may choose something else when it tunes."""
    program, differ = jax.jit(lambda x: (x.sum(-1), jnp.exp(x).sum(-1), jax.nn.softmax(x))), []
    for columns in (384, 2048, 8192, 65536):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, columns)), jnp.float32)
        whole = program(x)
        for size in (1, 2, 8):
            found = zip(whole, program(x[3 : 3 + size]), strict=True)
            differ.append(any((np.asarray(a[3 : 3 + size]) != np.asarray(b)).any() for a, b in found))
    assert any(differ)

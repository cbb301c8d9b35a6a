"""Quotients, products, sums and choices of values that XLA's simplifier knows something about.

Its rules look at whether operands are equal, broadcast, constant, zero or one, and a broadcast to one row is none. Each
operation, and each pair of operations of which the simplifier makes another, is given operands of all these kinds.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing._bits import unequal_bits

Array = jax.Array
Numbers = dict[str, Array]

WIDTH: Final = 6
SIZES: Final = (1, 2, 8, 33)

OPERANDS: Final[dict[str, Callable[[Array, Array, Array], Array]]] = {
    "row": lambda x, w, s: x,
    "shared": lambda x, w, s: jnp.broadcast_to(w, x.shape),
    "one number": lambda x, w, s: jnp.broadcast_to(s, x.shape),
    "of a row": lambda x, w, s: jnp.broadcast_to(x[:, :1], x.shape),
    "constant": lambda x, w, s: jnp.full_like(x, 49.0),
    "constants": lambda x, w, s: jnp.broadcast_to(jnp.asarray(np.linspace(0.3, 7, WIDTH), x.dtype), x.shape),
    "zero": lambda x, w, s: jnp.zeros_like(x),
    "chosen of equals": lambda x, w, s: jnp.where(x > 0, w, w),
}
PAIRS: Final[dict[str, Callable[[Array, Array, Array], Array]]] = {
    "x / (a / b)": lambda x, a, b: x / (a / b),
    "a / b / x": lambda x, a, b: a / b / x,
    "a / b / b": lambda x, a, b: a / b / b,
    "(x / a) / (b / x)": lambda x, a, b: (x / a) / (b / x),
    "a / sqrt(b)": lambda x, a, b: a / jnp.sqrt(jnp.abs(b)),
    "a / rsqrt(b)": lambda x, a, b: a / jax.lax.rsqrt(jnp.abs(b)),
    "a / pow(b, 2.5)": lambda x, a, b: a / jnp.power(jnp.abs(b), 2.5),
    "a / exp(b)": lambda x, a, b: jnp.exp(a) / jnp.exp(b / 64),
    "a * b + x": lambda x, a, b: a * b + x,
    "x * a + x * b": lambda x, a, b: x * a + x * b,
    "(x + a) + b": lambda x, a, b: (x + a) + b,
    "(a - x) + b": lambda x, a, b: (a - x) + b,
    "a - (b - a)": lambda x, a, b: a - (b - a),
    "where(x, a / b, a * b)": lambda x, a, b: jnp.where(x > 0, a / b, a * b),
    "bfloat16(a / b)": lambda x, a, b: (a / b).astype(jnp.bfloat16).astype(a.dtype) / b,
    "bool / b": lambda x, a, b: (x > a).astype(a.dtype) / b,
    "mean(a / b)": lambda x, a, b: x * (a / b).mean(-1, keepdims=True),
}
FEW: Final = ("shared", "constant", "one number", "chosen of equals")
SHARED, CONSTANT, NUMBER, CHOSEN = FEW
DIFFER: Final[dict[str, list[tuple[str, str]]]] = {
    "x / (a / b)": [(CONSTANT, SHARED), (NUMBER, SHARED), (SHARED, CONSTANT), (SHARED, NUMBER), (SHARED, SHARED)],
    "a / b / x": [(CONSTANT, SHARED), (NUMBER, SHARED), (SHARED, NUMBER), (SHARED, SHARED)],
    "a / b / b": [(CHOSEN, SHARED)],
    "(x / a) / (b / x)": [(SHARED, CONSTANT), (SHARED, SHARED)],
    "a / sqrt(b)": [(CONSTANT, CHOSEN), (NUMBER, CHOSEN)],
    "a / exp(b)": [(CHOSEN, SHARED), (CONSTANT, SHARED), (NUMBER, SHARED), (SHARED, SHARED)],
    "a * b + x": [(CHOSEN, NUMBER), (NUMBER, CHOSEN), (NUMBER, SHARED), (SHARED, NUMBER)],
    "x * a + x * b": [(CONSTANT, SHARED), (SHARED, CONSTANT)],
}
"""Operands a and b with which plain JAX's rows depend on the batch, of `FEW` and `FEW_SIZES`: found by the control."""
FEW_SIZES: Final = (1, SIZES[-1])


def programs(kinds: tuple[str, ...]) -> dict[str, Callable[[Array, Array, Array], Array]]:
    """Returns each pair of operations with operands of each two kinds; of the few, those that matter."""

    def of(pair: str, first: str, second: str) -> Callable[[Array, Array, Array], Array]:
        return lambda x, w, s: PAIRS[pair](x, OPERANDS[first](x, w, s), OPERANDS[second](x, w, s))

    if kinds == FEW:
        cases = [(pair, *case) for pair, found in DIFFER.items() for case in found]
    else:
        cases = list(itertools.product(PAIRS, kinds, kinds))
    return {f"{pair} with a {first}, b {second}": of(pair, first, second) for pair, first, second in cases}


def results(x: Array, w: Array, s: Array, kinds: tuple[str, ...]) -> Numbers:
    return {name: program(x, w, s) for name, program in programs(kinds).items()}


def inputs(dtype: Any) -> tuple[Array, Array, Array]:
    draw = np.random.default_rng(3)
    x, w = draw.standard_normal((SIZES[-1], WIDTH)), [1.1, 3.3, 4.7, 5.9, 41.0, 49.0]
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(10.7, dtype)


def differing(program: Callable[..., Numbers], dtype: Any, sizes: Sequence[int] = SIZES) -> list[str]:
    """Returns which results differ at some size of the batch from those in the largest."""
    x, w, s = inputs(dtype)
    compiled = jax.jit(program)
    whole = {name: np.asarray(rows) for name, rows in compiled(x, w, s).items()}
    found = set()
    for size in sizes[:-1]:
        for name, rows in compiled(x[:size], w, s).items():
            if unequal_bits(np.asarray(rows), whole[name][:size], nan_bits=False).any():
                found.add(name)
    return sorted(found)


@pytest.mark.tier("full", fault=("few",))
@pytest.mark.parametrize(
    ("dtype", "kinds"),
    [
        ("float32", FEW),
        ("float32", tuple(OPERANDS)),
        ("float64", tuple(OPERANDS)),
        ("bfloat16", tuple(OPERANDS)),
    ],
    ids=["few", "float32", "float64", "bfloat16"],
)
def test_rows_do_not_depend_on_what_is_known_of_operands(dtype: str, kinds: tuple[str, ...]) -> None:
    with jax.enable_x64(dtype == "float64"):
        sizes = FEW_SIZES if kinds == FEW else SIZES
        assert not differing(bijax.invariant(lambda x, w, s: results(x, w, s, kinds)), dtype, sizes)


def test_plain_jax_uses_what_it_knows_of_operands() -> None:
    """The control."""
    found = differing(lambda x, w, s: results(x, w, s, FEW), "float32", FEW_SIZES)
    assert len(found) > len(programs(FEW)) / 2


@pytest.mark.tier("full", fault=("few",))
@pytest.mark.parametrize("kinds", [FEW[:2], tuple(OPERANDS)], ids=["few", "every"])
def test_gradients_of_shared_values(kinds: tuple[str, ...]) -> None:
    sizes = FEW_SIZES if kinds == FEW[:2] else SIZES

    def program(x: Array, w: Array, s: Array) -> Numbers:
        return {name: jax.grad(lambda x, one=one: one(x, w, s).sum())(x) for name, one in programs(kinds).items()}

    assert not differing(bijax.invariant(program), "float32", sizes)


def test_constants_that_are_added() -> None:
    """Up to JAX 0.11, XLA adds two constants first where they are repeated for one row, through calls and reshapes."""
    first, second = (np.linspace(0.3, end, WIDTH, dtype=np.float32) for end in (7.0, 3.1))
    add = jax.jit(lambda x, constant: x + constant)

    def program(x: Array, w: Array, s: Array) -> Numbers:
        return {
            "in turn": (x + first) + second,
            "differences": (first - x) - second,
            "a call": add(x + first, second),
            "reshaped": ((x + first).reshape(-1, 2, 3) + second.reshape(2, 3)).reshape(-1, WIDTH),
            "a loop": jax.lax.fori_loop(0, 3, lambda _, c: (c + first) + second, x),
        }

    assert not differing(bijax.invariant(program), "float32", FEW_SIZES)
    assert jax.__version_info__ >= (0, 12) or "in turn" in differing(program, "float32", FEW_SIZES)

"""Subnormal numbers, ±0, ±inf and nans keep their bits (a nan: that it is one) wherever they stand in a batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.transform.rules._elementwise import CHOOSING, FENCED, ROUNDED
from bijax.transform.rules._kept import EXACT, KEEP, ORDER_FREE
from bijax.transform.rules._ordered import RACING
from tests.transform.special_values import DTYPES, ELEMENTWISE, ROWS, bits_without_nans, special_values

Shapes = tuple[tuple[int, ...], ...]
Batches = tuple[tuple[int, int], ...]

SHAPES: Shapes = ((1,), (33,))
MORE_SHAPES: Shapes = ((4, 2), (3,), (17,))
ALL = 34
BATCHES: Batches = ((0, 1), (5, 6), (3, 7), (17, 34))
MORE_BATCHES: Batches = ((0, 2), (0, 8), (1, 17))

Programs = dict[str, Callable[..., jax.Array]]

NOT_FLOATING = set(
    "and clz complex conj from_edtype imag mulhi not or population_count real reduce_and reduce_or reduce_xor"
    " shift_left shift_right_arithmetic shift_right_logical to_edtype xor".split()
)
OF_DEVICES = {"pmax", "pmin"}
OF_DERIVATIVES = {"add_any", "one_minus_square"}  # an addition; a square and a difference
OF_COMPARATORS = {"eq_to", "le_to", "lt_to"}  # where `sort` puts them, in its lowering


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def all_of(programs: Programs) -> Callable[..., dict[str, jax.Array]]:
    return lambda *args: {name: program(*args) for name, program in programs.items()}


def every(step: int, programs: Programs) -> Programs:
    """Returns each program whose place in the alphabet is a multiple of the step."""
    return {name: programs[name] for name in sorted(programs)[::step]}


def differing_elements(programs: Programs, dtype: str, shapes: Shapes = SHAPES) -> set[str]:
    """Returns the element-wise programs of which one element of a small array is not that of a large one."""
    values = special_values(dtype)
    first, second = (index.ravel() for index in np.indices((len(values), len(values))))
    run = jax.jit(all_of(programs))
    expected = {name: bits_without_nans(r) for name, r in run(values[first], values[second]).items()}
    rng, found = np.random.default_rng(0), set()
    for shape in shapes:
        for _ in range(1 + 300 // np.prod(shape)):
            chosen = rng.integers(len(first), size=shape)
            for name, result in run(values[first[chosen]], values[second[chosen]]).items():
                if (bits_without_nans(result) != expected[name][chosen]).any():
                    found.add(name)
    return found


def differing_rows(programs: Programs, dtype: str, batches: Batches, columns: int) -> set[str]:
    """Returns the programs of which a row of a small batch is not that of a large one."""
    values = special_values(dtype)
    x = values[np.random.default_rng(columns).integers(len(values), size=(ALL, columns))]
    run = jax.jit(jax.vmap(all_of(programs)))
    expected = {name: bits_without_nans(r) for name, r in run(x).items()}
    return {
        name
        for start, end in batches
        for name, result in run(x[start:end]).items()
        if (bits_without_nans(result) != expected[name][start:end]).any()
    }


def invariant(programs: Programs) -> Programs:
    return {name: bijax.invariant(program) for name, program in programs.items()}


@pytest.mark.tier("full")
@pytest.mark.parametrize("shapes", [SHAPES, MORE_SHAPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [3, 1])
def test_elements(step: int, dtype: str, shapes: Shapes) -> None:
    assert not differing_elements(invariant(every(step, ELEMENTWISE)), dtype, shapes)


@pytest.mark.tier("full", fast=("2-float64-((0, 1), (5, 6), (3, 7), (17, 34))",))
@pytest.mark.parametrize("batches", [BATCHES, MORE_BATCHES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [2, 1])
def test_rows(step: int, dtype: str, batches: Batches) -> None:
    assert not differing_rows(invariant(every(step, ROWS)), dtype, batches, 2)


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", ["max", "min", "relu", "clip", "clamp", "convert and back", "sub"])
def test_alone_in_a_program(name: str) -> None:
    for dtype in ("bfloat16", "float16"):
        assert not differing_elements(invariant({name: ELEMENTWISE[name]}), dtype)


def mirrored(x: jax.Array) -> jax.Array:
    """The maximum of a number and of itself, where there is one row."""
    return lax.max(x, lax.rev(x, (0,)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_subnormal_numbers_compare_as_zeros(dtype: str) -> None:
    """As in plain JAX. After a maximum of integers LLVM compared bits: hypot of bfloat16 depended on the shape."""
    with jax.enable_x64(dtype == "float64"):
        x = np.full(33, special_values(dtype)[2])
        for rows in (1, 2, 33):
            found = jax.jit(bijax.invariant(lambda x: jnp.maximum(jnp.abs(x), jnp.abs(x[::-1])) == 0))(x[:rows])
            assert found.all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_maximum_keeps_subnormal_numbers(dtype: str) -> None:
    x = np.full((3, 1), special_values(dtype)[2])
    for rows in (1, 2, 3):
        kept = jax.jit(bijax.invariant(mirrored))(x[:rows])
        assert (bits_without_nans(kept) == bits_without_nans(x[:rows])).all()


def test_control_plain_jax_keeps_them_or_not() -> None:
    x = np.full((2, 1), special_values("float32")[2])
    alone, together = (bits_without_nans(jax.jit(mirrored)(x[:rows])) for rows in (1, 2))
    assert alone[0] != together[0]


def names(programs: Programs, *args: Any) -> set[str]:
    found = set()

    def walk(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            found.add(equation.primitive.name)
            for value in jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    walk(getattr(value, "jaxpr", value))

    walk(jax.make_jaxpr(all_of(programs))(*args).jaxpr)
    return found


def test_every_primitive_that_computes_or_chooses_is_here() -> None:
    x = special_values("float32")
    seen = names(ELEMENTWISE, x, x) | names(ROWS, x)
    kept = {*KEEP[EXACT].split(), *KEEP[ORDER_FREE].split()}
    known = kept | {*CHOOSING, *FENCED, *RACING, *ROUNDED, "sort"}
    elsewhere = NOT_FLOATING | OF_DEVICES | OF_DERIVATIVES | OF_COMPARATORS
    assert not known - seen - elsewhere
    assert not seen & elsewhere & (OF_DEVICES | OF_DERIVATIVES)

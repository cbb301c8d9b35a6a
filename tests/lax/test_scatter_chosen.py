"""Scatters that choose: what a GPU computes all at once has the bits of XLA:CPU, which takes the updates in order."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import bijax
from bijax.lax import scatter_chosen
from bijax.testing import assert_bits_equal
from pallas_kernels.errors import UnsupportedError
from tests.lax.primitive_cases import substitute
from tests.lax.scatter_cases import CASES, HOW, PARTS, RULES, bits, check_bits, operands, values

pytestmark = pytest.mark.usefixtures("hopper")


@pytest.mark.tier("full", fast=("columns", "parts of rows", "a scalar"))
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_one_update_after_the_other(name: str) -> None:
    check_bits(name, lambda f: substitute(f, RULES))


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "float8_e4m3fn"])
def test_other_floats(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        for how in HOW:
            function, args = CASES["rows"][0](how), operands(CASES["rows"], 7, dtype)
            ours = jax.jit(substitute(function, RULES))(*args)
            assert ours.dtype == dtype
            assert_bits_equal(*(bits(y, how) for y in (ours, jax.jit(function)(*args))), err_msg=how)


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "complex64", "key"])
def test_whatever_is_written(dtype: str) -> None:
    def run(x: jax.Array, i: jax.Array, u: jax.Array) -> jax.Array:
        x, u = (jax.random.wrap_key_data(a) if dtype == "key" else a for a in (x, u))
        y = x.at[i].set(u)
        return jax.random.key_data(y) if dtype == "key" else y

    x, u = (jnp.arange(s, s + 2 * n).reshape(n, 2).astype("uint32" if dtype == "key" else dtype) for s, n in _SIZES)
    args = x, operands(CASES["rows"])[1], u
    assert np.array_equal(jax.jit(substitute(run, RULES))(*args), jax.jit(run)(*args))
    assert _cuda(bijax.invariant(run), *args)


_SIZES = ((0, 20), (3, 50))


def test_denormals_are_moved_and_compared() -> None:
    small = np.array([1e-40, 3e-40, 2e-40], np.float32)
    for how, winner in {"set": 2, "max": 1}.items():
        y = jax.jit(substitute(CASES["rows"][0](how), RULES))(jnp.zeros(2), jnp.array([1, 1, 1]), small)
        assert_bits_equal(np.asarray(y), np.array([0, small[winner]], np.float32))


def test_nans_have_one_payload_but_those_that_stand_still() -> None:
    x, u = (jnp.asarray(np.array(b, np.uint32).view(np.float32)) for b in ([0x7FC12345, 0xFFC00001], [0xFFC54321, 0]))
    for how in ("max", "min"):
        y = jax.jit(substitute(CASES["rows"][0](how), RULES))
        assert np.asarray(y(x, jnp.array([0, 7]), u)).view(np.uint32).tolist() == [0x7FC12345, 0xFFC00001]
        assert np.asarray(y(jnp.ones(1), jnp.array([0, 0]), u)).view(np.uint32).tolist() == [0x7FC00000]


@pytest.mark.tier("full", fast=("set", "max"))
@pytest.mark.parametrize("how", HOW)
def test_updates_for_others_do_not_matter(how: str) -> None:
    rng = np.random.default_rng(3)
    mine, ids = values(4, (40, 5)), rng.integers(0, 4, 40)
    run = jax.jit(substitute(CASES["rows"][0](how), RULES))
    alone = run(jnp.zeros((4, 5)), ids, mine)
    for others in (1, 60, 300):
        where = np.sort(rng.choice(40 + others, 40, replace=False))
        all_ids = rng.integers(4, 9, 40 + others)
        rows = np.array(values(others, (40 + others, 5)))
        all_ids[where], rows[where] = ids, mine
        assert_bits_equal(run(jnp.zeros((9, 5)), all_ids, rows)[:4], alone, err_msg=f"{how} {others}")


@pytest.mark.tier("full")
@pytest.mark.parametrize("how", HOW)
def test_gradients_follow_the_winner(how: str) -> None:
    x, i, u = operands(CASES["rows"])
    x, u = jnp.nan_to_num(x, posinf=3, neginf=-3), jnp.nan_to_num(u, posinf=3, neginf=-3)

    def gradient(x: jax.Array, u: jax.Array) -> Any:
        return jax.grad(lambda x, u: jnp.sum(jnp.sin(CASES["rows"][0](how)(x, i, u))), (0, 1))(x, u)

    for ours, stock in zip(jax.jit(substitute(gradient, RULES))(x, u), jax.jit(gradient)(x, u), strict=True):
        assert_bits_equal(ours, stock, err_msg=how)
    assert _cuda(bijax.invariant(gradient), x, u)


def test_on_a_gpu_floats_are_compared_as_integers() -> None:
    x, i, u = operands(CASES["windows"])
    for how in ("max", "min"):
        text = _cuda(bijax.invariant(CASES["windows"][0](how)), x, i, u)
        assert f"stablehlo.{how}imum %" in text
        assert not [t for t in _combined(text, f"stablehlo.{how}imum") if "f32" in t]
        whole = _cuda(bijax.invariant(CASES["windows"][0](how)), *(a.astype(jnp.int32) for a in (x, i, u)))
        assert whole.count('"stablehlo.scatter"') == 1
    # The number of each update is found first, and what is written then is agreed on.
    text = _cuda(bijax.invariant(CASES["rows"][0]("set")), *operands(CASES["rows"]))
    assert [t.split(" : ")[-1] for t in _combined(text, "stablehlo.maximum")] == ["tensor<i32>"]
    assert "tensor<20x1xi32>" in text  # a number for each row, not for each element
    assert text.count('"stablehlo.scatter"') == 2
    unique = bijax.invariant(lambda x, i, u: x.at[i].set(u, unique_indices=True))
    assert _cuda(unique, *operands(CASES["rows"])).count('"stablehlo.scatter"') == 1


def test_errors() -> None:
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((9, 2**16), "float32"), ((2**16, 1), "int32"))]
    updates = jax.ShapeDtypeStruct((2**16, 2**15), jnp.float32)
    with pytest.raises(UnsupportedError, match="expected windows of at most 2147483647 elements"):
        jax.eval_shape(lambda *a: scatter_chosen.scatter(*a, dimension_numbers=PARTS, mode="drop"), *shapes, updates)
    x = jnp.zeros(3, jnp.float8_e5m2fnuz)
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    with pytest.raises(UnsupportedError, match="maximum or minimum"):
        scatter_chosen.scatter_max(x, jnp.zeros((1, 1), jnp.int32), x[:1], dimension_numbers=numbers, mode="drop")


def _cuda(function: Callable[..., Any], *args: Any) -> str:
    return str(jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text())


def _combined(text: str, operation: str) -> list[str]:
    """Returns the lines of one operation in the bodies of scatters."""
    bodies = text.split('"stablehlo.scatter"')[1:]
    return [line for b in bodies for line in b.split("stablehlo.return")[0].splitlines() if operation in line]

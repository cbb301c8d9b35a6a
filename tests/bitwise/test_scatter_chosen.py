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
from tests.bitwise.primitive_cases import equations, substitute

pytestmark = pytest.mark.usefixtures("hopper")

RULES = {
    "scatter": scatter_chosen.scatter,
    "scatter-max": scatter_chosen.scatter_max,
    "scatter_max": scatter_chosen.scatter_max,
    "scatter-min": scatter_chosen.scatter_min,
    "scatter_min": scatter_chosen.scatter_min,
}
HOW = {"set": lax.scatter, "max": lax.scatter_max, "min": lax.scatter_min}

WINDOWS = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
PARTS = lax.ScatterDimensionNumbers((1,), (0,), (0,))
SWAPPED = lax.ScatterDimensionNumbers((0,), (1,), (1, 0))

Function = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Case = tuple[Callable[[str], Function], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def at(index: Callable[[jax.Array], Any], **options: Any) -> Callable[[str], Function]:
    return lambda how: lambda x, i, u: getattr(x.at[index(i)], how)(u, **options)


def windows(numbers: lax.ScatterDimensionNumbers, **options: Any) -> Callable[[str], Function]:
    return lambda how: lambda x, i, u: HOW[how](x, i, u, numbers, **options)


# the scatter made of "set", "max" or "min", and the shapes of operand, indices and updates
CASES: dict[str, Case] = {
    "rows": (at(lambda i: i), (20, 4), (50,), (50, 4)),
    "clipped rows": (at(lambda i: i, mode="clip", unique_indices=True), (20, 4), (50,), (50, 4)),
    "promised rows": (at(lambda i: i % 20, mode="promise_in_bounds"), (20, 4), (50,), (50, 4)),
    "elements": (at(lambda i: (i, i[::-1])), (20, 20), (90,), (90,)),
    "columns": (at(lambda i: (slice(None), i)), (5, 20, 3), (50,), (5, 50, 3)),
    "two axes of indices": (at(lambda i: i), (20, 2), (3, 9), (3, 9, 2)),
    "windows": (windows(WINDOWS), (6, 7), (9, 2), (9, 3, 2)),
    "clipped windows": (windows(WINDOWS, mode="clip"), (6, 7), (9, 2), (9, 3, 2)),
    "parts of rows": (windows(PARTS), (6, 7), (9, 1), (9, 4)),
    "axes swapped": (windows(SWAPPED), (7, 6), (9, 2), (4, 9)),
    "a scalar": (at(lambda i: ()), (), (1,), ()),
    "vmap of all": (lambda how: jax.vmap(at(lambda i: i)(how)), (3, 20, 4), (3, 50), (3, 50, 4)),
    "vmap of updates": (
        lambda how: jax.vmap(at(lambda i: i)(how), (0, None, 0)),
        (3, 20, 4),
        (50,),
        (3, 50, 4),
    ),
    "vmap of windows": (
        lambda how: jax.vmap(windows(WINDOWS)(how), (2, 1, 0)),
        (6, 7, 3),
        (9, 3, 2),
        (3, 9, 3, 2),
    ),
    "no updates": (windows(PARTS), (6, 7), (0, 1), (0, 4)),
    "nothing": (windows(PARTS), (6, 0), (9, 1), (9, 0)),
}


def values(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    """Few values, so that many are equal, with zeros of both signs, infinities and nans.

    Without denormals: those XLA:CPU takes for zeros where it compares.
    """
    choice = np.array([-0.0, 0.0, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan], np.float32)
    p = [0.2, 0.2, 0.15, 0.15, 0.12, 0.06, 0.06, 0.06]
    return jnp.asarray(np.random.default_rng(seed).choice(choice, shape, p=p)).astype(dtype)


def operands(case: Case, seed: int = 0, dtype: str = "float32") -> tuple[jax.Array, jax.Array, jax.Array]:
    _, shape, indices, updates = case
    i = np.random.default_rng(seed).integers(-3, max(shape, default=0) + 3, indices)
    return values(seed + 1, shape, dtype), jnp.asarray(i, jnp.int32), values(seed + 2, updates, dtype)


def bits(y: jax.Array, how: str) -> np.ndarray:
    """The bits, with one for all nans where they were compared: XLA:CPU may turn the sign of a nan then."""
    numbers = np.asarray(y)
    if how != "set":
        numbers = np.where(np.isnan(numbers), np.asarray(np.nan, numbers.dtype), numbers)
    return numbers.view(f"u{numbers.dtype.itemsize}")


@pytest.mark.tier("full", fast=("columns", "parts of rows", "a scalar"))
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_one_update_after_the_other(name: str) -> None:
    check_bits(name, lambda f: substitute(f, RULES))


def check_bits(name: str, replaced: Callable[[Function], Function]) -> None:
    """Compares scatters, replaced and run on the device of the process, with those of XLA:CPU."""
    functions = [CASES[name][0](how) for how in HOW]
    args = [operands(CASES[name], seed) for seed in range(5)]
    assert len([e for f in functions for n in RULES for e in equations(f, *args[0], name=n)]) == len(HOW)
    stock = jax.jit(lambda *args: [f(*args) for f in functions])
    ours = jax.jit(lambda *args: [replaced(f)(*args) for f in functions])
    for a in args:
        on_cpu = jax.device_put(a, jax.devices("cpu")[0])
        for how, actual, expected in zip(HOW, ours(*a), stock(*on_cpu), strict=True):
            assert_bits_equal(*(bits(y, how) for y in (actual, expected)), err_msg=how)


@pytest.mark.tier("full", fast=("float16", "float64"))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "float8_e4m3fn"])
def test_other_floats(dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        for how in HOW:
            function, args = CASES["rows"][0](how), operands(CASES["rows"], 7, dtype)
            ours = jax.jit(substitute(function, RULES))(*args)
            assert ours.dtype == dtype
            assert_bits_equal(*(bits(y, how) for y in (ours, jax.jit(function)(*args))), err_msg=how)


@pytest.mark.tier("full", fast=("bool", "uint32", "key"))
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


@pytest.mark.tier("full", fast=("max", "min"))
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

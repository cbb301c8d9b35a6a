"""What is lowered for a GPU, read on any machine: every function, product and rounding has its fence."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import bijax
from bijax import hlo
from bijax.transform.rules._elementwise import VECTORS
from tests.fuzz.programs import Fuzz
from tests.transform.vector_functions import FUNCTIONS

pytestmark = pytest.mark.usefixtures("hopper")

FENCE = "stablehlo.shift_right_logical"


def lowered(fn: Callable[..., Any], *arrays: Any) -> str:
    return jax.jit(fn).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def arguments(fuzz: Fuzz, size: int) -> list[jax.ShapeDtypeStruct]:
    found = []
    for array, axis in zip(fuzz.arguments(), fuzz.axes, strict=False):
        shape = list(array.shape[1:])
        shape.insert(axis, size)
        found.append(jax.ShapeDtypeStruct(tuple(shape), fuzz.dtype))
    return found


@pytest.mark.tier("full", fast=("alone-4", "kernels-3"))
@pytest.mark.parametrize("seed", range(1, 7))
@pytest.mark.parametrize("kernels", [False, True], ids=["alone", "kernels"])
def test_random_programs_have_a_fence_everywhere(seed: int, kernels: bool) -> None:
    fuzz = Fuzz(seed, kernels)
    with jax.enable_x64(fuzz.dtype == "float64"):
        arrays = arguments(fuzz, 3)
        report = hlo.inspect_for("cuda", bijax.invariant(fuzz.batched()), *arrays)
        assert not [f for f in report.variant if f.kind in ("elementwise", "rounding")], str(report)
        assert [f for f in hlo.inspect_for("cuda", fuzz.batched(), *arrays).variant if f.kind == "elementwise"]


@pytest.mark.tier(
    "full",
    fast=(
        "atan-float32",
        "atanh-float32",
        "bessel_i0e-float32",
        "bessel_i1e-float32",
        "bessel_i1e-bfloat16",
        "cbrt-bfloat16",
        "cosh-float32",
        "erfc-float32",
        "exp2-float32",
        "exp2-bfloat16",
        "igammac-bfloat16",
        "lgamma-float32",
        "log-bfloat16",
        "log1p-bfloat16",
        "logistic-float32",
        "polygamma-bfloat16",
    ),
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_functions(name: str, dtype: str) -> None:
    x = jax.ShapeDtypeStruct((3, 5), dtype)
    program = bijax.invariant(lambda x: FUNCTIONS[name](x, x * 0.5) * 2 + 1)
    report = hlo.inspect_for("cuda", program, x)
    assert report.invariant, str(report)
    assert not hlo.inspect_for("cuda", lambda x: FUNCTIONS[name](x, x * 0.5) * 2 + 1, x).invariant


@pytest.mark.parametrize("program", [jnp.tanh, lax.lgamma, lambda x: x + x, lambda x: x / 3, lambda x: lax.rsqrt(x)])
def test_float64_leaves_no_fence_as_integers(program: Callable[[jax.Array], jax.Array]) -> None:
    """XLA stores what is left as integers as such, and ptxas 13.0 converts half of a double that it stores so."""
    x = jax.ShapeDtypeStruct((3, 5), "float64")
    with jax.enable_x64(True):
        found = lowered(bijax.invariant(program), x)
        assert FENCE in found
        backs = [
            line for line in found.splitlines() if "bitcast_convert" in line and "ui64>) -> tensor<3x5xf64>" in line
        ]
        made = [made_by(found, line.split("bitcast_convert ")[1].split()[0]) for line in backs]
        # Positions over all dimensions, counted along one.
        made = [made_by(found, line.split("reshape ")[1].split()[0]) if "reshape" in line else line for line in made]
        assert not [line for line in made if "stablehlo.xor" not in line and "stablehlo.iota" not in line], made
        assert hlo.inspect_for("cuda", bijax.invariant(program), x).invariant
        assert not hlo.inspect_for("cuda", lambda x: program(jnp.sin(x)), x).invariant


def made_by(text: str, value: str) -> str:
    """Returns the line of a lowered program that makes a value."""
    (line,) = (line for line in text.splitlines() if line.strip().startswith(f"{value} ="))
    return line


def test_every_function_is_looked_at() -> None:
    assert set(FUNCTIONS) <= set(VECTORS)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x * x,
        lambda x: x + x,
        lambda x: x / 3,
        lambda x: lax.rem(x, x),
        lambda x: lax.sqrt(x),
        lambda x: x.astype(jnp.bfloat16),
        lambda x: x.astype(jnp.int32),
        lambda x: lax.integer_pow(x, -3),
        lambda x: jax.grad(lambda x: jnp.tanh(x).sum())(x),
    ],
)
def test_operations(program: Callable[[jax.Array], jax.Array]) -> None:
    x = jax.ShapeDtypeStruct((3, 5), jnp.float32)
    assert FENCE not in lowered(program, x)
    found = lowered(bijax.invariant(program), x)
    assert FENCE in found or "stablehlo.xor" in found


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 1), (3, 5)])
def test_denominators_are_hidden(shape: tuple[int, ...]) -> None:
    """XLA multiplies by the reciprocal of a constant, and of a broadcast value, that it sees."""
    divided = lowered(bijax.invariant(lambda x: x / 3), jax.ShapeDtypeStruct(shape, jnp.float32))
    (line,) = (line for line in divided.splitlines() if "stablehlo.divide" in line)
    denominator = line.split("stablehlo.divide ")[1].split()[1]
    expected = "stablehlo.select" if max(shape, default=1) > 1 else "stablehlo.bitcast_convert"
    assert expected in made_by(divided, denominator)


@pytest.mark.parametrize("shape", [(1,), (3, 5)])
def test_the_logistic_function_is_a_quotient_that_nothing_is_chosen_for(shape: tuple[int, ...]) -> None:
    """A product with its numerator is exact; a constant is hidden all the same."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    found = lowered(bijax.invariant(jax.nn.sigmoid), x)
    (line,) = (line for line in found.splitlines() if "stablehlo.divide" in line)
    made = made_by(found, line.split("stablehlo.divide ")[1].split()[1])
    assert "stablehlo.xor" in made_by(found, made.split("bitcast_convert ")[1].split()[0])
    assert "stablehlo.select" not in found
    assert found.count("stablehlo.exponential") == 1
    assert hlo.inspect_for("cuda", bijax.invariant(jax.nn.sigmoid), x).invariant


def test_integers_and_moves_have_none() -> None:
    x, i = jax.ShapeDtypeStruct((3, 5), jnp.float32), jax.ShapeDtypeStruct((3, 5), jnp.int32)
    assert FENCE not in lowered(bijax.invariant(lambda x, i: (x.T, -x, jnp.maximum(x, 0), i * i + 1)), x, i)
    assert FENCE not in lowered(
        bijax.invariant(lambda x: x.astype(jnp.float32)), jax.ShapeDtypeStruct((3,), "bfloat16")
    )


def test_kernels_are_fenced_without_the_transform() -> None:
    x = jax.ShapeDtypeStruct((3, 5), jnp.float32)
    swiglu = bijax.elementwise(lambda gate, up: jax.nn.silu(gate) * up)
    assert hlo.inspect_for("cuda", swiglu, x, x).invariant
    assert FENCE not in lowered(lambda gate, up: jax.nn.silu(gate) * up, x, x)


def test_on_a_cpu_nothing_of_it_is_there() -> None:
    x = jax.ShapeDtypeStruct((3, 5), jnp.float32)
    assert FENCE not in jax.jit(bijax.invariant(lambda x: x + 1)).trace(x).lower(lowering_platforms=("cpu",)).as_text()

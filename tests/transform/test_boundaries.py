"""Where an invariant function meets what is around it: arguments, other traces, other platforms, other settings."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import hijax

import bijax
from bijax.testing import assert_bits_equal
from tests.arrays import on_device
from tests.transform.lowered import unmarked_sums

pytestmark = pytest.mark.usefixtures("hopper")

X = on_device(np.random.default_rng(0).standard_normal((8, 64)), jnp.float32)
W = on_device(np.random.default_rng(1).standard_normal((64, 16)), jnp.float32)


def looped(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (jnp.tanh(c @ W @ W.T), None), x, None, length=2)[0]


@pytest.mark.parametrize("program", [jax.jit(looped), looped, jax.checkpoint(looped)], ids=["jit", "scan", "remat"])
def test_programs_that_were_traced_before(program: Callable[..., Any]) -> None:
    traced = jax.make_jaxpr(program)(X)
    run = bijax.invariant(lambda x: jax.core.eval_jaxpr(traced.jaxpr, traced.consts, x))
    assert not unmarked_sums(run, X)
    assert unmarked_sums(program, X)


def test_a_linear_function_that_was_made_before() -> None:
    _, linear = jax.linearize(jax.jit(looped), X)
    assert not unmarked_sums(bijax.invariant(linear), X)


@pytest.mark.parametrize("wrap", [lambda f: f, bijax.invariant], ids=["plain", "invariant"])
def test_export_for_two_platforms(wrap: Callable[..., Any]) -> None:
    bijax.invariant(looped)  # wraps the rules
    program = jax.jit(wrap(lambda x: x @ W + 1))
    exported = jax.export.export(program, platforms=["cpu", "cuda"])(X)
    assert_bits_equal(exported.call(X), program(X))


def test_sums_over_a_mapped_axis() -> None:
    def share(x: jax.Array) -> jax.Array:
        return x / lax.psum(jnp.exp(x), "rows") + lax.pmean(x, "rows")

    run = jax.jit(bijax.invariant(jax.vmap(share, axis_name="rows")))
    np.testing.assert_allclose(run(X), jax.vmap(share, axis_name="rows")(X), rtol=1e-5, atol=1e-6)
    assert not unmarked_sums(run, X)


def test_integer_exponents_and_the_optimizer_that_has_them() -> None:
    power = jax.jit(bijax.invariant(lambda t: jnp.float32(0.9) ** t))
    np.testing.assert_allclose(power(jnp.int32(3)), 0.729, rtol=1e-6)
    adam = optax.adam(1e-3)
    update, _ = jax.jit(bijax.invariant(lambda state, g: adam.update(g, state)))(adam.init(W), W)
    np.testing.assert_allclose(update, adam.update(W, adam.init(W))[0], rtol=1e-5)


def test_changes_of_containers_are_kept() -> None:
    def fill(d: dict[str, Any], found: list[int]) -> None:
        d["y"] = d["x"] * 2
        found.append(1)

    def program(x: jax.Array) -> jax.Array:
        d, found = {"x": x}, [0]
        bijax.invariant(fill)(d, found)
        assert found == [0, 1]
        return d["y"]

    np.testing.assert_array_equal(jax.jit(program)(X), X * 2)
    eager: dict[str, Any] = {"x": X}
    bijax.invariant(fill)(eager, [0])
    assert set(eager) == {"x", "y"}


class Pair(NamedTuple):
    first: jax.Array
    second: jax.Array


def test_products_that_come_in_a_named_tuple() -> None:
    a, b, c = on_device(np.random.default_rng(2).standard_normal((3, 37)), jnp.float32)
    add = bijax.invariant(lambda pair: pair.first + pair.second)
    program = jax.jit(lambda a, b, c: add(Pair(a * b, c)))
    for n in (1, 5, 9, 16):
        assert_bits_equal(program(a[:n], b[:n], c[:n]), program(a, b, c)[:n])


def test_lowering_behind_a_block_that_allowed_64_bits() -> None:
    with jax.enable_x64(True):
        traced = jax.jit(bijax.invariant(lambda x: jnp.tanh(x @ x.T).sum())).trace(jnp.ones((4, 4), jnp.float64))
    assert "f64" in traced.lower().as_text()


@dataclasses.dataclass(frozen=True)
class _Scaled:
    values: Any
    scales: Any


@dataclasses.dataclass(frozen=True)
class _ScaledType(hijax.HiType):
    shape: tuple[int, int]
    has_qdd = False

    def lo_ty(self) -> list[Any]:
        return [
            hijax.ShapedArray(self.shape, jnp.dtype("int8")),
            hijax.ShapedArray(self.shape[:1], jnp.dtype("float32")),
        ]

    def lower_val(self, value: _Scaled) -> list[Any]:
        return [value.values, value.scales]

    def raise_val(self, values: Any, scales: Any) -> _Scaled:
        return _Scaled(values, scales)


class _Scale(hijax.HiPrim):
    def __init__(self, x: Any) -> None:
        self.in_avals, self.out_aval, self.params = (x,), _ScaledType(x.shape), {}
        super().__init__()

    def expand(self, x: jax.Array) -> _Scaled:
        scales = jnp.abs(x).max(1)
        return _Scaled(jnp.round(x / scales[:, None] * 127).astype(jnp.int8), scales)


class _Product(hijax.HiPrim):
    def __init__(self, x: Any, w: Any) -> None:
        out = hijax.ShapedArray((x.shape[0], w.shape[1]), w.dtype)
        self.in_avals, self.out_aval, self.params = (x, w), out, {}
        super().__init__()

    def expand(self, x: _Scaled, w: jax.Array) -> jax.Array:
        return (x.values.astype(w.dtype) * x.scales[:, None]) @ w


def test_types_of_hijax_as_arguments_and_results() -> None:
    hijax.register_hitype(_Scaled, lambda value: _ScaledType(value.values.shape))
    parts = (lambda x: _Scale(jax.typeof(x))(x)), lambda x, w: _Product(jax.typeof(x), jax.typeof(w))(x, w)
    scale, multiply = map(bijax.invariant, parts)
    run, plain = (jax.jit(lambda x, f=f, g=g: g(jax.jit(f)(x), W)) for f, g in ((scale, multiply), parts))
    assert unmarked_sums(plain, X)
    assert not unmarked_sums(run, X)
    assert_bits_equal(run(X)[2:3], run(X[2:3]))
    assert_bits_equal(multiply(scale(X), W), run(X))

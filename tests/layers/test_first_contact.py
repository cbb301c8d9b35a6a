"""What a newcomer meets: arguments that `inspect` shows, and what to install."""

import inspect
import runpy
import sys
from pathlib import Path

import jax
import pytest
from flax import linen, nnx

import bijax
import flax_layers
from bijax.testing import assert_bits_equal
from flax_layers.models import layers
from tests.arrays import normal


@pytest.mark.parametrize("cls", [*flax_layers.nnx.DROP_INS.values(), flax_layers.Llama, layers.MLP, layers.Attention])
def test_the_signature_is_that_of_the_constructor(cls: type) -> None:
    shown = inspect.signature(cls)
    wanted = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    assert list(shown.parameters.values()) == wanted
    assert len(wanted) > 1


def test_the_signature_of_a_subclass_and_of_an_instance_are_their_own() -> None:
    class Square(flax_layers.nnx.Linear):
        def __init__(self, width: int) -> None:
            super().__init__(width, width, rngs=nnx.Rngs(0))

    assert list(inspect.signature(Square).parameters) == ["width"]
    assert next(iter(inspect.signature(Square(3)).parameters)) == "inputs"


def test_without_flax_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flax", None)
    first = str(Path(flax_layers.__file__).with_name("_needs_flax.py"))
    with pytest.raises(ModuleNotFoundError, match=r"`pip install flax`") as caught:
        runpy.run_path(first)
    assert caught.value.name == "flax"
    monkeypatch.undo()
    runpy.run_path(first)


def test_a_compact_method_of_linen_is_decorated_from_outside() -> None:
    class Model(linen.Module):
        @bijax.invariant
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.softmax(linen.Dense(77)(x))

    x = normal(0, (5, 300))
    variables = Model().init(jax.random.key(0), x)
    apply = jax.jit(Model().apply)
    assert_bits_equal(apply(variables, x[3:4]), apply(variables, x)[3:4])


def test_rematerialised_nnx_modules_keep_their_bits() -> None:
    def loss(model: nnx.Module, x: jax.Array) -> jax.Array:
        return (model(x) ** 2).sum()  # type: ignore[operator]

    gradient = nnx.jit(nnx.grad(nnx.remat(bijax.invariant(loss)), argnums=1))
    model, x = nnx.Linear(12, 7, rngs=nnx.Rngs(0)), normal(0, (5, 12))
    assert_bits_equal(gradient(model, x[3:4]), gradient(model, x)[3:4])

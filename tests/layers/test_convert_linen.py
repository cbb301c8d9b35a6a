"""Conversion of whole linen models."""

import copy
import functools
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

import bijax
from bijax.testing import assert_bits_equal
from flax_layers import conversion_report, convert, linen
from tests.layers import drop_ins
from tests.layers.drop_ins import rows
from tests.tiers import full_only

K = 300
KEY = jax.random.key(7)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Dense(64)(nn.LayerNorm()(x))
        return nn.Dense(x.shape[-1])(nn.relu(y))


Lifted = nn.jit(nn.remat(Block))  # keeps what it traced for all models


class Model(nn.Module):
    """A model with lifted blocks, a layer among its fields, and two ways in."""

    head: nn.Module
    width: int = 40

    def setup(self) -> None:
        self.encoder = Lifted()
        self.start = nn.Dense(self.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.encode(x))

    def encode(self, x: jax.Array) -> jax.Array:
        return self.encoder(self.start(x))


def linen_model() -> Model:
    return Model(nn.Dense(9))


@pytest.mark.parametrize("every", [False, full_only(True)], ids=["results", "and gradients and methods"])
def test_linen_is_equivalent(every: bool) -> None:
    model, x = linen_model(), rows(8, K)
    converted = convert(model)
    assert converted is not model
    assert isinstance(converted, Model)
    assert repr(converted) == repr(model)
    variables, initial = jax.jit(lambda x: (model.init(KEY, x), converted.init(KEY, x)))(x)
    drop_ins.assert_same_bits(initial, variables)
    assert not drop_ins.is_invariant(lambda x: model.apply(variables, x), x)  # traced before the converted one is
    drop_ins.assert_invariant(lambda x: converted.apply(variables, x), x, gradient=every)
    found, plain = (jax.jit(m.apply)(variables, x) for m in (converted, model))
    assert jnp.allclose(found, plain, rtol=1e-4, atol=1e-4)

    if not every:
        return

    @jax.jit
    def other_ways_in(x: jax.Array) -> list[jax.Array]:
        nested = {"params": {"layers_0": variables["params"]}}
        return [
            converted.apply(variables, x, method="encode"),
            converted.apply(variables, x, method=Model.encode),
            converted.bind(variables).encode(x),
            nn.Sequential([converted]).apply(nested, x),
        ]

    drop_ins.assert_same_bits([y[:1] for y in other_ways_in(x)], other_ways_in(x[:1]))


@pytest.mark.tier("full")
def test_linen_lifted_model() -> None:
    class Carried(Block):
        @nn.compact
        def __call__(self, x: jax.Array, _: Any = None) -> Any:
            return nn.Dense(x.shape[-1])(x), None

    scanned = nn.scan(Carried, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
    model, x = scanned(), rows(8, K)
    variables = model.init(KEY, x, None)
    drop_ins.assert_invariant(lambda x: convert(model).apply(variables, x, None)[0], x)


def test_linen_model_that_is_a_layer() -> None:
    x = rows(8, K)
    layer = convert(nn.Dense(33))
    variables = layer.init(KEY, x)
    drop_ins.assert_invariant(lambda x: layer.apply(variables, x), x)


def test_linen_equality_copies_and_pickles() -> None:
    model = convert(linen_model())
    assert model == convert(linen_model())
    assert hash(model) == hash(convert(linen_model()))
    assert model != linen_model()
    assert model != convert(linen_model(), {nn.Dense: False})
    assert convert(model) == model
    for twin in (copy.deepcopy(model), model.clone(), pickle.loads(pickle.dumps(convert(Block())))):
        assert type(twin).__qualname__ == type(twin).__name__
        assert conversion_report(twin, inputs=(rows(2, 3),)).replaced


def test_linen_report() -> None:
    shape = jax.ShapeDtypeStruct((2, K), jnp.float32)
    report = conversion_report(linen_model(), {re.compile("encoder/Dense_[0-9]"): False}, inputs=(shape,))
    assert [(d.path, d.before, d.after) for d in report.replaced] == [
        ("start", nn.Dense, linen.Dense),
        ("encoder/LayerNorm_0", nn.LayerNorm, linen.LayerNorm),
        ("head", nn.Dense, linen.Dense),
    ]
    assert [d.path for d in report.left] == ["encoder/Dense_0", "encoder/Dense_1"]
    assert [d.path for d in report.uncovered] == ["", "encoder"]
    with pytest.raises(TypeError, match=r"expected inputs=\(x, ...\)"):
        conversion_report(linen_model())
    with pytest.raises(TypeError, match="an nnx model has its modules"):
        conversion_report(nnx.Linear(K, 3, rngs=nnx.Rngs(0)), inputs=(shape,))


@pytest.mark.tier("full")
def test_linen_rules() -> None:
    class Doubled(linen.Dense):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return 2 * super().__call__(x)

    model, x = linen_model(), rows(8, K)
    doubled = convert(model, {"head": Doubled})
    variables, initial = jax.jit(lambda x: (model.init(KEY, x), doubled.init(KEY, x)))(x)
    drop_ins.assert_same_bits(initial, variables)
    assert_bits_equal(jax.jit(doubled.apply)(variables, x), 2 * jax.jit(convert(model).apply)(variables, x))
    assert_bits_equal(jax.jit(convert(model, {object: False}).apply)(variables, x), jax.jit(model.apply)(variables, x))


class Halves(nn.Module):
    """A module with a layer that `setup` makes."""

    def setup(self) -> None:
        self.inner = nn.Dense(5)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x) / 2


@linen.invariant_layer
class InvariantHalves(Halves):
    pass


@pytest.mark.tier("full")
def test_linen_rule_for_an_own_module_with_setup() -> None:
    model, x = nn.Sequential([Halves()]), rows(8, K)
    converted = convert(model, {Halves: InvariantHalves})
    variables = converted.init(KEY, x)
    drop_ins.assert_same_bits(variables, model.init(KEY, x))
    drop_ins.assert_invariant(lambda x: converted.apply(variables, x), x)
    report = conversion_report(model, {Halves: InvariantHalves}, inputs=(x,))
    assert [d.after for d in report.replaced] == [InvariantHalves, linen.Dense]


def test_linen_rules_to_convert_what_cannot_be() -> None:
    class Own(nn.Dense):
        pass

    x = rows(2, 3)
    for model, rules, message in (
        (
            nn.Sequential([Own(4), nn.Dense(3)]),
            {Own: True},
            "chooses layers_0, .*Own, which has no drop-in: a subclass",
        ),
        (nn.Sequential([Halves()]), {Halves: True}, "the rule Halves: True converts nothing: .*layers_0, a Halves"),
    ):
        with pytest.raises(ValueError, match=message):
            conversion_report(model, rules, inputs=(x,))
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(convert(model, rules).init, KEY, x)
    convert(nn.remat(nn.Dense)(4), {nn.Dense: True}).init(KEY, x)


def test_linen_functions_of_a_sequential_are_reported() -> None:
    model = nn.Sequential([nn.Dense(2), nn.relu, functools.partial(nn.gelu, approximate=False), nn.softmax, nn.gelu])
    for one in (model, convert(model)):
        report = conversion_report(one, inputs=(rows(2, 3),))
        assert [(d.path, d.reason) for d in report.uncovered] == [
            ("", "calls gelu, softmax; plain JAX code between layers is not converted")
        ]


def test_linen_layers_called_past_the_model() -> None:
    modes = []

    def dot(*args: Any, **kwargs: Any) -> jax.Array:
        modes.append(bijax.is_batch_invariant_mode_enabled())
        return jax.lax.dot_general(*args, **kwargs)

    model, x = convert(Model(nn.Dense(2, dot_general=dot))), rows(2, 3)
    variables = {"params": {"head": nn.Dense(2).init(KEY, x)["params"]}}
    model.bind(variables).head(x)
    nn.apply(lambda m, x: m.head(x), model)(variables, x)
    model.apply(variables, x, method=lambda m, x: m.head(x))
    assert modes == [False, False, True]


def test_linen_wrong_use() -> None:
    model, x = linen_model(), rows(2, 3)
    converted = convert(model, {"nothing": False})
    with pytest.raises(ValueError, match=r"the rule 'nothing': False decides about no module.*start \(Dense\)"):
        jax.eval_shape(converted.init, KEY, x)
    with pytest.raises(ValueError, match="not bound to variables"):
        convert(nn.Dense(3).bind(nn.Dense(3).init(KEY, x)))
    with pytest.raises(TypeError, match="is not derived"):
        jax.eval_shape(convert(model, {"head": linen.LayerNorm}).init, KEY, x)

"""Conversion of whole models."""

import copy
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx as flax_nnx

from bijax.testing import assert_bits_equal
from flax_layers import conversion_report, convert, linen, nnx
from tests.layers import drop_ins
from tests.layers.drop_ins import rows

K = 300
KEY = jax.random.key(7)


class NnxBlock(flax_nnx.Module):
    def __init__(self, shared: flax_nnx.Linear, rngs: flax_nnx.Rngs) -> None:
        self.norm = flax_nnx.LayerNorm(K, rngs=rngs)
        self.shared = shared
        self.down = flax_nnx.Linear(64, K, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(flax_nnx.relu(self.shared(self.norm(x))))


class NnxModel(flax_nnx.Module):
    def __init__(self, rngs: flax_nnx.Rngs) -> None:
        shared = flax_nnx.Linear(K, 64, rngs=rngs)
        self.blocks = flax_nnx.List(NnxBlock(shared, rngs) for _ in range(2))
        self.heads = flax_nnx.Dict(a=flax_nnx.Linear(K, 5, rngs=rngs), drop=flax_nnx.Dropout(0.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.heads["a"](x)


class OwnLinear(flax_nnx.Linear):
    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * super().__call__(x)


@nnx.invariant_layer
class OwnInvariantLinear(OwnLinear):
    pass


def nnx_model() -> NnxModel:
    return NnxModel(flax_nnx.Rngs(0))


def test_nnx_in_place_with_shared_layers() -> None:
    model, twin = nnx_model(), nnx_model()
    shared, graph = model.blocks[0].shared, flax_nnx.graphdef(model)
    assert not drop_ins.is_invariant(model, rows(8, K))
    assert convert(model) is model
    assert type(shared) is nnx.Linear
    assert model.blocks[1].shared is shared
    assert flax_nnx.graphdef(model) != graph  # nothing that was jitted for the original is used
    drop_ins.assert_same_bits(flax_nnx.state(model), flax_nnx.state(twin))
    drop_ins.assert_invariant(model, rows(8, K))
    found, plain = jax.jit(lambda x: (model(x), twin(x)))(rows(3, K))
    assert jnp.allclose(found, plain, rtol=1e-4, atol=1e-4)
    convert(model)  # again, without effect
    assert type(shared) is nnx.Linear


def test_nnx_jitted_before() -> None:
    model, x = nnx_model(), rows(8, K)
    run = flax_nnx.jit(lambda model, x: model(x))
    run(model, x)
    convert(model)
    assert_bits_equal(run(model, x)[:1], run(model, x[:1]))


def test_nnx_report() -> None:
    report = conversion_report(nnx_model(), {"heads/*": False})
    assert [(d.path, d.before, d.after) for d in report.replaced] == [
        ("blocks/0/down", flax_nnx.Linear, nnx.Linear),
        ("blocks/0/norm", flax_nnx.LayerNorm, nnx.LayerNorm),
        ("blocks/0/shared", flax_nnx.Linear, nnx.Linear),
        ("blocks/1/down", flax_nnx.Linear, nnx.Linear),
        ("blocks/1/norm", flax_nnx.LayerNorm, nnx.LayerNorm),
    ]
    assert [d.path for d in report.left] == ["heads/a", "heads/drop"]
    assert [d.path for d in report.uncovered] == ["", "blocks/0", "blocks/1"]
    assert "blocks/0/down: Linear -> flax_layers.nnx.Linear" in str(report)
    assert "heads/a: Linear, by the rule 'heads/*': False" in str(report)
    assert "(the model): NnxModel, its own methods run as they are" in str(report)


def test_nnx_rules() -> None:
    model = convert(nnx_model(), [(re.compile(r"blocks/\d/down"), False), ("blocks/*", True), (object, False)])
    assert [type(model.blocks[0].down), type(model.blocks[0].shared)] == [flax_nnx.Linear, nnx.Linear]
    assert type(model.heads["a"]) is flax_nnx.Linear
    model = convert(nnx_model(), {flax_nnx.Linear: False})
    assert [type(model.blocks[0].down), type(model.blocks[0].norm)] == [flax_nnx.Linear, nnx.LayerNorm]


def test_nnx_subclasses_are_reported_and_converted_by_a_rule() -> None:
    model = flax_nnx.Sequential(OwnLinear(K, 33, rngs=flax_nnx.Rngs(0)), flax_nnx.WeightNorm)
    (entry,) = conversion_report(model).uncovered
    assert entry.path == "layers/0"
    assert entry.reason.startswith("a subclass of Linear that overrides __call__")
    layer = convert(model, {OwnLinear: OwnInvariantLinear}).layers[0]
    assert type(layer) is OwnInvariantLinear
    assert not conversion_report(model).uncovered
    drop_ins.assert_invariant(layer, rows(8, K))


def test_nnx_layers_without_a_drop_in_are_reported() -> None:
    layer = flax_nnx.Linear(3, 3, rngs=flax_nnx.Rngs(0))
    model = flax_nnx.WeightNorm(layer, rngs=flax_nnx.Rngs(0))
    report = conversion_report(model)
    assert [(d.path, d.reason) for d in report.uncovered] == [("", "a layer without a drop-in")]


def test_nothing_is_converted_when_a_rule_is_wrong() -> None:
    model = nnx_model()
    for rules, error, message in (
        ({"blocks/9/*": False}, ValueError, r"the rule 'blocks/9/\*': False decides about no module.*\(the model\)"),
        ([("*", True), (flax_nnx.Linear, False)], ValueError, "the rule Linear: False decides about no module"),
        ({flax_nnx.LayerNorm: OwnInvariantLinear}, TypeError, "from which .*OwnInvariantLinear is not derived"),
        ({3: True}, TypeError, "must start with a type, a glob"),
        ({"*": "yes"}, TypeError, "must end with True"),
        ({"*": linen.Dense}, TypeError, "must end with True"),
        (["*"], TypeError, "must be a pair"),
        ("*", TypeError, "must be a mapping or a sequence of pairs"),
    ):
        with pytest.raises(error, match=message):
            convert(model, rules)  # type: ignore[arg-type]
        assert type(model.heads["a"]) is flax_nnx.Linear


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"params": {"kernel": 1}}, "a dict without methods; convert the model whose parameters these are"),
        (nn.Dense, "the class Dense; make an instance of it first"),
        (flax_nnx.Linear, "the class Linear; make an instance of it first"),
        (flax_nnx.State({}), "a State without methods"),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_model_is_refused(model: Any, message: str) -> None:
    for function in (convert, conversion_report):
        with pytest.raises(TypeError, match=message):
            function(model)


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


def test_linen_is_equivalent() -> None:
    model, x = linen_model(), rows(8, K)
    converted = convert(model)
    assert converted is not model
    assert isinstance(converted, Model)
    assert repr(converted) == repr(model)
    variables, initial = jax.jit(lambda x: (model.init(KEY, x), converted.init(KEY, x)))(x)
    drop_ins.assert_same_bits(initial, variables)
    assert not drop_ins.is_invariant(lambda x: model.apply(variables, x), x)  # traced before the converted one is
    drop_ins.assert_invariant(lambda x: converted.apply(variables, x), x)
    found, plain = (jax.jit(m.apply)(variables, x) for m in (converted, model))
    assert jnp.allclose(found, plain, rtol=1e-4, atol=1e-4)

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
        conversion_report(nnx_model(), inputs=(shape,))


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


def test_linen_rule_for_an_own_module_with_setup() -> None:
    model, x = nn.Sequential([Halves()]), rows(8, K)
    converted = convert(model, {Halves: InvariantHalves})
    variables = converted.init(KEY, x)
    drop_ins.assert_same_bits(variables, model.init(KEY, x))
    drop_ins.assert_invariant(lambda x: converted.apply(variables, x), x)
    report = conversion_report(model, {Halves: InvariantHalves}, inputs=(x,))
    assert [d.after for d in report.replaced] == [InvariantHalves, linen.Dense]


def test_linen_wrong_use() -> None:
    model, x = linen_model(), rows(2, 3)
    converted = convert(model, {"nothing": False})
    with pytest.raises(ValueError, match=r"the rule 'nothing': False decides about no module.*start \(Dense\)"):
        jax.eval_shape(converted.init, KEY, x)
    with pytest.raises(ValueError, match="not bound to variables"):
        convert(nn.Dense(3).bind(nn.Dense(3).init(KEY, x)))
    with pytest.raises(TypeError, match="is not derived"):
        jax.eval_shape(convert(model, {"head": linen.LayerNorm}).init, KEY, x)

"""Conversion of whole models: nnx, and what is the same for linen."""

import functools
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
from tests.tiers import full_only

K = 300


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


@pytest.mark.parametrize("gradient", [False, full_only(True)], ids=["results", "and gradients"])
def test_nnx_in_place_with_shared_layers(gradient: bool) -> None:
    model, twin = nnx_model(), nnx_model()
    shared, graph = model.blocks[0].shared, flax_nnx.graphdef(model)
    assert not drop_ins.is_invariant(model, rows(8, K), gradient=gradient)
    assert convert(model) is model
    assert type(shared) is nnx.Linear
    assert model.blocks[1].shared is shared
    assert flax_nnx.graphdef(model) != graph  # nothing that was jitted for the original is used
    drop_ins.assert_same_bits(flax_nnx.state(model), flax_nnx.state(twin))
    drop_ins.assert_invariant(model, rows(8, K), gradient=gradient)
    if gradient:
        found, plain = jax.jit(lambda x: (model(x), twin(x)))(rows(3, K))
        assert jnp.allclose(found, plain, rtol=1e-4, atol=1e-4)
    convert(model)  # again, without effect
    assert type(shared) is nnx.Linear


@pytest.mark.tier("full")
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


@pytest.mark.tier("full")
@pytest.mark.parametrize("gradient", [False, full_only(True)], ids=["results", "and gradients"])
def test_nnx_subclasses_are_reported_and_converted_by_a_rule(gradient: bool) -> None:
    model = flax_nnx.Sequential(OwnLinear(K, 33, rngs=flax_nnx.Rngs(0)), flax_nnx.relu)
    (entry,) = conversion_report(model).uncovered
    assert entry.path == "layers/0"
    assert entry.reason.startswith("a subclass of Linear that overrides __call__")
    layer = convert(model, {OwnLinear: OwnInvariantLinear}).layers[0]
    assert type(layer) is OwnInvariantLinear
    assert not conversion_report(model).uncovered
    drop_ins.assert_invariant(layer, rows(8, K), gradient=gradient)


class LayerToCome(flax_nnx.Module):
    """A layer of Flax that is not known here."""

    __module__ = "flax.nnx.nn.to_come"

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def test_nnx_layers_without_a_drop_in_are_reported() -> None:
    report = conversion_report(LayerToCome())
    assert [(d.path, d.reason) for d in report.uncovered] == [("", "a layer without a drop-in")]


def test_nnx_rules_to_convert_what_cannot_be() -> None:
    class Own(flax_nnx.Linear):
        pass

    own = flax_nnx.Sequential(Own(6, 3, rngs=flax_nnx.Rngs(0)), nnx.Linear(3, 2, rngs=flax_nnx.Rngs(0)))
    for model, rules, message in (
        (own, {Own: True}, r"the rule Own: True chooses layers/0, .*Own, which has no drop-in: a subclass of Linear"),
        (own, {"*": True}, "which has no drop-in: a subclass of Linear"),
        (LayerToCome(), {LayerToCome: True}, "chooses the model, .*LayerToCome, which has no drop-in: a layer without"),
        (nnx_model(), {NnxBlock: True}, r"the rule NnxBlock: True converts nothing: .*blocks/0, a NnxBlock, its own"),
    ):
        for function in (convert, conversion_report):
            with pytest.raises(ValueError, match=message):
                function(model, rules)
    convert(own, [(Own, False), ("*", True)])
    convert(convert(nnx_model(), {"blocks/*": True}), {"blocks/*": True})  # invariant already


def test_nnx_functions_of_a_sequential_are_reported() -> None:
    class Callable:
        def __call__(self, x: jax.Array) -> jax.Array:
            return x.sum()

    gelu = functools.partial(jax.nn.gelu, approximate=False)
    calls = "calls gelu, softmax, Callable; plain JAX code between layers is not converted"
    model = flax_nnx.Sequential(
        flax_nnx.Linear(3, 2, rngs=flax_nnx.Rngs(0)), flax_nnx.relu, gelu, flax_nnx.softmax, flax_nnx.gelu, Callable()
    )
    assert [(d.path, d.reason) for d in conversion_report(model).uncovered] == [("", calls)]
    assert not conversion_report(model, {flax_nnx.Sequential: False}).uncovered


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

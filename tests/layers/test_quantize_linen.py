"""linen's mixtures of experts and int8 layers: the bits of those of nnx, and whole models converted to them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx

import bijax
from bijax.testing import assert_bits_equal
from flax_layers import Routing, conversion_report, convert, linen, nnx, quantize_variables
from tests.arrays import on_device
from tests.layers.parameters import filled
from tests.tiers import full_only

ROUTING = Routing(num_experts=4, topk=2, scoring="sigmoid", use_bias=True)


def normal(seed: int, *shape: int) -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
    ("bits", "int8"), [(False, False), full_only(True, False), full_only(True, True)], ids=["shapes", "float", "int8"]
)
def test_experts_have_the_bits_of_nnx(bits: bool, int8: bool) -> None:
    """In float and in int8, a row alone and among others. tests/layers/test_moe.py has the control."""
    theirs = filled(lambda: nnx.MoE(40, 24, routing=ROUTING, shared_features=16, rngs=flax_nnx.Rngs(0)))
    x = normal(2, 9, 40)
    ours = linen.MoE(24, routing=ROUTING, shared_features=16)
    variables: Any = {
        "params": {
            **{name: getattr(theirs, name)[...] for name in ("router", "router_bias", "gate_up", "down")},
            "shared_gate_up": theirs.shared.gate_up.kernel[...],
            "shared_down": theirs.shared.down.kernel[...],
        }
    }
    shapes = jax.eval_shape(ours.init, jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, shapes)
    if not bits:
        assert jax.eval_shape(ours.apply, variables, x).shape == x.shape
        return
    run = jax.jit(ours.apply)
    found = run(variables, x)
    assert_bits_equal(found, jax.jit(theirs.__call__)(x))
    if not int8:
        return
    assert_bits_equal(run(variables, x[7:8]), found[7:8])
    assert conversion_report(ours, inputs=(x,)).replaced == ()
    report = conversion_report(ours, quantize="int8", inputs=(x,))
    assert [d.after for d in report.replaced] == [linen.QuantMoE]
    quantized = convert(ours, quantize="int8")
    changed = quantize_variables(quantized, variables, x)
    assert sorted(changed["params"]) == ["router", "router_bias"]
    assert changed["quantized"]["shared_down"].dtype == changed["quantized"]["gate_up"].dtype == jnp.int8
    convert(theirs, quantize="int8")
    y = jax.jit(quantized.apply)(changed, x)
    assert_bits_equal(y, jax.jit(theirs.__call__)(x))
    assert 0 < np.abs(y - found).max() < 0.1 * np.abs(found).max()


class Net(flax_linen.Module):
    traced: bool = False

    @flax_linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inner = (flax_linen.jit if self.traced else lambda cls: cls)(flax_linen.Dense)(16, name="inner")
        x = flax_linen.LayerNorm()(flax_linen.relu(inner(x)) + inner(x[:, ::-1]))
        return flax_linen.Dense(3, name="head", use_bias=False)(x)


def parameters(model: Any, x: jax.Array) -> Any:
    """Random ones, without compiling the initializers."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    return jax.tree.map(lambda leaf: normal(1, *leaf.shape) / leaf.shape[0] ** 0.5, shapes)


@pytest.mark.tier("full")
@pytest.mark.parametrize("calibrated", [(True,), full_only((False, True))])
def test_a_model_is_converted_with_its_variables(calibrated: tuple[bool, ...]) -> None:
    model, x = Net(), normal(0, 6, 16) * jnp.arange(16)
    variables = parameters(model, x)
    rules = {"head": False}
    report = conversion_report(model, rules, quantize="int8", inputs=(x,))
    assert {(d.path, d.after) for d in report.replaced} == {
        ("inner", linen.QuantDense), ("LayerNorm_0", linen.LayerNorm),
    }  # fmt: skip
    converted = convert(model, rules, quantize="int8")
    for calibrate in calibrated:
        found = quantize_variables(converted, variables, x, calibrate=calibrate)
        assert "kernel" in variables["params"]["inner"]
        assert sorted(found["params"]["inner"]) == ["bias"]
        assert "kernel" in found["params"]["head"]
        scale = found["quantized"]["inner"]["smooth_scale"]
        assert bool((scale != 1).any()) == calibrate
        # What a rule leaves is covered by `invariant` around the whole.
        run = jax.jit(bijax.invariant(converted.apply))
        y, exact = np.asarray(run(found, x)), np.asarray(jax.jit(model.apply)(variables, x))
        assert 0 < np.abs(y - exact).max() < 0.1 * np.abs(exact).max()
        if calibrate:
            assert_bits_equal(run(found, x[2:3]), y[2:3])
        layer = nnx.QuantLinear.from_kernel(
            variables["params"]["inner"]["kernel"], variables["params"]["inner"]["bias"],
            smooth_scale=scale if calibrate else None,
        )  # fmt: skip
        assert_bits_equal(linen.QuantDense(16).apply(of(found, "inner"), x), layer(x))
    shapes = jax.eval_shape(converted.init, jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, shapes)
    assert_bits_equal(quantize_variables(converted, variables, jax.ShapeDtypeStruct((1, 16), "float32"))["params"],
                      found["params"])  # fmt: skip


def of(variables: dict[str, Any], name: str) -> dict[str, Any]:
    return {collection: tree[name] for collection, tree in variables.items()}


def test_bad_input() -> None:
    x = jnp.ones((2, 16))
    model = convert(Net(), quantize="int8")
    variables = parameters(Net(), x)
    with pytest.raises(ValueError, match=r"QuantDense: expected 'kernel' .* at 'inner', got variables without it"):
        model.apply(variables, x)
    with pytest.raises(ValueError, match="expected a model with int8 layers"):
        quantize_variables(Net(), variables, x)
    with pytest.raises(ValueError, match="gives nan or inf to the layer at 'inner'"):
        quantize_variables(model, variables, x * jnp.nan, calibrate=True)
    traced = convert(Net(traced=True), quantize="int8")
    with pytest.raises(TypeError, match=r"got one that JAX traces .* around 'inner'"):
        quantize_variables(traced, variables, x, calibrate=True)
    repeated = flax_linen.vmap(
        flax_linen.Dense, variable_axes={"params": 0, "quantized": 0}, split_rngs={"params": True}
    )(3)
    with pytest.raises(ValueError, match=r"a kernel of 2 dimensions at '.*', got \(2, 16, 3\)"):
        quantize_variables(convert(repeated, quantize="int8"), parameters(repeated, x), x)

"""Linear layers in int8: their numbers, whole models converted to them, and the bits of a row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from flax import nnx as flax_nnx

from bijax.testing import assert_bits_equal
from flax_layers import PLAIN, Llama, conversion_report, convert, nnx, score
from flax_layers.models.layers import Linear
from tests.arrays import on_device
from tests.layers import small_llama as small
from tests.operators import oracles


def normal(seed: int, *shape: int) -> jax.Array:
    return on_device(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.tier("full")
@pytest.mark.parametrize("smooth", [False, True], ids=["ones", "smooth scales"])
def test_numbers_of_a_layer(smooth: bool) -> None:
    kernel, bias, x = normal(0, 20, 6), normal(1, 6), normal(2, 3, 20)
    scale = jnp.exp(normal(3, 20)) if smooth else None
    layer = nnx.QuantLinear.from_kernel(kernel, bias, smooth_scale=scale)
    columns, column_scale = oracles.quantize((kernel if scale is None else kernel / scale[:, None]).T)
    assert_bits_equal((layer.weight[...], layer.weight_scale[...]), (columns.T, column_scale))
    rows, row_scale = oracles.quantize(x, scale)
    expected = oracles.quantized_product(rows, columns.T, row_scale, column_scale, bias, np.float32)
    assert_bits_equal(layer(x), expected)
    assert_bits_equal(layer(x[:1]), expected[:1])
    assert smooth or np.abs(expected - (x @ kernel + bias)).max() < 0.2
    assert np.abs(flax_nnx.with_attributes(layer, ops=PLAIN)(x) - expected).max() < 1e-5
    half = nnx.QuantLinear.from_kernel(kernel.astype(jnp.bfloat16))
    assert half(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert half(x).dtype == jnp.float32


def sequential() -> Any:
    r = flax_nnx.Rngs(0)
    shared = flax_nnx.Linear(8, 8, rngs=r)
    return flax_nnx.Sequential(shared, flax_nnx.relu, shared, flax_nnx.LayerNorm(8, rngs=r), Linear(8, 3, rngs=r))


@pytest.mark.tier("full")
def test_layers_are_converted_where_the_rules_say() -> None:
    model, x = sequential(), normal(0, 5, 8) * jnp.arange(8)
    before, graph = model(x), flax_nnx.graphdef(model)
    report = conversion_report(model, {"layers/4": False}, quantize="int8")
    assert [d.path for d in report.replaced] == ["layers/0", "layers/3"]
    assert "layers/0: Linear -> flax_layers.nnx.QuantLinear" in str(report).splitlines()[1]
    assert convert(model, {"layers/4": False}, quantize="int8", calibration=(x,)) is model
    assert flax_nnx.graphdef(model) != graph
    assert [type(layer) for layer in (model.layers[0], model.layers[3])] == [nnx.QuantLinear, nnx.LayerNorm]
    assert model.layers[2] is model.layers[0]
    assert type(model.layers[4]) is Linear
    # The first column of the first input is zeros, and has a scale of 1; both calls of the shared layer count.
    assert float(model.layers[0].smooth_scale[...][0]) != 1
    assert 0 < np.abs(model(x) - before).max() < 0.05 * np.abs(before).max()
    assert conversion_report(model).replaced == ()
    assert_bits_equal(jax.jit(lambda x: model(x))(x), model(x))


@pytest.mark.tier("full")
def test_calibration_evens_out_columns() -> None:
    """A column a thousand times larger than the others takes their accuracy away, but for the smooth scales."""
    kernel, x = normal(0, 16, 4), normal(1, 64, 16).at[:, 3].multiply(1000)
    kernel = kernel.at[3].divide(1000)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    errors = []
    for batch in (None, (x,)):
        layer = flax_nnx.Linear(16, 4, use_bias=False, rngs=flax_nnx.Rngs(0))
        layer.kernel.set_value(kernel)
        convert(layer, quantize="int8", calibration=batch)
        assert type(layer) is nnx.QuantLinear
        errors.append(np.abs(np.asarray(layer(x)) - exact).max())
    assert errors[1] < errors[0] / 10


class Traced(flax_nnx.Module):
    def __init__(self) -> None:
        self.inner = flax_nnx.Linear(2, 2, rngs=flax_nnx.Rngs(0))
        self.unused = flax_nnx.Linear(2, 2, rngs=flax_nnx.Rngs(0))

    def __call__(self, x: jax.Array, traced: bool = False) -> Any:
        return jax.jit(self.inner)(x) if traced else self.inner(x)


def test_bad_input() -> None:
    def odd(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    own = flax_nnx.Linear(2, 2, dot_general=odd, rngs=flax_nnx.Rngs(0))
    x = jnp.ones((1, 2))
    for model, rules, options, error, message in (
        (Traced(), None, {"quantize": "int4"}, ValueError, "must be None or 'int8', got 'int4'"),
        (Traced(), None, {"calibration": (x,)}, ValueError, "belongs to quantize='int8'"),
        (linen.Dense(2), None, {"quantize": "int8", "calibration": (x,)}, TypeError, "calibrate with quantize_variab"),
        (own, None, {"quantize": "int8"}, ValueError, "dot_general"),
        (Traced(), None, {"quantize": "int8", "calibration": (x,)}, ValueError, "does not reach .*'unused'"),
        (Traced(), {"unused": False}, {"quantize": "int8", "calibration": (x * jnp.nan,)}, ValueError, "nan or inf"),
        (Traced(), {"unused": False}, {"quantize": "int8", "calibration": (x, True)}, TypeError, "JAX traces"),
        (flax_nnx.List([]), None, {"quantize": "int8", "calibration": (x,)}, ValueError, "without any"),
    ):
        before = type(model)
        with pytest.raises(error, match=message):
            convert(model, rules, **options)
        assert type(model) is before
        assert not isinstance(model, Traced) or type(model.inner) is flax_nnx.Linear
    for make, message in (
        (lambda: nnx.QuantLinear.from_kernel(jnp.ones(3)), r"\(in, out\), got \(3,\)"),
        (lambda: nnx.QuantLinear.from_kernel(jnp.ones((3, 2)), jnp.ones(3)), r"shape \(2,\)"),
        (lambda: nnx.QuantLinear.from_kernel(jnp.ones((3, 2)))(jnp.ones((1, 2))), r"\(\.\.\., 3\), got \(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.tier("full")
def test_bits_of_a_quantised_model() -> None:
    """Sequences alone, and as a batch prefilled in chunks into a paged cache; the demo has the control."""
    config, rows = small.SHALLOW, small.sequences()[1:3]
    checkpoint = small.Checkpoint(config, small.weights(config), tokenizer=None)  # type: ignore[arg-type]
    model = convert(Llama.from_checkpoint(checkpoint), quantize="int8")
    assert type(model.blocks[0].mlp.down) is nnx.QuantLinear
    (alone,) = score(model, [rows[0].tolist()])
    assert_bits_equal(small.in_chunks(model, rows, 16, small.paged)[0], alone)

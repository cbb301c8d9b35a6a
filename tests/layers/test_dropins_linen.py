"""The drop-ins for linen: the originals' parameters and numbers, and rows that do not depend on their batch."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import bijax
from bijax.testing import assert_bits_equal
from flax_layers import linen
from tests.layers import drop_ins
from tests.layers.drop_ins import rows
from tests.tiers import full_only

K = 300
KEY = jax.random.key(7)
BF16, F16 = jnp.bfloat16, jnp.float16


def two_dots(*args: Any, **kwargs: Any) -> jax.Array:
    return 2 * jax.lax.dot_general(*args, **kwargs)


# Name, arguments, shape of the input; several for a layer sweep its own arguments.
NUMBERS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("Dense", {"features": 33}, (5, K)),
    ("Dense", {"features": 1, "use_bias": False, "param_dtype": BF16}, (2, 3, 70)),
    ("Dense", {"features": 9, "dtype": BF16, "precision": jax.lax.Precision.HIGHEST}, (70,)),
    ("Dense", {"features": 9, "dot_general": two_dots}, (4, 70)),
    ("DenseGeneral", {"features": (3, 4), "axis": (-2, -1)}, (5, 6, 50)),
    ("DenseGeneral", {"features": 5, "axis": (1,), "batch_dims": (0,), "bias_init": nn.initializers.ones}, (3, 70, 2)),
    ("Einsum", {"shape": (4, 70, 6), "einsum_str": "bthd,hdf->btf"}, (2, 3, 4, 70)),
    ("Conv", {"features": 6, "kernel_size": (3,), "padding": "CAUSAL"}, (2, 9, 40)),
    ("Conv", {"features": 4, "kernel_size": (3, 2), "strides": 2, "feature_group_count": 2}, (2, 6, 7, 8)),
    ("Conv", {"features": 4, "kernel_size": (3,), "kernel_dilation": 2, "dtype": BF16, "padding": "CIRCULAR"}, (9, 8)),
    ("ConvTranspose", {"features": 4, "kernel_size": (3,), "strides": (2,)}, (2, 6, 20)),
    ("ConvLocal", {"features": 4, "kernel_size": (3,)}, (2, 6, 20)),
    ("RMSNorm", {"scale_init": nn.initializers.normal(1.0)}, (5, K)),
    ("RMSNorm", {"use_scale": False, "dtype": BF16, "reduction_axes": (-2, -1)}, (4, 3, 40)),
    ("LayerNorm", {"bias_init": nn.initializers.normal(1.0)}, (5, K)),
    ("LayerNorm", {"use_fast_variance": False, "use_bias": False, "epsilon": 1e-3, "dtype": F16}, (4, 50)),
    ("GroupNorm", {"num_groups": 4}, (2, 5, 24)),
    ("InstanceNorm", {}, (2, 9, 24)),
    ("BatchNorm", {"use_running_average": True}, (5, 24)),
    ("MultiHeadDotProductAttention", {"num_heads": 2, "dtype": BF16, "normalize_qk": True, "use_bias": False}, (3, 32)),
    ("LSTMCell", {"features": 24, "activation_fn": nn.relu, "dtype": BF16}, (5, 40)),
    ("GRUCell", {"features": 24}, (5, 40)),
    ("SimpleCell", {"features": 24, "residual": True}, (5, 40)),
    ("ConvLSTMCell", {"features": 6, "kernel_size": (3,)}, (2, 7, 20)),
]


def names(case: tuple[str, dict[str, Any], tuple[int, ...]]) -> str:
    return "-".join([case[0], *case[1]])


def pair(name: str, arguments: dict[str, Any]) -> tuple[Any, Any]:
    return getattr(linen, name)(**arguments), getattr(nn, name)(**arguments)


def inputs(layer: Any, x: jax.Array) -> tuple[Any, ...]:
    """Everything that a layer is called with, for an input."""
    if isinstance(layer, nn.RNNCellBase):
        return (layer.initialize_carry(jax.random.key(3), x.shape), x)
    return (x,)


def function(layer: Any, variables: Any) -> Callable[[jax.Array], Any]:
    """The layer as a function of its input; a cell starts with its carry, and the last result is the output."""

    def call(x: jax.Array) -> Any:
        if isinstance(layer, nn.RNNCellBase):
            carry = jax.tree.map(lambda c: c + 0.5, inputs(layer, x)[0])
            return layer.apply(variables, carry, x)[1]
        return layer.apply(variables, x)

    return call


# Of each layer one case with its own arguments, of the simplest one two.
FEW = [case for i, case in enumerate(NUMBERS) if case[0] not in {c[0] for c in NUMBERS[i + 1 :]} or not i]


@pytest.mark.tier(
    "full", fast=("RMSNorm-use_scale-dtype-reduction_axes", "LayerNorm-use_fast_variance-use_bias-epsilon-dtype")
)
@pytest.mark.parametrize("case", NUMBERS, ids=names)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parameters_and_numbers_are_those_of_the_original(case: Any) -> None:
    name, arguments, shape = case
    ours, theirs = pair(name, arguments)
    x = rows(*shape)
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)

    def initialize(x: jax.Array) -> Any:
        return [layer.init(KEY, *inputs(layer, x)) for layer in (ours, theirs)]

    def call(variables: Any, x: jax.Array) -> Any:
        return [function(layer, variables)(x) for layer in (ours, theirs)]

    variables, expected = jax.jit(initialize)(x)
    drop_ins.assert_same_bits(variables, expected)
    found, plain = jax.jit(call)(expected, x)
    with jax.enable_x64(True):
        wide = getattr(nn, name)(**{**arguments, "param_dtype": jnp.float64, "dtype": jnp.float64})
        exact = jax.jit(lambda v, x: function(wide, v)(x))(drop_ins.widened(expected), drop_ins.widened(x))
    drop_ins.assert_close_to(found, plain, exact)


BITS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("Dense", {"features": 33}, (8, K)),
    ("DenseGeneral", {"features": (3, 4), "axis": (-2, -1)}, (8, 6, 50)),
    ("Conv", {"features": 4, "kernel_size": (3, 3), "strides": 2, "feature_group_count": 2}, (8, 6, 7, 80)),
    ("RMSNorm", {"scale_init": nn.initializers.normal(1.0)}, (8, K)),
    ("LayerNorm", {"bias_init": nn.initializers.normal(1.0)}, (8, K)),
    ("GroupNorm", {"num_groups": 4}, (8, 20, 24)),
    ("BatchNorm", {"use_running_average": True, "bias_init": nn.initializers.normal(1.0)}, (8, K)),
    ("MultiHeadDotProductAttention", {"num_heads": 4}, (8, 5, 160)),
    ("Einsum", {"shape": (4, 70, 6), "einsum_str": "bthd,hdf->btf"}, (8, 3, 4, 70)),
    ("ConvTranspose", {"features": 4, "kernel_size": (3,), "strides": (2,)}, (8, 6, 40)),
    ("ConvLocal", {"features": 4, "kernel_size": (3,)}, (8, 6, 40)),
    ("InstanceNorm", {"bias_init": nn.initializers.normal(1.0)}, (8, 20, 24)),
    ("GRUCell", {"features": 40}, (8, K)),
    ("LSTMCell", {"features": 40}, (8, K)),
]


@pytest.mark.tier("full", fast=("RMSNorm-scale_init",))
@pytest.mark.parametrize("case", BITS, ids=names)
def test_rows_do_not_depend_on_their_batch(case: Any) -> None:
    name, arguments, shape = case
    layer, _ = pair(name, arguments)
    x = rows(*shape)
    variables = jax.jit(lambda x: layer.init(KEY, *inputs(layer, x)))(x)
    drop_ins.assert_invariant(function(layer, variables), x, sizes=(3, 8) if name == "Dense" else drop_ins.SIZES)


def test_an_original_differs() -> None:
    layer, x = nn.Dense(33), rows(8, K)
    assert not drop_ins.is_invariant(function(layer, layer.init(KEY, x)), x)


@pytest.mark.tier("full")
def test_embed_and_attend() -> None:
    ours, theirs = pair("Embed", {"num_embeddings": 77, "features": K})
    ids = drop_ins.tokens(8, 3, below=77)
    variables = ours.init(KEY, ids)
    drop_ins.assert_same_bits(variables, theirs.init(KEY, ids))
    assert_bits_equal(ours.apply(variables, ids), theirs.apply(variables, ids))
    for method in ("attend", nn.Embed.attend):  # a method of the original's class is one of the drop-in, too
        drop_ins.assert_invariant(lambda x, m=method: ours.apply(variables, x, method=m), rows(8, K))


@settings(max_examples=6, deadline=None)
@given(
    features=st.one_of(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)),
    axis=st.sampled_from([-1, (-1,), (1, 2), (-2, -1), (2, 0), (0, 1, 2)]),
    use_bias=st.booleans(),
    dtype=st.sampled_from([None, jnp.float32, BF16, F16]),
    param_dtype=st.sampled_from([jnp.float32, BF16]),
    initializer=st.sampled_from([nn.initializers.ones, nn.with_partitioning(nn.initializers.zeros, ("model",))]),
)
def test_dense_general_takes_the_arguments_of_the_original(axis: Any, initializer: Any, **arguments: Any) -> None:
    arguments = {**arguments, "axis": axis, "bias_init": initializer}
    ours, theirs = (
        jax.eval_shape(lambda x, one=layer: one.init_with_output(KEY, x), jax.ShapeDtypeStruct((2, 3, 4), jnp.float32))
        for layer in pair("DenseGeneral", arguments)
    )
    assert ours == theirs


def test_sharding_metadata_stays() -> None:
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    ours, theirs = pair("Dense", {"features": 4, "kernel_init": init})
    x = rows(2, 3)
    kernel = ours.init(KEY, x)["params"]["kernel"]
    assert isinstance(kernel, nn.Partitioned)
    assert kernel.names == (None, "model")
    assert nn.get_partition_spec(ours.init(KEY, x)) == nn.get_partition_spec(theirs.init(KEY, x))


def block(layers: Any) -> type[nn.Module]:
    """A residual block of the layers of one package."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
            y = layers.Dense(64)(layers.LayerNorm()(x))
            return layers.Dense(x.shape[-1])(nn.relu(y)), None

    return Block


def stacked(layers: Any) -> nn.Module:
    lifted = nn.remat(block(layers), prevent_cse=False)
    return nn.scan(lifted, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()


@pytest.mark.tier("full")
@pytest.mark.parametrize("every", [False, full_only(True)], ids=["of a block", "eager and of a cell"])
def test_automatic_names_and_initial_values(every: bool) -> None:
    x = rows(2, 8)
    found, expected = jax.jit(lambda x: [block(package)().init(KEY, x) for package in (linen, nn)])(x)
    drop_ins.assert_same_bits(found, expected)
    if not every:
        return
    drop_ins.assert_same_bits(linen.Dense(4).init(KEY, x), nn.Dense(4).init(KEY, x))
    ours, theirs = pair("LSTMCell", {"features": 4})
    found, expected = jax.jit(lambda x: [one.init(KEY, *inputs(one, x)) for one in (ours, theirs)])(x)
    drop_ins.assert_same_bits(found, expected)


@pytest.mark.tier("full")
@pytest.mark.parametrize("lift", [nn.jit, nn.remat, stacked], ids=["jit", "remat", "scan of remat"])
@pytest.mark.parametrize("gradient", [False, True], ids=["results", "and gradients"])
def test_lifted(gradient: bool, lift: Callable[..., Any]) -> None:
    ours, theirs = (lift(p) if lift is stacked else lift(block(p))() for p in (linen, nn))
    x = rows(8, K)
    variables, expected = jax.jit(lambda x: (ours.init(KEY, x), theirs.init(KEY, x)))(x)
    drop_ins.assert_same_bits(variables, expected)
    drop_ins.assert_invariant(lambda x: ours.apply(variables, x)[0], x, gradient=gradient)


@pytest.mark.tier("full")
def test_rnn() -> None:
    ours, theirs = (nn.RNN(p.OptimizedLSTMCell(40)) for p in (linen, nn))
    x = rows(8, 3, K)
    variables, expected = jax.jit(lambda x: (ours.init(KEY, x), theirs.init(KEY, x)))(x)
    drop_ins.assert_same_bits(variables, expected)
    drop_ins.assert_invariant(lambda x: ours.apply(variables, x), x)


@pytest.mark.tier("full")
def test_vmap_scan_and_jit_give_the_same_bits() -> None:
    layer, x = linen.Dense(33), rows(8, K)
    variables = layer.init(KEY, x)
    expected = layer.apply(variables, x)
    one = lambda x: layer.apply(variables, x)  # noqa: E731
    assert_bits_equal(jax.jit(jax.vmap(one))(x), expected)
    assert_bits_equal(jax.jit(lambda x: jax.lax.scan(lambda c, x: (c, one(x)), None, x)[1])(x), expected)
    gradient = jax.grad(lambda x: layer.apply(variables, x).sum())
    assert_bits_equal(jax.vmap(gradient)(x), jax.jit(gradient)(x))


def test_decoding_with_a_cache() -> None:
    ours, theirs = pair("MultiHeadDotProductAttention", {"num_heads": 2, "decode": True})
    x = rows(8, 1, 160)
    variables, expected = jax.jit(lambda x: [one.init(KEY, x) for one in (ours, theirs)])(jnp.ones((8, 4, 160)))
    drop_ins.assert_same_bits(variables, expected)
    full = jax.jit(lambda v, x: ours.apply(v, x, mutable=["cache"]))(variables, x)
    one = jax.tree.map(lambda a: a[:1] if a.ndim == 4 else a, variables["cache"])
    alone = jax.jit(lambda v, x: ours.apply(v, x, mutable=["cache"]))({**variables, "cache": one}, x[:1])
    assert_bits_equal(full[0][:1], alone[0])


def test_intermediates_are_captured_once() -> None:
    x = rows(2, 8)
    trees = []
    for package in (linen, nn):
        model = block(package)()

        def captured(x: jax.Array, model: Any = model) -> Any:
            return model.apply(model.init(KEY, x), x, capture_intermediates=True)[1]

        trees.append(jax.tree.structure(jax.eval_shape(captured, x)))
    assert trees[0] == trees[1]


def test_parameters_may_start_in_apply() -> None:
    cell, x = linen.LSTMCell(4), rows(2, 3)
    carry = cell.initialize_carry(KEY, x.shape)
    _, variables = cell.apply({}, carry, x, rngs={"params": KEY}, mutable=["params"])
    assert variables["params"]["hi"]["kernel"].shape == (4, 4)


def test_the_choice_of_allowed_operations_stays() -> None:
    def promote(*arrays: Any, dtype: Any = None) -> Any:
        return [jax.lax.approx_max_k(a, a.shape[1])[0] if a is not None and a.ndim == 2 else a for a in arrays]

    layer, x = linen.Dense(4, promote_dtype=promote), rows(2, 8)
    variables = nn.Dense(4).init(KEY, x)
    with pytest.raises(bijax.NotInvariantError, match="approx_top_k"):
        jax.jit(layer.apply)(variables, x)
    bijax.invariant(jax.jit(layer.apply), allow=("approx_top_k",))(variables, x)


def test_classes() -> None:
    for original, ours in linen.DROP_INS.items():
        assert ours.__name__ == original.__name__
        assert ours.__doc__ is not None
        assert "Guarantee:" in ours.__doc__
        assert pickle.loads(pickle.dumps(ours)) is ours
        assert getattr(linen, ours.__name__) is ours
    layer = linen.Dense(3)
    assert copy.deepcopy(layer) == layer
    assert hash(layer) == hash(linen.Dense(3))


def test_methods_whose_body_runs_later_are_refused() -> None:
    class Own(nn.Dense):
        def rows(self, x: jax.Array) -> Iterator[jax.Array]:
            yield self(x)

    with pytest.raises(TypeError, match=r"Own.rows, whose body runs after the call; let its name start with"):
        linen.invariant_layer(Own)


def test_what_is_no_class_of_modules_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a subclass of flax.linen.Module"):
        linen.invariant_layer(nn.Dense(3))

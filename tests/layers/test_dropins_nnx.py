"""The drop-ins for nnx: the originals' parameters and numbers, and rows that do not depend on their batch."""

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx as flax_nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import bijax
from bijax.testing import assert_bits_equal
from flax_layers import nnx
from tests.layers import drop_ins
from tests.layers.drop_ins import rows
from tests.tiers import full_only, tiered

K = 300
BF16, F16 = jnp.bfloat16, jnp.float16
NORMAL = flax_nnx.initializers.normal(1.0)

# Name, arguments by position, arguments by name, shape of the input.
type Case = tuple[str, tuple[Any, ...], dict[str, Any], tuple[int, ...]]
NUMBERS: list[Case] = [
    ("Linear", (K, 33), {"bias_init": NORMAL}, (5, K)),
    ("Linear", (70, 9), {"use_bias": False, "dtype": BF16, "preferred_element_type": jnp.float32}, (2, 3, 70)),
    ("LinearGeneral", ((6, 50), (3, 4)), {"axis": (-2, -1)}, (5, 6, 50)),
    ("LinearGeneral", (70, 5), {"axis": 1, "batch_axis": {0: 3}}, (3, 70)),
    ("Conv", (40, 6, (3,)), {"padding": "CAUSAL"}, (2, 9, 40)),
    ("Conv", (8, 4, (3, 2)), {"strides": 2, "feature_group_count": 2, "dtype": BF16}, (2, 6, 7, 8)),
    ("RMSNorm", (K,), {"scale_init": NORMAL}, (5, K)),
    ("LayerNorm", (50,), {"use_fast_variance": False, "use_bias": False, "epsilon": 1e-3, "dtype": F16}, (4, 50)),
    ("GroupNorm", (24,), {"num_groups": 4, "bias_init": NORMAL}, (2, 5, 24)),
    ("BatchNorm", (24,), {"use_running_average": True}, (5, 24)),
    ("MultiHeadAttention", (4, 32), {"decode": False, "num_kv_heads": 2, "normalize_qk": True}, (2, 5, 32)),
    ("GRUCell", (40, 24), {"dtype": BF16}, (5, 40)),
    ("SimpleCell", (40, 24), {"residual": True}, (5, 40)),
]


def names(case: Case) -> str:
    return "-".join([case[0], *case[2]])


def pair(name: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    ours, theirs = (getattr(p, name)(*args, **kwargs, rngs=flax_nnx.Rngs(0)) for p in (nnx, flax_nnx))
    return ours, theirs


def function(layer: Any) -> Callable[[jax.Array], Any]:
    """The layer as a function of its input; a cell starts with a carry, and the last result is the output."""

    def call(x: jax.Array) -> Any:
        if isinstance(layer, flax_nnx.RNNCellBase):
            carry = layer.initialize_carry(x.shape, flax_nnx.Rngs(1))
            return layer(jax.tree.map(lambda c: c + 0.5, carry), x)[1]
        return layer(x)

    return call


def functional(module: flax_nnx.Module, call: Callable[[Any, jax.Array], Any]) -> Callable[[jax.Array], Any]:
    """Returns a function of arrays that JAX may trace although it calls an nnx transform."""
    graph, state = flax_nnx.split(module)
    return lambda x: call(flax_nnx.merge(graph, state, copy=True), x)


@pytest.mark.tier("full", fast=("Linear-bias_init",))
@pytest.mark.parametrize("case", NUMBERS, ids=names)
def test_parameters_and_numbers_are_those_of_the_original(case: Case) -> None:
    name, args, kwargs, shape = case
    ours, theirs = pair(name, *args, **kwargs)
    x = rows(*shape)
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    drop_ins.assert_same_bits(flax_nnx.state(ours), flax_nnx.state(theirs))
    found, plain = jax.jit(lambda x: [function(layer)(x) for layer in (ours, theirs)])(x)
    with jax.enable_x64(True):
        exact_kwargs = {**kwargs, "param_dtype": jnp.float64, "dtype": jnp.float64, "rngs": flax_nnx.Rngs(0)}
        if "preferred_element_type" in kwargs:
            exact_kwargs["preferred_element_type"] = jnp.float64
        wide = getattr(flax_nnx, name)(*args, **exact_kwargs)
        flax_nnx.update(wide, drop_ins.widened(flax_nnx.state(theirs)))
        exact = jax.jit(function(wide))(drop_ins.widened(x))
    drop_ins.assert_close_to(found, plain, exact)


BITS: list[Case] = [
    ("Linear", (K, 33), {}, (8, K)),
    ("LinearGeneral", ((6, 50), (3, 4)), {"axis": (-2, -1)}, (8, 6, 50)),
    ("LayerNorm", (K,), {"bias_init": NORMAL}, (8, K)),
    ("GRUCell", (40, 150), {}, (8, 40)),
]


# A cell is in a test of its own; products are in that of transforms.
@pytest.mark.parametrize("case", tiered(BITS, fast=BITS[2:3]), ids=names)
def test_rows_do_not_depend_on_their_batch(case: Case) -> None:
    name, args, kwargs, shape = case
    layer, _ = pair(name, *args, **kwargs)
    drop_ins.assert_invariant(function(layer), rows(*shape))


def test_an_original_differs() -> None:
    _, linear = pair("Linear", K, 33)
    assert not drop_ins.is_invariant(linear, rows(8, K))


@pytest.mark.tier("full")
def test_embed_and_attend() -> None:
    ours, theirs = pair("Embed", 77, K)
    ids = drop_ins.tokens(8, 3, below=77)
    assert_bits_equal(ours(ids), theirs(ids))
    drop_ins.assert_invariant(ours.attend, rows(8, K))


@pytest.mark.tier("full")
def test_rotary_embedding() -> None:
    x = rows(4, 6, 8)
    assert_bits_equal(nnx.RoPE()(x)[:1], nnx.RoPE()(x[:1]))
    assert jnp.allclose(nnx.RoPE()(x), flax_nnx.RoPE()(x), rtol=1e-5, atol=1e-5)


@settings(max_examples=6, deadline=None)
@given(
    out_features=st.one_of(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)),
    axis=st.sampled_from([-1, (-1,), (1, 2), (-2, -1)]),
    use_bias=st.booleans(),
    dtype=st.sampled_from([None, jnp.float32, BF16, F16]),
    param_dtype=st.sampled_from([jnp.float32, BF16]),
)
def test_linear_general_takes_the_arguments_of_the_original(axis: Any, out_features: Any, **arguments: Any) -> None:
    in_features = (3, 4) if axis in ((1, 2), (-2, -1)) else 4

    def make_and_call(package: Any) -> Any:
        layer = package.LinearGeneral(in_features, out_features, axis=axis, rngs=flax_nnx.Rngs(0), **arguments)
        return flax_nnx.to_pure_dict(flax_nnx.state(layer)), layer(jnp.ones((2, 3, 4)))

    assert jax.eval_shape(lambda: make_and_call(nnx)) == jax.eval_shape(lambda: make_and_call(flax_nnx))


def test_sharding_metadata_stays() -> None:
    layers = pair("Linear", 3, 4, kernel_metadata={"note": "kept"})
    assert [layer.kernel.get_metadata("note") for layer in layers] == ["kept", "kept"]


@pytest.mark.tier("full")
def test_a_checkpoint_of_the_original_loads() -> None:
    ours = nnx.MultiHeadAttention(4, 32, decode=False, rngs=flax_nnx.Rngs(5))
    _, theirs = pair("MultiHeadAttention", 4, 32, decode=False)
    flax_nnx.update(ours, flax_nnx.state(theirs))
    drop_ins.assert_same_bits(flax_nnx.state(ours), flax_nnx.state(theirs))
    x = rows(2, 5, 32)
    found, expected = jax.jit(lambda x: (ours(x), theirs(x)))(x)
    assert jnp.allclose(found, expected, rtol=1e-5, atol=1e-5)


class Block(flax_nnx.Module):
    """A residual block of drop-ins."""

    def __init__(self, rngs: flax_nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(K, rngs=rngs)
        self.up = nnx.Linear(K, 64, rngs=rngs)
        self.down = nnx.Linear(64, K, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(flax_nnx.relu(self.up(self.norm(x))))


@pytest.mark.parametrize("gradients", [False, full_only(True)], ids=["results", "and gradients"])
def test_jit_vmap_and_grad(gradients: bool) -> None:
    block, x = Block(flax_nnx.Rngs(0)), rows(8, K)
    expected = flax_nnx.jit(block)(x)
    assert_bits_equal(jax.jit(jax.vmap(block))(x), expected)
    graph, state = flax_nnx.split(block)
    assert_bits_equal(jax.jit(lambda s, x: flax_nnx.merge(graph, s)(x))(state, x[2:3]), expected[2:3])

    if not gradients:
        return

    def loss(block: Block, x: jax.Array) -> jax.Array:
        return (block(x) ** 2).sum()

    outside = jax.jit(lambda s, x: jax.grad(lambda s: loss(flax_nnx.merge(graph, s), x))(s))(state, x)
    inside = flax_nnx.jit(flax_nnx.grad(loss))(block, x)
    drop_ins.assert_same_bits(jax.tree.leaves(inside), jax.tree.leaves(outside))


@pytest.mark.tier("full")
@pytest.mark.parametrize("gradient", [False, full_only(True)], ids=["results", "and gradients"])
def test_scan_over_layers_and_remat(gradient: bool) -> None:
    @flax_nnx.split_rngs(splits=3)
    @flax_nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs: flax_nnx.Rngs) -> Block:
        return Block(rngs)

    layers = stack(flax_nnx.Rngs(0))

    @flax_nnx.scan(in_axes=(0, flax_nnx.Carry), out_axes=flax_nnx.Carry)
    @flax_nnx.remat
    def run(layer: Block, x: jax.Array) -> jax.Array:
        return layer(x)

    drop_ins.assert_invariant(functional(layers, run), rows(8, K), gradient=gradient)


@pytest.mark.tier("full")
@pytest.mark.parametrize("gradient", [False, full_only(True)], ids=["results", "and gradients"])
def test_rnn(gradient: bool) -> None:
    rnn = flax_nnx.RNN(nnx.GRUCell(K, 40, rngs=flax_nnx.Rngs(0)), rngs=flax_nnx.Rngs(1))
    drop_ins.assert_invariant(functional(rnn, lambda rnn, x: rnn(x)), rows(8, 3, K), gradient=gradient)


def test_the_choice_of_allowed_operations_stays() -> None:
    def promote(arrays: Any, dtype: Any = None) -> Any:
        return [jax.lax.approx_max_k(a, a.shape[1])[0] if a is not None and a.ndim == 2 else a for a in arrays]

    layer, x = nnx.Linear(8, 4, promote_dtype=promote, rngs=flax_nnx.Rngs(0)), rows(2, 8)
    with pytest.raises(bijax.NotInvariantError, match="approx_top_k"):
        jax.jit(lambda x: layer(x))(x)
    bijax.invariant(jax.jit(lambda x: layer(x)), allow=("approx_top_k",))(x)


def test_methods_of_an_own_layer() -> None:
    @nnx.invariant_layer
    class Projection(flax_nnx.Module):
        def __init__(self, rngs: flax_nnx.Rngs) -> None:
            self.kernel = flax_nnx.Param(rngs.params.normal((K, 33)))

        def init_state(self) -> bool:
            return bijax.is_batch_invariant_mode_enabled()

        @flax_nnx.jit
        def project(self, x: jax.Array) -> jax.Array:
            return x @ self.kernel[...]

        @property
        def inside(self) -> bool:
            return bijax.is_batch_invariant_mode_enabled()

    layer = Projection(flax_nnx.Rngs(0))
    assert not layer.init_state()
    assert not layer.inside
    drop_ins.assert_invariant(functional(layer, Projection.project), rows(8, K))


def test_callable_attributes_of_a_class_stay() -> None:
    class Scale:
        def __call__(self, x: jax.Array) -> jax.Array:
            return 2 * x

    @nnx.invariant_layer
    class Own(flax_nnx.Module):
        act = functools.partial(jax.nn.gelu, approximate=False)
        scale = Scale()

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.scale(self.act(x))

    drop_ins.assert_invariant(Own(), rows(8, 5))


def test_methods_whose_body_runs_later_are_refused() -> None:
    class Own(flax_nnx.Linear):
        def rows(self, x: jax.Array) -> Iterator[jax.Array]:
            yield self(x)

    class Waiting(flax_nnx.Linear):
        async def wait(self, x: jax.Array) -> jax.Array:
            return self(x)

    before = Own.__call__
    for cls, name in ((Own, "rows"), (Waiting, "wait")):
        with pytest.raises(TypeError, match=f"{name}, whose body runs after the call; let its name start with"):
            nnx.invariant_layer(cls)
    assert Own.__call__ is before


def test_classes() -> None:
    for original, ours in nnx.DROP_INS.items():
        assert ours.__name__ == original.__name__
        assert ours.__doc__ is not None
        assert "Guarantee:" in ours.__doc__
        assert pickle.loads(pickle.dumps(ours)) is ours
        assert getattr(nnx, ours.__name__) is ours
    layer, x = nnx.Linear(4, 3, rngs=flax_nnx.Rngs(0)), rows(2, 4)
    for twin in (copy.deepcopy(layer), flax_nnx.clone(layer)):
        assert type(twin) is nnx.Linear
        assert_bits_equal(twin(x), layer(x))


def test_what_is_no_class_of_modules_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a subclass of flax.nnx.Module"):
        nnx.invariant_layer(lambda x: x)

"""Each layer: its numbers, its bits, and what it refuses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bijax.testing import assert_batch_invariant, assert_bits_equal, batch_variance_report
from flax_layers import INVARIANT, PLAIN, Ops
from flax_layers.models.layers import MLP, Attention, Embed, Linear, RMSNorm, RotaryEmbedding
from flax_layers.ops import PlainOps
from tests.layers.parameters import filled

FEATURES = 192
SIZES = (3, 33)
KINDS = ("permuted", "nan")


def linear(ops: Ops) -> Any:
    return filled(lambda: Linear(FEATURES, 77, ops=ops, rngs=nnx.Rngs(0)))


def rms_norm(ops: Ops) -> Any:
    return filled(lambda: RMSNorm(FEATURES, ops=ops, rngs=nnx.Rngs(0)))


def mlp(ops: Ops) -> Any:
    return filled(lambda: MLP(FEATURES, 77, ops=ops, rngs=nnx.Rngs(0)))


def attend(ops: Ops) -> Callable[[jax.Array], jax.Array]:
    layer: Embed = filled(lambda: Embed(77, FEATURES, ops=ops, rngs=nnx.Rngs(0)))
    return layer.attend


def attention(ops: Ops) -> Callable[[jax.Array], jax.Array]:
    heads = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 32}
    layer = filled(lambda: Attention(FEATURES, **heads, ops=ops, rngs=nnx.Rngs(0)))
    rotary = RotaryEmbedding(32, 128)

    def call(x: jax.Array) -> jax.Array:
        return layer(x, rotary(jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])))

    return call


def rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.tier("full", fast=("linear",))
@pytest.mark.parametrize("make", [linear, rms_norm, mlp, attend])
def test_rows_do_not_mind_their_batch(make: Callable[[Ops], Callable[[jax.Array], jax.Array]]) -> None:
    assert_batch_invariant(make(INVARIANT), rows(8, FEATURES), batch_sizes=SIZES, neighbours=KINDS)


def test_plain_operations_replace_all_others() -> None:
    names = [name for name in dir(Ops) if not name.startswith("__")]
    kept = {name for name in names if getattr(PlainOps, name) is getattr(Ops, name)}
    assert kept == {"rotate_and_store"}  # which calls another method


@pytest.mark.tier("full")
def test_sequences_do_not_mind_their_batch() -> None:
    assert_batch_invariant(
        attention(INVARIANT), rows(4, 70, FEATURES), batch_sizes=(1, 3), modes=("jit",), neighbours=KINDS
    )


def test_plain_layers_do() -> None:
    """The control: the same sweep finds what stock JAX does."""
    reports = (
        batch_variance_report(make(PLAIN), rows(8, FEATURES), batch_sizes=SIZES, neighbours=KINDS, modes=("jit",))
        for make in (linear, rms_norm, mlp, attend)
    )
    assert not all(report.invariant for report in reports)


@pytest.mark.parametrize("ops", [INVARIANT, PLAIN])
def test_linear_is_the_product(ops: Ops) -> None:
    layer, x = linear(ops), rows(2, 3, FEATURES)
    kernel, bias = (np.asarray(p[...], np.float64) for p in (layer.kernel, layer.bias))
    y = layer(x)
    assert y.shape == (2, 3, 77)
    bound = FEATURES * 2.0**-24 * (np.abs(x) @ np.abs(kernel) + np.abs(bias))
    assert (np.abs(y - (x.astype(np.float64) @ kernel + bias)) <= bound).all()
    assert Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0)).bias is None


def test_parameters_are_those_of_flax() -> None:
    """The same keys give the same parameters under the same names, so that either may load the other's."""
    for ours, theirs in (
        (Linear(5, 4, rngs=nnx.Rngs(0)), nnx.Linear(5, 4, rngs=nnx.Rngs(0))),
        (Embed(5, 4, rngs=nnx.Rngs(0)), nnx.Embed(5, 4, rngs=nnx.Rngs(0))),
        (RMSNorm(5, rngs=nnx.Rngs(0)), nnx.RMSNorm(5, rngs=nnx.Rngs(0))),
    ):
        assert_bits_equal(*(nnx.to_pure_dict(nnx.state(layer, nnx.Param)) for layer in (ours, theirs)))


@pytest.mark.tier("full")
@pytest.mark.parametrize("ops", [INVARIANT, PLAIN])
def test_dtypes(ops: Ops) -> None:
    x = jnp.ones((2, FEATURES), jnp.bfloat16)
    assert jax.eval_shape(Linear(FEATURES, 3, ops=ops, rngs=nnx.Rngs(0)), x).dtype == jnp.float32
    assert jax.eval_shape(Linear(FEATURES, 3, dtype=jnp.bfloat16, ops=ops, rngs=nnx.Rngs(0)), x).dtype == jnp.bfloat16
    half = Linear(FEATURES, 3, dtype=jnp.float16, preferred_element_type=jnp.float32, ops=ops, rngs=nnx.Rngs(0))
    assert jax.eval_shape(half, x).dtype == jnp.float32
    assert jax.eval_shape(MLP(FEATURES, 5, dtype=jnp.bfloat16, ops=ops, rngs=nnx.Rngs(0)), x).dtype == jnp.bfloat16
    assert jax.eval_shape(RMSNorm(FEATURES, dtype=jnp.bfloat16, ops=ops, rngs=nnx.Rngs(0)), x).dtype == jnp.bfloat16
    assert (
        jax.eval_shape(Embed(5, 4, dtype=jnp.bfloat16, ops=ops, rngs=nnx.Rngs(0)), jnp.array([1])).dtype == jnp.bfloat16
    )


@pytest.mark.tier("full")
def test_gradients_of_parameters_take_micro_batches() -> None:
    """Micro-batches of 128 rows, added in order, give the gradients of the whole batch bit for bit."""
    x, weight = rows(384, FEATURES), rows(384, 77)

    @jax.jit
    @jax.grad
    def gradients(layer: nnx.Module, x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(layer(x)[:, : weight.shape[1]] * weight)

    for make in (linear, rms_norm, mlp):
        layer = make(INVARIANT)
        whole = gradients(layer, x, weight)
        parts = [gradients(layer, x[i : i + 128], weight[i : i + 128]) for i in (0, 128, 256)]
        summed = jax.tree.map(lambda a, b, c: (a + b) + c, *parts)
        assert_bits_equal(jax.tree.leaves(summed), jax.tree.leaves(whole), err_msg=make.__name__)


def test_rotary_table_is_right_to_the_last_place() -> None:
    positions = np.array([[0, 1, 77, 1023]])
    cos, sin = RotaryEmbedding(8, 1024, theta=100.0)(jnp.asarray(positions))
    angles = positions[..., None] * 100.0 ** (-np.arange(4) / 4)
    assert_bits_equal(cos, np.cos(angles).astype(np.float32))
    assert_bits_equal(sin, np.sin(angles).astype(np.float32))


@pytest.mark.parametrize("ops", [INVARIANT, PLAIN])
def test_rotation(ops: Ops) -> None:
    x = rows(2, 3, 5, 8)
    cos, sin = RotaryEmbedding(8, 16)(jnp.array([[0, 1, 2], [3, 9, 15]]))
    c, s = (np.asarray(a, np.float64)[:, :, None] for a in (cos, sin))
    first, second = x[..., :4].astype(np.float64), x[..., 4:].astype(np.float64)
    expected = np.concatenate([first * c - second * s, second * c + first * s], axis=-1)
    np.testing.assert_allclose(ops.rotate(jnp.asarray(x), cos, sin), expected, rtol=0, atol=1e-6)


def test_out_of_range_is_never_another_row() -> None:
    """Inside jit nothing can be raised, so the result says nan."""
    embed = Embed(4, 2, rngs=nnx.Rngs(0))
    found = jax.jit(embed.__call__)(jnp.array([0, 3, 4, -1, 1000]))
    assert np.isnan(found).all(axis=1).tolist() == [False, False, True, True, True]
    cos, _ = RotaryEmbedding(4, 8)(jnp.array([7, 8, -1]))
    assert np.isnan(cos).all(axis=1).tolist() == [False, True, True]


def test_errors() -> None:
    rngs = nnx.Rngs(0)
    with pytest.raises(ValueError, match=r"x must have the shape \(\.\.\., 4\), got \(2, 5\)"):
        Linear(4, 3, rngs=rngs)(jnp.ones((2, 5)))
    with pytest.raises(ValueError, match=r"\(\.\.\., 4\), got \(2, 5\)"):
        RMSNorm(4, rngs=rngs)(jnp.ones((2, 5)))
    with pytest.raises(ValueError, match=r"\(\.\.\., 4\), got \(2, 5\)"):
        Embed(7, 4, rngs=rngs).attend(jnp.ones((2, 5)))
    with pytest.raises(ValueError, match=r"from 0 to 6, got 7 at index \(0, 1\)"):
        Embed(7, 4, rngs=rngs)(jnp.array([[1, 7]]))
    with pytest.raises(ValueError, match=r"from 0 to 6, got -1 at index \(0,\)"):
        Embed(7, 4, rngs=rngs)(jnp.array([-1]))
    with pytest.raises(TypeError, match=r"integers, got float32\(2,\)"):
        Embed(7, 4, rngs=rngs)(jnp.ones(2))
    with pytest.raises(ValueError, match="head_dim=3"):
        RotaryEmbedding(3, 8)
    with pytest.raises(ValueError, match="num_kv_heads=2 and num_heads=3"):
        Attention(4, num_heads=3, num_kv_heads=2, head_dim=4, rngs=rngs)
    layer = Attention(4, num_heads=2, num_kv_heads=2, head_dim=4, rngs=rngs)
    rotary = RotaryEmbedding(4, 8)(jnp.arange(3)[None])
    with pytest.raises(ValueError, match=r"\(batch, tokens, features\), got \(3, 4\)"):
        layer(jnp.ones((3, 4)), rotary)
    with pytest.raises(ValueError, match=r"arrays of shape \(2, 3, 2\) for x of shape \(2, 3, 4\)"):
        layer(jnp.ones((2, 3, 4)), rotary)

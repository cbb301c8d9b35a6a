"""GatedDeltaNet: prompts, parts, decoding, drafts and packed sequences have the same bits; gradients; bad input."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bijax.testing import assert_bits_equal
from flax_layers import PLAIN
from flax_layers.models.layers import Attention, DeltaNetState, GatedDeltaNet, MoE, RotaryEmbedding
from flax_layers.models.layers.rotary import rotary_order
from flax_layers.routing import Routing
from tests.layers.parameters import filled, normal

SIZES = {"num_key_heads": 1, "num_value_heads": 2, "key_dim": 8, "value_dim": 8}
FEATURES, LENGTH = 16, 70


@functools.cache
def layer(dtype: str) -> GatedDeltaNet:
    return filled(lambda: GatedDeltaNet(FEATURES, **SIZES, dtype=dtype, rngs=nnx.Rngs(0)))


def inputs(dtype: str) -> np.ndarray:
    return normal(1, 3, LENGTH, FEATURES).astype(jnp.dtype(dtype))


@jax.jit
def whole(layer: GatedDeltaNet, x: Any) -> jax.Array:
    return layer(x)


@jax.jit
def extend(layer: GatedDeltaNet, x: Any, state: DeltaNetState, start: Any, lengths: Any) -> Any:
    return layer.extend(x, state, start=start, lengths=lengths)


def differing(found: GatedDeltaNet, dtype: str) -> int:
    """Counts numbers that differ from whole sequences: in parts, and then with drafts of which some are wrong."""
    x, n = inputs(dtype), 3
    expected = np.asarray(whole(found, x))
    cuts = np.array([5, 64, 69], np.int32)
    y, state = extend(found, x, found.init_state(n, dtype), np.zeros(n, np.int32), cuts)
    count = sum(int((np.asarray(y)[i, :cut] != expected[i, :cut]).sum()) for i, cut in enumerate(cuts))
    at = cuts.copy()
    while (at < LENGTH).any():
        # Drafts end at a multiple of 64.
        room = np.minimum(np.minimum(4, 64 - at % 64), LENGTH - at)
        drafts = x[np.arange(n)[:, None], np.minimum(at[:, None] + np.arange(4), LENGTH - 1)]
        drafts[:, 2:] = x[:, :2]
        y, state = extend(found, drafts, state, at, room)
        right = np.minimum(2, room)
        for i in range(n):
            count += int((np.asarray(y)[i, : right[i]] != expected[i, at[i] : at[i] + right[i]]).sum())
        at = at + right.astype(np.int32)
    return count


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits(dtype: str) -> None:
    assert differing(layer(dtype), dtype) == 0
    if dtype == "float32":  # the two forms of plain JAX differ in bits that few of the bfloat16 numbers show
        assert differing(nnx.with_attributes(layer(dtype), ops=PLAIN), dtype) > 0


@pytest.mark.tier("full")
def test_packed() -> None:
    x, found = inputs("float32"), layer("float32")
    expected = np.asarray(whole(found, x))
    packed = jax.jit(lambda x: found(x, cu_seq_lengths=np.array([0, 33, 103])))(np.concatenate([x[0, :33], x[1]]))
    assert_bits_equal(np.asarray(packed), np.concatenate([expected[0, :33], expected[1]]))


@pytest.mark.tier("full")
def test_gradients() -> None:
    """Close to those of plain JAX; those of a sequence's inputs are the same in every batch."""
    x, weights = inputs("float32"), normal(2, 3, LENGTH, FEATURES)

    @jax.jit
    def gradients(layer: GatedDeltaNet, x: Any, weights: Any) -> Any:
        structure, parameters = nnx.split(layer)
        return jax.grad(lambda p, x: (nnx.merge(structure, p)(x) * weights).sum(), argnums=(0, 1))(parameters, x)

    ours, of_x = gradients(layer("float32"), x, weights)
    plain, _ = gradients(nnx.with_attributes(layer("float32"), ops=PLAIN), x, weights)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert np.linalg.norm(a - b) < 2e-5 * np.linalg.norm(b)
    _, alone = gradients(layer("float32"), x[1:2], weights[1:2])
    assert_bits_equal(np.asarray(alone)[0], np.asarray(of_x)[1])


def test_rotary_order() -> None:
    """Pairs of a reordered head are those of a model that turns the first columns."""
    order = rotary_order(16, 8)
    x, positions = normal(0, 1, 5, 1, 16), np.arange(5)[None]
    cos, sin = (np.asarray(a)[:, :, None] for a in RotaryEmbedding(16, 8, rotary_dim=8)(positions))
    first, second = np.split(x[..., order], 2, axis=-1)
    turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    angle = np.arange(5)[:, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    a, b, rest = np.split(x[0, :, 0], [4, 8], axis=-1)
    expected = np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), rest], -1)
    np.testing.assert_allclose(turned[0, :, 0], expected[:, order], rtol=0, atol=1e-6)


def test_shapes_and_bad_input() -> None:
    with pytest.raises(ValueError, match="num_key_heads must divide num_value_heads"):
        GatedDeltaNet(8, num_key_heads=2, num_value_heads=3, key_dim=4, value_dim=4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="conv_width must be positive"):
        GatedDeltaNet(8, **SIZES, conv_width=0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x must have the shape \(batch, tokens, features\)"):
        layer("float32")(jnp.ones((3, FEATURES)))
    with pytest.raises(ValueError, match=r"packed x must have the shape \(tokens, features\)"):
        layer("float32")(jnp.ones((1, 3, FEATURES)), cu_seq_lengths=np.array([0, 3]))
    with pytest.raises(ValueError, match="shared_gate needs shared experts"):
        MoE(4, 8, routing=Routing(num_experts=3, topk=2), shared_gate=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="rotary_dim must be even and from 2 to head_dim"):
        RotaryEmbedding(8, 4, rotary_dim=12)
    state = layer("bfloat16").init_state(2, "bfloat16")
    assert (state.inputs.shape, state.rule.key.dtype) == ((2, 16, 32), jnp.bfloat16)
    gated = nnx.eval_shape(
        lambda: Attention(8, num_heads=2, num_kv_heads=1, head_dim=4, output_gate=True, rngs=nnx.Rngs(0))
    )
    assert gated.gate.kernel.shape == (8, 8)

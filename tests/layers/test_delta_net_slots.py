"""Slots of linear attention: states come out of them as they went in, drafts of an engine fit, and their memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bijax.serving.options import MAX_DRAFTS
from bijax.testing import assert_bits_equal
from flax_layers.models.layers import DeltaNetSlots, GatedDeltaNet
from flax_layers.models.layers.delta_net_slots import SLOT_DRAFTS
from pallas_kernels.delta_rule.slots import packed, unpacked
from tests.layers.parameters import filled, normal

FEATURES = 16


@functools.cache
def layer() -> GatedDeltaNet:
    sizes = {"num_key_heads": 1, "num_value_heads": 2, "key_dim": 8, "value_dim": 8}
    return filled(lambda: GatedDeltaNet(FEATURES, **sizes, rngs=nnx.Rngs(0)))


@jax.jit
def in_slots(layer: GatedDeltaNet, x: Any, slots: DeltaNetSlots, at: Any, start: Any, lengths: Any) -> Any:
    return layer.extend_slots(x, slots, at, start=start, lengths=lengths)


@jax.jit
def with_state(layer: GatedDeltaNet, x: Any, state: Any, start: Any, lengths: Any) -> Any:
    return layer.extend(x, state, start=start, lengths=lengths)


def test_packed_and_back() -> None:
    x = normal(0, 3, 64, 64)
    x[0, 5, 2], x[1, 40, 40], x[2, 9, 3] = np.nan, -np.inf, -0.0
    assert packed(x).shape == (3, 32, 65)
    back = np.asarray(unpacked(packed(x)))
    assert_bits_equal(back, np.where(np.tri(64, dtype=bool), x, np.float32(0)))
    with pytest.raises(AssertionError):
        assert_bits_equal(back, x)


@pytest.mark.tier("full")
@pytest.mark.parametrize("special", [None, np.inf, np.nan, 1e30], ids=str)
def test_inverse_keeps_its_bits(special: float | None) -> None:
    """All 64 rows of what the rule keeps, at every length, with tokens that are not finite too."""
    x = normal(1, 1, 64, FEATURES)
    if special is not None:
        x[0, 20, 3], x[0, 50] = special, -special
    slots, state, one = layer().init_slots(2), layer().init_state(1), np.ones(1, np.int32)
    for t in range(64):
        start = np.full(1, t, np.int32)
        _, slots = in_slots(layer(), x[:, t : t + 1], slots, one, start, one)
        _, state = with_state(layer(), x[:, t : t + 1], state, start, one)
        taken = slots.rows(jnp.ones(1, jnp.int32), jnp.ones(1, jnp.int32))
        assert_bits_equal(np.asarray(taken.rule.inverse), np.asarray(state.rule.inverse))
    assert np.abs(np.asarray(state.rule.inverse)).sum() > 64 or special is not None


def differing(slots: DeltaNetSlots) -> int:
    """Counts numbers that differ where seven drafts of eight tokens are wrong, step after step."""
    x, found = normal(2, 1, 24, FEATURES), layer()
    state, at = found.init_state(1), np.ones(1, np.int32)
    count = 0
    for t in range(16):
        drafts = x[:, t : t + 8].copy()
        drafts[:, 1:] = x[:, :7]
        start, eight = np.full(1, t, np.int32), np.full(1, 8, np.int32)
        y, slots = in_slots(found, drafts, slots, at, start, eight)
        expected, state = with_state(found, drafts, state, start, eight)
        count += int((np.asarray(y)[:, 0].view(np.uint32) != np.asarray(expected)[:, 0].view(np.uint32)).sum())
    return count


@pytest.mark.tier("full")
def test_most_drafts() -> None:
    assert SLOT_DRAFTS == MAX_DRAFTS
    slots = layer().init_slots(2)
    assert differing(slots) == 0
    assert differing(slots._replace(inputs=slots.inputs[:, 1:])) > 0  # with room for six


@pytest.mark.tier("full")
def test_padding_and_fresh_sequences() -> None:
    """A row of padding changes no slot; a sequence that starts at 0 does not see what its slot held."""
    slots = jax.tree.map(lambda a: jnp.full(a.shape, 64, a.dtype), layer().init_slots(3))
    x, start = normal(3, 2, 1, FEATURES), np.zeros(2, np.int32)
    y, after = in_slots(layer(), x, slots, np.array([2, 0]), start, np.array([1, 0], np.int32))
    for old, new in zip(slots, after, strict=True):
        assert_bits_equal(np.asarray(new)[:2], np.asarray(old)[:2])
    assert after.length.tolist() == [64, 64, 1]
    expected, _ = with_state(layer(), x, layer().init_state(2), start, np.array([1, 0], np.int32))
    assert_bits_equal(np.asarray(y)[0], np.asarray(expected)[0])


def test_memory_of_qwen3_next() -> None:
    """What the documentation says of 36 layers in bfloat16."""
    sizes = {"num_key_heads": 16, "num_value_heads": 32, "key_dim": 128, "value_dim": 128}

    def made(slots: bool) -> Any:
        found = GatedDeltaNet(2048, **sizes, rngs=nnx.Rngs(0))
        return found.init_slots(1, "bfloat16") if slots else found.init_state(1, "bfloat16")

    megabytes = [
        36
        * sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(jax.eval_shape(functools.partial(made, slots))))
        / 1e6
        for slots in (True, False)
    ]
    assert [round(m, 1) for m in megabytes] == [119.6, 132.4]


def moved_bytes(function: Any, *arguments: Any, least: int) -> int:
    """Returns the bytes of the arrays of `least` elements that a program makes.

    Those that kernels and scatters write in place are not counted.
    """
    in_place = ("scatter", "bijax_gated_delta_rule_extend", "bijax_causal_conv_extend", "optimization_barrier")

    def of(jaxpr: Any) -> int:
        total = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in in_place:
                continue
            inner = [p for p in eqn.params.values() if hasattr(p, "eqns") or hasattr(p, "jaxpr")]
            total += sum(of(getattr(p, "jaxpr", p)) for p in inner)
            made = [] if inner else [v.aval for v in eqn.outvars if v.aval.size >= least]
            total += sum(a.size * a.dtype.itemsize for a in made)
        return total

    return of(jax.make_jaxpr(function)(*arguments).jaxpr)


def test_a_step_does_not_copy_states() -> None:
    """With the sizes of Qwen3-Next; the control takes the states out of their slots, and puts them back."""
    sizes = {"num_key_heads": 16, "num_value_heads": 32, "key_dim": 128, "value_dim": 128}
    made = functools.partial(GatedDeltaNet, 64, **sizes, param_dtype="bfloat16")
    net = nnx.eval_shape(lambda: made(rngs=nnx.Rngs(0)))
    slots = jax.eval_shape(lambda: net.init_slots(64, "bfloat16"))
    x, number = jax.ShapeDtypeStruct((8, 1, 64), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.int32)

    def in_place(net: GatedDeltaNet, x: Any, slots: Any, at: Any, start: Any, lengths: Any) -> Any:
        return net.extend_slots(x, slots, at, start=start, lengths=lengths)

    def copied(net: GatedDeltaNet, x: Any, slots: Any, at: Any, start: Any, lengths: Any) -> Any:
        y, state = net.extend(x, slots.rows(at, start), start=start, lengths=lengths)
        return y, slots.with_rows(at, state)

    sequence = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(slots)) / 64
    least = 8 * 32 * 32 * 65  # as many as the smallest of them has
    ours, control = (moved_bytes(f, net, x, slots, *[number] * 3, least=least) / 8 for f in (in_place, copied))
    assert ours == 0
    assert control > 2 * sequence

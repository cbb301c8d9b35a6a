"""Ways to compute a sequence by the gated delta rule, and comparisons of what they give."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bijax
from bijax import DeltaRuleState
from bijax.testing import assert_bits_equal
from pallas_kernels.delta_rule.slots import packed, unpacked

whole = jax.jit(bijax.gated_delta_rule)
extend = jax.jit(bijax.gated_delta_rule_extend)


def part(x: dict[str, Any], start: Any, size: int) -> dict[str, Any]:
    """Returns `size` tokens of each sequence from its own start on; after the end comes the last token again."""
    at = np.minimum(np.asarray(start)[:, None] + np.arange(size), x["g"].shape[1] - 1)
    return {
        n: jnp.asarray(np.take_along_axis(np.asarray(a), at.reshape(*at.shape, *[1] * (a.ndim - 2)), 1))
        for n, a in x.items()
    }


def check_parts(x: dict[str, Any], expected: Any, bounds: list[list[int]], state: DeltaRuleState, size: int) -> Any:
    """Computes sequences in parts, which end at the same number of bounds in each; returns the last state."""
    for starts, ends in itertools.pairwise(bounds):
        lengths = np.subtract(ends, starts).astype(np.int32)
        y, state = extend(**part(x, starts, size), state=state, lengths=lengths)
        y = np.asarray(y)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            assert_bits_equal(y[i, : end - start], expected[i, start:end])
            assert not y[i, end - start :].view(np.uint8).any()
    return state


def same_state(a: DeltaRuleState, b: DeltaRuleState) -> None:
    """Compares what two states say; rows after the length mean nothing."""
    assert a.edge.tolist() == b.edge.tolist()
    assert a.length.tolist() == b.length.tolist()
    assert_bits_equal(a.state, b.state)
    for name in ("key", "residual", "inverse", "decay"):
        ours, theirs = (np.asarray(getattr(state, name)) for state in (a, b))
        for i, rows in enumerate((a.length - a.edge).tolist()):
            assert_bits_equal(ours[i, :, :rows], theirs[i, :, :rows])


def check_slots(x: dict[str, Any], expected: Any, state: DeltaRuleState, sizes: tuple[int, ...]) -> None:
    """Computes sequences in slots of a server, whose other slots and numbers before the first token are nan.

    Args:
        x: Tokens of sequences.
        expected: Their outputs.
        state: Their state after all tokens.
        sizes: Tokens of the calls, over again; every other sequence takes half as many.
    """
    n, length = x["g"].shape[:2]
    number = 2 * n + 1
    slots = np.random.default_rng(0).permutation(number)[:n].astype(np.int32)

    def nans(like: jax.Array) -> jax.Array:
        return jnp.full((number, *like.shape[1:]), 640 if like.dtype == jnp.int32 else jnp.nan, like.dtype)

    kept = jax.tree.map(nans, dataclasses.replace(state, inverse=packed(state.inverse)))
    before, start = kept, np.zeros(n, np.int32)
    for size in itertools.cycle(sizes):
        lengths = np.minimum(length - start, np.where(np.arange(n) % 2, max(size // 2, 1), size)).astype(np.int32)
        at = np.where(lengths, slots, number + 3).astype(np.int32)  # padding of a batch
        y, kept = extend(**part(x, start, size), state=kept, start=start, lengths=lengths, slots=at)
        for i, (first, count) in enumerate(zip(start, lengths, strict=True)):
            assert_bits_equal(np.asarray(y)[i, :count], expected[i, first : first + count])
        start = start + lengths
        if (start == length).all():
            break
    found = jax.tree.map(lambda a: a[slots], kept)
    same_state(dataclasses.replace(found, inverse=unpacked(found.inverse)), state)
    others = np.setdiff1d(np.arange(number), slots)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(kept), strict=True):
        assert_bits_equal(np.asarray(new)[others], np.asarray(old)[others])

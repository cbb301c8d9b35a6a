"""Ways to compute a sequence by the gated delta rule, and comparisons of what they give."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bijax
from bijax import DeltaRuleState
from bijax.testing import assert_bits_equal

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

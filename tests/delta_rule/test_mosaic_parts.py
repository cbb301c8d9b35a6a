"""Parts of prompts for Hopper: kept rows and tokens from any one on, under Mosaic's interpreter, which finds races."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.contract import MmaDeltaRuleContract
from pallas_kernels.delta_rule.extend import gated_delta_rule_extend
from pallas_kernels.delta_rule.hopper.rows import KeptRows, Tokens, rows
from pallas_kernels.delta_rule.hopper.scan import Chunks, Kept, scan
from pallas_kernels.delta_rule.schedule.jax_triton import Schedule
from pallas_kernels.parts.jax_triton.launch import launch_p
from pallas_kernels.target import Target
from tests.delta_rule.mosaic_tokens import kernel_tokens
from tests.jax_triton.machine_code import needs_triton
from tests.mosaic import Races, interpreter

SIZES = (1, 2, 64, 64)
TOKENS = 136


class State(NamedTuple):
    """What is kept of sequences, as `gated_delta_rule_extend` takes it."""

    state: jax.Array
    key: jax.Array
    residual: jax.Array
    inverse: jax.Array
    decay: jax.Array
    edge: jax.Array


def empty(sequences: int) -> State:
    """Sequences without tokens; rows that were not computed are nan."""
    j, h, d, v = SIZES
    narrow = [jnp.full((sequences, n, 64, width), jnp.nan, "bfloat16") for n, width in ((j, d), (h, v))]
    wide = [jnp.full((sequences, h, 64, *more), jnp.nan, "float32") for more in ((64,), ())]
    return State(jnp.zeros((sequences, h, d, v)), *narrow, *wide, jnp.zeros(sequences, jnp.int32))


def values(sequences: int) -> jax.Array:
    _, h, _, v = SIZES
    return jnp.asarray(np.random.default_rng(1).standard_normal((sequences, TOKENS, h, v)), "bfloat16")


def whole(x: Tokens, value: jax.Array) -> np.ndarray:
    """Returns the outputs of whole sequences."""
    inverse, weights, _, betas, grown, later = rows(x, interpret=interpreter())
    given = Chunks(x.query, x.key, value, inverse, weights, grown, later, betas, empty(len(value)).state, x.lengths)
    return np.asarray(scan(given, scale=0.5, keep_edges=False, stages=2, interpret=interpreter())[0], np.float64)


def part(x: Tokens, value: jax.Array, start: list[int], lengths: list[int], kept: State) -> Any:
    """Returns outputs, flags and the new state for tokens from `start` on; the arrays hold nan after `lengths`."""
    most = max(*lengths, 64)

    def some(a: jax.Array) -> jax.Array:
        found = np.full((len(start), most, *a.shape[2:]), np.nan, np.float32)
        for i, (first, count) in enumerate(zip(start, lengths, strict=True)):
            found[i, :count] = a[i, first : first + count]
        return jnp.asarray(found, a.dtype)

    counts, places = jnp.asarray(lengths, jnp.int32), (kept.edge, jnp.asarray(start, jnp.int32))
    query, key, value, g, beta = map(some, (x.query, x.key, value, x.g, x.beta))
    known = KeptRows(kept.key, kept.inverse, kept.decay, *places)
    inverse, weights, logs, betas, grown, later, first_keys, last_keys = rows(
        Tokens(query, key, g, beta, counts, known), interpret=interpreter()
    )
    state, residual = jax.new_ref(kept.state), jax.new_ref(kept.residual)
    of_rows = (inverse, weights, grown, later, betas)
    given = Chunks(query, key, value, *of_rows, state, counts, Kept(first_keys, residual, *places))
    y, flags = scan(given, scale=0.5, keep_edges=False, stages=2, interpret=interpreter())
    edge, new = kept.edge, [kept.key, kept.inverse, kept.decay]
    for i, (first, count) in enumerate(zip(start, lengths, strict=True)):
        if count:  # what the kernel that finishes parts does
            end = (first + count - 1) // 64 * 64
            last = (end - int(kept.edge[i])) // 64
            of_last = last_keys[i], inverse[i, :, last].swapaxes(1, 2).astype("float32"), logs[i, :, last]
            edge, new = edge.at[i].set(end), [a.at[i].set(x) for a, x in zip(new, of_last, strict=True)]
    return y, flags, State(state[...], new[0], residual[...], new[1], new[2], edge)


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    "ends",
    [[[40, 1], [136, 70]], [[64, 127], [64, 128], [130, 136]]],
    ids=["inside", "at edges"],
)
def test_sequences_in_parts(ends: list[list[int]], races: Races) -> None:
    x, value = kernel_tokens("bfloat16", SIZES[:3], TOKENS, ends[-1]), values(2)
    expected, state, start = whole(x, value), empty(2), [0, 0]
    for at in ends:
        lengths = [end - first for first, end in zip(start, at, strict=True)]
        y, flags, after = part(x, value, start, lengths, state)
        assert not np.asarray(flags).any()
        found = np.asarray(y, np.float64)
        for i, count in enumerate(lengths):
            exact = expected[i, start[i] : at[i]]
            assert np.linalg.norm(found[i, :count] - exact) <= 1e-3 * np.linalg.norm(exact)
            assert not found[i, count:].any()
            if count == 0:
                for ours, theirs in zip(after, state, strict=True):
                    np.testing.assert_array_equal(np.asarray(ours[i], np.float64), np.asarray(theirs[i], np.float64))
        if start != [0, 0] and at == ends[-1]:  # the control: without the residuals of the rows before
            y, *_ = part(x, value, start, lengths, state._replace(residual=jnp.zeros_like(state.residual)))
            other, exact = np.asarray(y, np.float64)[0, : lengths[0]], expected[0, start[0] : at[0]]
            assert np.linalg.norm(other - exact) > 1e-2 * np.linalg.norm(exact)
        state, start = after, at
    assert races() == 0


@pytest.mark.tier("full")
def test_what_has_nan_is_flagged_and_left() -> None:
    """The state and the residuals of flagged columns are those from before, for the kernel that computes them again."""
    x, value = kernel_tokens("bfloat16", SIZES[:3], TOKENS, [TOKENS]), values(1)
    _, _, before = part(x, value, [0], [40], empty(1))
    _, flags, after = part(x, value.at[0, 70, 1, 3].set(jnp.inf), [40], [90], before)
    assert flags.tolist() == [0, 1]
    for name in ("state", "residual"):
        ours, theirs = (np.asarray(getattr(s, name), np.float64) for s in (after, before))
        np.testing.assert_array_equal(ours[:, 1], theirs[:, 1])
        assert np.isfinite(ours[:, 0, :2]).all()
    assert after.state[0, 0].any()


@pytest.mark.tier("full")
@pytest.mark.parametrize("start", [3000, 0])
def test_sequences_without_tokens_may_be_anywhere(start: int) -> None:
    """Such as those whose position is out of range: their outputs are zeros, and nothing else is written or read."""
    x, value = kernel_tokens("bfloat16", SIZES[:3], TOKENS, [TOKENS, TOKENS]), values(2)
    before = empty(2)._replace(edge=jnp.asarray([0, 64], jnp.int32))
    y, flags, after = part(x, value, [0, start], [40, 0], before)
    assert np.asarray(y, np.float64)[0, :40].any()
    assert not np.asarray(y, np.float64)[1].any()
    assert not np.asarray(flags).any()
    for name in ("state", "residual"):
        ours, theirs = (np.asarray(getattr(s, name)[1], np.float64) for s in (after, before))
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("dtype", "in_slots"), [("bfloat16", False), ("float16", True)])
def test_programs_for_a_gpu(dtype: str, in_slots: bool) -> None:
    """State and residuals are changed in place."""
    shape = jax.ShapeDtypeStruct
    b, t, j, h, d = 2, 131, 1, 2, 128
    heads, line, places = shape((b, t, j, d), dtype), shape((b, t, h), "float32"), shape((b,), "int32")
    kept = [shape((b, h, d, d), "float32"), shape((b, j, 64, d), dtype), shape((b, h, 64, d), dtype)]
    kept += [shape((b, h, *((32, 65) if in_slots else (64, 64))), "float32"), shape((b, h, 64), "float32"), places]

    def run(query: Any, key: Any, value: Any, g: Any, beta: Any, start: Any, lengths: Any, *kept: Any) -> Any:
        at = State(*kept)
        slots = lengths if in_slots else None
        known = KeptRows(at.key, at.inverse, at.decay, at.edge, start, slots)
        inverse, weights, _, betas, grown, later, first_keys, last_keys = rows(
            Tokens(query, key, g, beta, lengths, known)
        )
        state, residual = jax.new_ref(at.state), jax.new_ref(at.residual)
        known_keys = Kept(first_keys, residual, at.edge, start, slots)
        of_rows = (inverse, weights, grown, later, betas)
        given = Chunks(query, key, value, *of_rows, state, lengths, known_keys)
        y, flags = scan(given, scale=0.5, keep_edges=False, stages=3)
        return y, flags, last_keys, state[...], residual[...]

    arrays = (heads, heads, shape((b, t, h, d), dtype), line, line, places, places, *kept)
    text = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("output_operand_alias<") == 2
    assert "delta_rule_scan" in text
    assert "mma.sync" in text


def made(jaxpr: Any, slots: int) -> set[str]:
    """Returns the operations that make arrays with a row for each slot."""
    found = set()
    for eqn in jaxpr.eqns:
        inner = [p for p in eqn.params.values() if hasattr(p, "eqns") or hasattr(p, "jaxpr")]
        if inner:
            found |= set().union(*(made(getattr(p, "jaxpr", p), slots) for p in inner))
        elif any(getattr(v.aval, "shape", ())[:1] == (slots,) for v in eqn.outvars):
            found.add(eqn.primitive.name)
    return found


@needs_triton
def test_what_is_kept_in_slots_is_not_copied() -> None:
    """The control takes it out of the slots and puts it back."""
    shape = jax.ShapeDtypeStruct
    b, t, j, h, d, slots = 2, 128, 16, 32, 128, 64
    target = dataclasses.replace(Target.parse("sm_90"), backend="jax_triton")
    heads, line, places = shape((b, t, j, d), "bfloat16"), shape((b, t, h), "float32"), shape((b,), "int32")
    tokens = [heads, heads, shape((b, t, h, d), "bfloat16"), line, line]
    kept = [shape((slots, h, d, d), "float32"), shape((slots, j, 64, d), "bfloat16")]
    kept += [shape((slots, h, 64, d), "bfloat16")]
    kept += [shape((slots, h, *more), "float32") for more in ((32, 65), (64,))]
    options: dict[str, Any] = {"scale": 0.1, "contract": MmaDeltaRuleContract(), "target": target}
    extend = functools.partial(gated_delta_rule_extend, **options)
    ours, control = (
        made(jax.make_jaxpr(functools.partial(extend, schedule=plan))(*tokens, *kept, *[places] * 4).jaxpr, slots)
        for plan in (None, Schedule(32, 4, 2))
    )
    assert ours == {"new_ref", "get", launch_p.name}  # the launch returns them in its operands' memory
    assert "scatter" in control

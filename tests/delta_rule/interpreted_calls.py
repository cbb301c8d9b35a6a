"""The gated delta rule by Triton's interpreter, compared with float64: a program that `test_jax_triton.py` runs.

TRITON_INTERPRET=1 python -m tests.delta_rule.interpreted_calls CASE
"""

import dataclasses
import functools
import sys
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from bijax import DeltaRuleState
from bijax.testing import assert_bits_equal
from pallas_kernels.contract import MmaDeltaRuleContract
from pallas_kernels.delta_rule.extend import gated_delta_rule_extend
from pallas_kernels.delta_rule.hopper import rows as hopper_rows
from pallas_kernels.delta_rule.hopper import scan as hopper_scan
from pallas_kernels.delta_rule.schedule.jax_triton import Schedule
from pallas_kernels.delta_rule.slots import packed, taken
from pallas_kernels.delta_rule.whole import gated_delta_rule
from pallas_kernels.target import Target
from tests.delta_rule.tokens import batch, recurrence
from tests.jax_triton.interpreted import interpret_launches
from tests.jax_triton.interpreter_instructions import interpret_instructions
from tests.mosaic import interpreter

SIZES: Final = (1, 2, 64, 64)
CALL: Final[dict[str, Any]] = {
    "scale": 0.125,
    "contract": MmaDeltaRuleContract(),
    "target": dataclasses.replace(Target.parse("sm_80"), backend="jax_triton"),
}
KEPT: Final = ("state", "key", "residual", "inverse", "decay")
MOSAIC = Schedule(64, 4, 2, mosaic=True)
WIDE, NARROW, APART = Schedule(64, 4, 1), Schedule(32, 4, 1, pieces=2), Schedule(64, 4, 1, rows_warps=4)


def check(found: Any, expected: Any, bound: float = 1e-3) -> None:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    found, expected = np.nan_to_num(found), np.nan_to_num(expected)
    assert np.linalg.norm(found - expected) <= bound * np.linalg.norm(expected)


def parts(x: dict[str, Any], sizes: tuple[int, ...], lengths: list[int], chunked: Schedule = WIDE) -> Any:
    """Computes sequences in calls of these numbers of tokens; the last call has the rest of each."""
    j, h, d, v = SIZES
    b = len(lengths)
    state = DeltaRuleState.zeros(b, key_heads=j, value_heads=h, key_size=d, value_size=v, dtype="float16")
    kept = [state.state, state.key, state.residual, state.inverse, state.decay, state.edge]
    start, found = np.zeros(b, np.int32), []
    for size in sizes:
        counts = np.minimum(np.maximum(np.array(lengths) - start, 0), size).astype(np.int32)
        at = np.minimum(start[:, None] + np.arange(size), x["g"].shape[1] - 1)
        some = [np.take_along_axis(a, at.reshape(*at.shape, *[1] * (a.ndim - 2)), 1) for a in x.values()]
        plan = chunked if size > 8 else (NARROW, APART)[len(found) % 2]
        y, *kept = gated_delta_rule_extend(*map(jnp.asarray, (*some, *kept, start, counts)), **CALL, schedule=plan)
        for i, n in enumerate(counts):
            assert not np.asarray(y)[i, n:].any()
        found.append((start.copy(), counts, np.asarray(y)))
        start = start + counts
    y = np.zeros(x["value"].shape)
    for first, counts, some in found:
        for i, n in enumerate(counts):
            y[i, first[i] : first[i] + n] = some[i, :n]
    return y, kept


def case_whole() -> None:
    x = batch(("normal", "repeated"), 130, "float16", SIZES)
    lengths = [130, 70]
    start = np.random.default_rng(3).standard_normal((2, *SIZES[1:])).astype(np.float32) * 0.1
    y, last, edges = gated_delta_rule(
        *map(jnp.asarray, (*x.values(), start, np.array(lengths, np.int32))), keep_edges=True, **CALL, schedule=WIDE
    )
    for i, n in enumerate(lengths):
        one = {name: a[i : i + 1, :n] for name, a in x.items()}
        expected, state = recurrence(one, start[i : i + 1])
        check(np.asarray(y)[i, :n], expected[0])
        assert not np.asarray(y)[i, n:].any()
        check(last[i], state[0])
        check(edges[i, 0], start[i])
        _, at = recurrence({name: a[:, :64] for name, a in one.items()}, start[i : i + 1])
        check(edges[i, 1], at[0])
    assert not np.asarray(edges)[1, 2].any()


def case_parts() -> None:
    x = batch(("normal", "lasting"), 140, "float16", SIZES)
    lengths = [140, 75]
    expected, _ = recurrence(x)
    y, kept = parts(x, (1, 8, 53, 4, 1, 9, 50, 6, 8), lengths)
    for i, n in enumerate(lengths):
        check(y[i, :n], expected[i, :n])
    assert kept[5].tolist() == [128, 64]


def case_edges_of_arrays() -> None:
    """A part that begins after kept rows: the queries of these rows are not known, and come before the array."""
    x = batch(("normal",), 78, "float16", SIZES)
    expected, _ = recurrence(x)
    y, kept = parts(x, (9, 60, 9), [78])
    check(y, expected)
    assert kept[5].tolist() == [64]


def case_nan(plan: Schedule = WIDE) -> None:
    x = batch(("normal", "normal"), 80, "float16", SIZES)
    x["value"][0, 70, 1, 5] = np.inf
    x["key"][1, 20, 0, 3] = np.nan
    expected, _ = recurrence(batch(("normal", "normal"), 80, "float16", SIZES))
    expected[0, 70:, 1, 5] = np.nan
    expected[1, 20:] = np.nan
    y, last = gated_delta_rule(
        *map(jnp.asarray, (*x.values(), np.zeros((2, *SIZES[1:]), np.float32), np.array([80, 80], np.int32))),
        keep_edges=False,
        **CALL,
        schedule=plan,
    )
    check(y, expected)
    assert np.isnan(np.asarray(last)[0, 1, :, 5]).all()
    assert np.isfinite(np.asarray(last)[0, 0]).all()
    assert np.isnan(np.asarray(last)[1]).all()
    y, _ = parts(x, (66, 8, 6), [80, 80], plan)
    check(y, expected)
    y, _ = parts(x, (10, 70), [80, 80], plan)
    check(y, expected)


def case_slots(chunked: Schedule = WIDE) -> None:
    """The same sequences in slots, whose other numbers are nan, by both kinds of programs for few tokens."""
    x, (j, h, d, v) = batch(("normal", "broken"), 70, "float16", SIZES), SIZES
    state = DeltaRuleState.zeros(5, key_heads=j, value_heads=h, key_size=d, value_size=v, dtype="float16")
    fields = (state.state, state.key, state.residual, packed(state.inverse), state.decay)
    kept = [jnp.full_like(a, jnp.nan) for a in fields]
    rows = DeltaRuleState.zeros(2, key_heads=j, value_heads=h, key_size=d, value_size=v, dtype="float16")
    alone = [rows.state, rows.key, rows.residual, rows.inverse, rows.decay, rows.edge]
    slots, start, edge = np.array([3, 1], np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)
    for size in (1, 8, 53, 1, 4, 3):  # the fifth goes over an edge in the second row of a call
        counts = np.array([size, size], np.int32)
        some = [a[:, start[0] : start[0] + size] for a in x.values()]
        for plan in (chunked,) if size > 8 else (NARROW, APART):
            given = (*some, *kept, edge, start, counts, slots)
            y, *new, after = gated_delta_rule_extend(*map(jnp.asarray, given), **CALL, schedule=plan)
            given = (*some, *alone, start, counts)
            expected, *own = gated_delta_rule_extend(*map(jnp.asarray, given), **CALL, schedule=plan)
            assert_bits_equal(np.asarray(y), np.asarray(expected))
            assert after.tolist() == own[5].tolist()
            for field, mine, theirs in zip(KEPT, taken(tuple(new), after, jnp.asarray(slots)), own, strict=False):
                rows_of = [(start + size - after)[b] for b in range(2)] if field != "state" else [None, None]
                for b, count in enumerate(rows_of):
                    assert_bits_equal(np.asarray(mine)[b, :, :count], np.asarray(theirs)[b, :, :count])
            for array in new:
                assert np.isnan(np.asarray(array, np.float32)[[0, 2, 4]]).all()
        kept, alone, edge, start = new, own, after, start + size
    assert edge.tolist() == [64, 64]
    assert start.tolist() == [70, 70]


def interpret_mosaic() -> None:
    """Makes the kernels for Hopper run in Mosaic's interpreter."""
    for module, name in ((hopper_rows, "rows"), (hopper_scan, "scan")):
        setattr(module, name, functools.partial(getattr(module, name), interpret=interpreter()))


if __name__ == "__main__":
    interpret_launches()
    interpret_instructions()
    interpret_mosaic()
    cases = {"whole": case_whole, "parts": case_parts, "edges of arrays": case_edges_of_arrays, "nan": case_nan}
    cases |= {"slots": case_slots, "nan on Hopper": functools.partial(case_nan, MOSAIC)}
    cases["slots on Hopper"] = functools.partial(case_slots, MOSAIC)
    cases[sys.argv[1]]()
    print("compared")

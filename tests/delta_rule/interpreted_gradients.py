"""Gradients of the gated delta rule by Triton's interpreter: a program that `test_jax_triton_gradients.py` runs.

TRITON_INTERPRET=1 python -m tests.delta_rule.interpreted_gradients CASE
"""

import sys
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.contract import MmaDeltaRuleGradientContract
from pallas_kernels.delta_rule.jax_triton.gradients import gated_delta_rule_gradients
from pallas_kernels.delta_rule.schedule.gradients import GradientSchedule
from pallas_kernels.delta_rule.whole import gated_delta_rule
from tests.delta_rule.interpreted_calls import CALL, WIDE
from tests.delta_rule.plain import recurrent
from tests.delta_rule.tokens import batch
from tests.jax_triton.interpreted import interpret_launches
from tests.jax_triton.interpreter_instructions import interpret_instructions

NAMES: Final = ("query", "key", "value", "g", "beta", "state")
SIZES: Final = (1, 2, 64, 64)
USUAL: Final = GradientSchedule()
OTHER: Final = GradientSchedule(columns=16, outer_columns=64)
Numbers = list[np.ndarray]


def given(kinds: tuple[str, ...], length: int, sizes: Any = SIZES) -> tuple[dict[str, Any], Numbers]:
    """Returns tokens; and the first states, and the cotangents of outputs and last states."""
    (_, h, d, v), b, rng = sizes, len(kinds), np.random.default_rng(5)
    state, last = (rng.standard_normal((b, h, d, v)).astype(np.float32) * s for s in (0.1, 1.0))
    return batch(kinds, length, "float16", sizes), [state, rng.standard_normal((b, length, h, v)).astype("f2"), last]


def gradients(
    x: dict[str, Any], others: Numbers, lengths: Any, plan: GradientSchedule = USUAL, scale: float = 0.125
) -> Numbers:
    """Returns the gradients by the kernels."""
    state, cotangent, of_last = map(jnp.asarray, others)
    tokens, counts = [jnp.asarray(a) for a in x.values()], jnp.asarray(lengths, jnp.int32)
    call = CALL | {"scale": scale}
    edges = gated_delta_rule(*tokens, state, counts, keep_edges=True, **call, schedule=WIDE)[2]
    call |= {"contract": MmaDeltaRuleGradientContract(), "schedule": plan}
    return list(map(np.asarray, gated_delta_rule_gradients(*tokens, edges, counts, cotangent, of_last, **call)))


def exact(x: dict[str, Any], others: Numbers, i: int, n: int) -> tuple[Numbers, Numbers]:
    """Returns the gradients of the first n tokens of a sequence: in float64, and by the portable program."""
    state, cotangent, of_last = (a[i : i + 1] for a in others)
    arrays = [a[i : i + 1, :n] for a in x.values()] + [state, cotangent[:, :n], of_last]

    def portable(*a: jax.Array) -> Any:
        return bijax.gated_delta_rule(*a[:5], initial_state=a[5])

    usual = jax.jit(lambda *a: jax.vjp(portable, *a[:6])[1](a[6:]))(*arrays)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in arrays]
        found = jax.jit(lambda *a: jax.vjp(recurrent, *a[:6])[1](a[6:]))(*wide)
    return [np.asarray(a)[0] for a in found], [np.asarray(a, np.float64)[0] for a in usual]


def error(found: Any, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected))


def check(x: dict[str, Any], others: Numbers, found: Numbers, lengths: list[int]) -> None:
    """Compares numbers with float64: errors are those of three roundings, where the portable program has one."""
    for i, n in enumerate(lengths):
        wide, portable = exact(x, others, i, n)
        for name, ours, usual, expected in zip(NAMES, found, portable, wide, strict=True):
            ours = ours[i] if name == "state" else ours[i, :n]
            assert error(ours, expected) < 7e-4, (name, error(ours, expected))
            assert error(usual, expected) < 7e-4, name
    for ours in found[:5]:
        for i, n in enumerate(lengths):
            assert not ours[i, n:].any()


def case_numbers() -> None:
    """Also bits: alone, in other places, after other lengths of the arrays, and by another schedule."""
    (x, others), lengths = given(("normal", "lasting"), 130), [130, 70]
    found = gradients(x, others, lengths)
    check(x, others, found, lengths)
    ways = {
        "other places": gradients({n: a[::-1] for n, a in x.items()}, [a[::-1] for a in others], lengths[::-1]),
        "schedule": gradients(x, others, lengths, OTHER),
    }
    for what, other in ways.items():
        for a, b in zip(found, other, strict=True):
            assert_bits_equal(a, b[::-1] if what == "other places" else b)
    state, cotangent, last = (a[1:] for a in others)
    alone = gradients({n: a[1:, :80] for n, a in x.items()}, [state, cotangent[:, :80], last], [70])
    for name, a, b in zip(NAMES, found, alone, strict=True):
        assert_bits_equal(a[1:] if name == "state" else a[1:, :80], b)


def case_sizes() -> None:
    for sizes in ((1, 1, 128, 64), (1, 1, 64, 128)):
        x, others = given(("normal",), 70, sizes)
        check(x, others, gradients(x, others, [70], scale=sizes[2] ** -0.5), [70])


def case_nan() -> None:
    """What is not finite reaches its own head alone, and the queries and keys that the head shares."""
    (x, others), lengths = given(("normal", "normal", "normal"), 80), [80, 80, 0]
    usual = gradients(x, others, lengths)
    x["value"][0, 70, 1, 5], x["key"][2] = np.inf, np.nan
    found = gradients(x, others, lengths)
    for name, a, b in zip(NAMES, found, usual, strict=True):
        assert_bits_equal(a[1], b[1])
        if name == "state":
            assert_bits_equal(a[2], others[2][2])
            assert_bits_equal(a[0, 0], b[0, 0])
        else:
            assert not a[2].any()
        if name in ("value", "g", "beta"):
            assert_bits_equal(a[0, :, 0], b[0, :, 0])
    assert np.isnan(found[3][0, :, 1]).any()


if __name__ == "__main__":
    interpret_launches()
    interpret_instructions()
    {"numbers": case_numbers, "sizes": case_sizes, "nan": case_nan}[sys.argv[1]]()
    print("compared")

"""The Mosaic kernel for few tokens, lane by lane in NumPy, against the Triton kernels in Triton's interpreter.

TRITON_INTERPRET=1 python -m tests.delta_rule.interpreted_few_rows TOKENS COLUMNS SLOTS
"""

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.testing import assert_bits_equal
from pallas_kernels.contract import MmaDeltaRuleContract
from pallas_kernels.delta_rule.extend import gated_delta_rule_extend
from pallas_kernels.delta_rule.hopper.few_form import Arrays, Form
from pallas_kernels.delta_rule.hopper.few_one import program_of
from pallas_kernels.delta_rule.schedule.jax_triton import Schedule
from pallas_kernels.delta_rule.slots import packed, unpacked
from pallas_kernels.target import Target
from tests.delta_rule.lanes import run_blocks
from tests.delta_rule.plain import recurrent
from tests.jax_triton.interpreted import interpret_launches
from tests.jax_triton.interpreter_instructions import interpret_instructions

HEADS, KEY_HEADS, SIZE = 2, 1, 128
NAMES = ("state", "key", "residual", "inverse", "decay")


def given(tokens: int, in_slots: bool, here: list[int], lengths: list[int], kind: int) -> tuple[Any, Any, Any]:
    b, rng = len(here), np.random.default_rng(tokens)
    m = 2 * b + 1 if in_slots else b

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).sum(-1, keepdims=True))

    q, k = (unit(normal(b, tokens, KEY_HEADS, SIZE)) for _ in range(2))
    v = normal(b, tokens, HEADS, SIZE)
    g, beta = -np.exp(normal(b, tokens, HEADS) - 2), 1 / (1 + np.exp(-normal(b, tokens, HEADS)))
    residual = normal(m, HEADS, 64, SIZE)
    if kind:
        v[0, 0, 0, 5] = np.inf
        k[-1, -1, 0, 7] = np.nan
        g[0, -1, 1] = np.nan
        g[-1, 0, 0] = -np.inf
        beta[b // 2, 0, 1] = np.inf
        residual[:, 0, 3, 9] = np.nan
        q[b // 2] = -0.0
    x = [jnp.asarray(a, jnp.bfloat16) for a in (q, k, v)] + [jnp.asarray(a) for a in (g, beta)]
    t = np.tril(normal(m, HEADS, 64, 64) * 0.1, -1) + np.eye(64, dtype=np.float32)
    t = np.asarray(jnp.asarray(t, jnp.bfloat16), np.float32)
    if in_slots:
        t = np.asarray(packed(jnp.asarray(t)))
    keys = jnp.asarray(unit(normal(m, KEY_HEADS, 64, SIZE)), jnp.bfloat16)
    kept = [jnp.asarray(normal(m, HEADS, SIZE, SIZE) * 0.1), keys, jnp.asarray(residual, jnp.bfloat16), jnp.asarray(t)]
    kept.append(jnp.asarray(np.cumsum(-np.exp(normal(m, HEADS, 64) - 3), -1, dtype=np.float32)))
    edge = 64 * (np.arange(b) % 3)
    places = [edge, edge + np.array(here), np.array(lengths)]
    if in_slots:
        places.append(rng.permutation(m)[:b])
    return x, kept, [jnp.asarray(a, jnp.int32) for a in places]


def by_lanes(x: Any, kept: Any, places: Any, form: Form) -> Any:
    """Returns what the Mosaic kernel computes."""
    b = x[0].shape[0]
    x, kept, places = (jax.tree.map(np.array, a) for a in (x, kept, places))
    state, key, residual, inverse, decay = kept
    out = np.full(x[2].shape, np.nan, x[2].dtype)
    new_edge = np.full(b, 77, np.int32)
    slots = places[3] if form.in_slots else places[2]
    arrays = Arrays(*x, *places[:3], slots, state, key, residual, inverse, decay, out, new_edge)
    # The blocks of a sequence at the same time, and one after another, in either order.
    for i in range(b):
        programs = [
            functools.partial(run, arrays, form, np.int32(i * form.value_heads * form.parts + block))
            for block in range(form.value_heads * form.parts)
        ]
        groups = [programs] if i % 3 == 0 else [[p] for p in programs[:: 1 if i % 3 == 1 else -1]]
        for group in groups:
            run_blocks(group, form.words)
    return out, state, key, residual, inverse, decay, new_edge


def run(arrays: Arrays, form: Form, block: Any, ops: Any) -> None:
    program_of(form)(ops, arrays, form, block).run()


def mend_bfloat16() -> None:
    """Triton's interpreter cuts off float32 numbers that become bfloat16, and compares bfloat16 numbers as integers."""
    from triton.language import core as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    builder: Any = InterpreterBuilder
    usual = builder.cast_impl

    def cast(self: Any, x: Any, target: Any) -> Any:
        if x.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return TensorHandle(np.asarray(x.data).astype(jnp.bfloat16).view(np.uint16), tl.bfloat16)
        return usual(self, x, target)

    unequal = builder.create_fcmpUNE

    def compare(self: Any, *operands: Any) -> Any:
        wide = [cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in operands]
        return unequal(self, *wide)

    builder.cast_impl = builder.create_fp_trunc = cast
    builder.create_fcmpUNE = compare


def mend(triangles: np.ndarray, rows: int) -> np.ndarray:
    """Returns T with zeros from a row on."""
    whole = np.array(unpacked(jnp.asarray(triangles)))
    whole[:, rows:] = 0
    return np.asarray(packed(jnp.asarray(whole)))


def main(tokens: int, columns: int, in_slots: bool) -> None:
    interpret_launches()
    interpret_instructions()
    mend_bfloat16()
    for kind in (0, 1):
        here = [0, 64 - tokens, 31, 17, 64, 65 - tokens, 63]
        lengths = [tokens, tokens, max(tokens - 1, 0), tokens, tokens, tokens, min(tokens, 3)]
        x, kept, places = given(tokens, in_slots, here, lengths, kind)
        target = dataclasses.replace(Target.parse("sm_80"), backend="jax_triton")
        call = functools.partial(gated_delta_rule_extend, scale=SIZE**-0.5, contract=MmaDeltaRuleContract())
        expected = call(*x, *kept, *places, target=target, schedule=Schedule(64, 4, 1, rows_warps=4))
        form = Form(tokens, KEY_HEADS, HEADS, columns // 32, in_slots, SIZE**-0.5, MmaDeltaRuleContract().least)
        found = by_lanes(x, kept, places, form)
        for name, ours, theirs in zip(("y", *NAMES, "edge"), found, expected, strict=True):
            print(kind, name, flush=True)
            ours, theirs = (np.array(a) for a in (ours, theirs))
            if name in NAMES[1:]:
                for i, (row, count) in enumerate(zip(here, lengths, strict=True)):
                    at = int(places[3][i]) if in_slots else i
                    if row + count > 64 and not (in_slots and name == "inverse"):
                        # Rows of the chunk before mean nothing.
                        ours[at, :, row + count - 64 :] = theirs[at, :, row + count - 64 :] = 0
                    elif row + count > 64:
                        ours[at], theirs[at] = (mend(a[at], row + count - 64) for a in (ours, theirs))
            assert_bits_equal(np.asarray(ours), np.asarray(theirs))
        if not kind and not in_slots:
            # The control: the recurrence, of a sequence that is at an edge.
            y, _ = recurrent(*(a[:1] for a in x), kept[0][:1])
            try:
                assert_bits_equal(np.asarray(y), np.asarray(expected[0])[:1])
            except AssertionError:
                pass
            else:
                raise AssertionError("The recurrence has the same bits.")
    print("compared")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1")

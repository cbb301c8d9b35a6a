"""The causal convolution and the gated norm by Triton's interpreter, compared bit by bit with numpy in the same order.

A program that `test_conv_jax_triton.py` runs: TRITON_INTERPRET=1 python -m tests.delta_rule.interpreted_conv CASE
"""

import sys
from collections.abc import Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from bijax.testing import assert_bits_equal
from pallas_kernels.causal_conv.heads import Heads
from pallas_kernels.causal_conv.jax_triton.launch import causal_conv, causal_conv_extend
from pallas_kernels.causal_conv.schedule.jax_triton import ConvSchedule
from pallas_kernels.contract import XLA_FUNCTIONS, row_contract
from pallas_kernels.gated_norm.jax_triton.launch import gated_rms_norm
from pallas_kernels.gated_norm.schedule.jax_triton import GatedSchedule
from pallas_kernels.target import Target
from tests.jax_triton.interpreted import interpret_launches
from tests.jax_triton.interpreter_instructions import interpret_instructions, xla_silu
from tests.rows.row_emulation import halve

TARGET: Final = Target.parse("sm_80")
HEADS: Final = Heads(keys=1, values=2, width=128, value_width=128, eps=1e-6)
SCHEDULES: Final = (None, ConvSchedule(8, 1, width=64), ConvSchedule(4, 2, 4), ConvSchedule(2, 1, 4, width=128))
TAPS: Final = 4


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Numbers over many binades, zeros of both signs, infinities and nans."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal(shape) * 2.0 ** draw.integers(-12, 4, shape)
    x = np.where(draw.random(shape) < 0.05, -0.0, x)
    x.reshape(-1)[[11, x.size // 2, -7]] = np.nan, np.inf, -np.inf
    with np.errstate(over="ignore"):
        return x.astype(jnp.dtype(dtype))


def window_sums(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, silu: bool) -> np.ndarray:
    """Convolves x (B, 3 + T, C), the oldest tap first, and rounds to the dtype of x."""
    total = x.shape[1] - (TAPS - 1)
    wide, w = x.astype(np.float32), weight.astype(np.float32)
    with np.errstate(all="ignore"):
        y = wide[:, :total] * w[:, 0]
        for j in range(1, TAPS):
            y = y + wide[:, j : j + total] * w[:, j]
        if bias is not None:
            y = y + bias.astype(np.float32)
        return (xla_silu(y) if silu else y).astype(x.dtype)


def heads_of(y: np.ndarray) -> list[np.ndarray]:
    """Divides the heads of queries and keys by their lengths, in the order of `RowContract`."""
    n = HEADS.keys
    x = y.reshape(*y.shape[:2], -1, 128)
    wide = x[:, :, : 2 * n].astype(np.float32)
    with np.errstate(all="ignore"):
        total = halve((wide * wide).reshape(-1, 128)).reshape(*wide.shape[:3], 1)
        factor = np.float32(1) / np.sqrt(total / np.float32(128) + np.float32(HEADS.of_norm["eps"]))
        normal = (wide * factor * np.float32(HEADS.of_norm["offset"])).astype(y.dtype)
    return [normal[:, :, :n], normal[:, :, n:], x[:, :, 2 * n :]]


def same(found: Any, expected: Any) -> None:
    """Compares bits; nans may have any payload, as numpy's have others than a GPU's."""
    for a, b in zip(found, expected, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_array_equal(np.isnan(a.astype(np.float32)), np.isnan(b.astype(np.float32)))
        assert_bits_equal(np.where(np.isnan(a), np.zeros_like(a), a), np.where(np.isnan(b), np.zeros_like(b), b))


def options(heads: Heads | None, activation: str | None) -> dict[str, Any]:
    common: dict[str, Any] = {"activation": activation, "heads": heads, "functions": XLA_FUNCTIONS, "target": TARGET}
    return common | ({} if heads is None else {"contract": row_contract()})


def case_whole() -> None:
    for dtype, channels, source, heads, activation in (
        ("float16", 512, 520, HEADS, "silu"),
        ("float16", 200, 200, None, "silu"),
        ("float32", 23, 40, None, None),
        ("float32", 512, 512, HEADS, "silu"),
    ):
        x, before = numbers((2, 37, source), dtype, 0), numbers((2, 3, channels), dtype, 1)
        weight, bias = (
            np.random.default_rng(2).standard_normal((channels, TAPS)).astype(dtype),
            None if heads else x[0, 0, :channels],
        )
        for given in (None, before):
            joined = np.concatenate([np.zeros_like(before) if given is None else given, x[..., :channels]], 1)
            y = window_sums(joined, weight, bias, activation == "silu")
            for schedule in SCHEDULES:
                found = causal_conv(
                    jnp.asarray(x),
                    jnp.asarray(weight),
                    bias=None if bias is None else jnp.asarray(bias),
                    before=None if given is None else jnp.asarray(given),
                    schedule=schedule,
                    **options(heads, activation),
                )
                same(found, heads_of(y) if heads else [y])
    wrong = window_sums(joined[:, :, ::-1], weight[::-1, ::-1], None, True)[:, :, ::-1]
    assert (np.nan_to_num(wrong) != np.nan_to_num(y)).any()  # control: another order of the taps


def case_extend(totals: Sequence[int] = (1, 3, 8, 19), schedules: Sequence[ConvSchedule | None] = SCHEDULES) -> None:
    for dtype, channels, kept, heads, in_order in (
        ("float16", 512, 16, HEADS, False), ("float32", 150, 5, None, True),
    ):  # fmt: skip
        starts = np.array([0, 1, 2, 3, 61, 7, 5], np.int32)
        x = numbers((len(starts), 80, channels), dtype, 3)
        weight = np.random.default_rng(4).standard_normal((channels, TAPS)).astype(dtype)
        y = window_sums(np.concatenate([np.zeros_like(x[:, :3]), x], 1), weight, None, True)
        slots = np.arange(7, dtype=np.int32) if in_order else np.array([3, 8, 0, 1, 5, 2, 7], np.int32)
        for total in totals:
            counts = np.array([total, min(2, total), total, 0, total, -1, 1], np.int32)
            state = numbers((9, kept, channels), dtype, 5)
            for i, n in enumerate(starts):
                for p in range(max(0, n - kept), n):
                    state[slots[i], p % kept] = x[i, p]
            part = np.stack([x[i, n : n + total] for i, n in enumerate(starts)])
            expected, after = np.stack([y[i, n : n + total] for i, n in enumerate(starts)]), state.copy()
            for i, n in enumerate(counts):
                for t in range(max(0, n - kept), n):
                    after[slots[i], (starts[i] + t) % kept] = part[i, t]
            results = heads_of(expected) if heads else [expected]
            for i, n in enumerate(counts):
                for each in results:
                    each[i, max(n, 0) :] = 0 if n >= 0 else np.nan
            for schedule in schedules:
                *found, new = causal_conv_extend(
                    *map(jnp.asarray, (part, weight)),
                    state=jnp.asarray(state),
                    first=jnp.asarray(starts),
                    count=jnp.asarray(counts),
                    slot=None if in_order else jnp.asarray(slots),
                    schedule=schedule,
                    **options(heads, "silu"),
                )
                same(found, results)
                assert_bits_equal(new, after)


def case_few() -> None:
    case_extend((3,), (None,))


def case_gated() -> None:
    for dtype in ("float16", "float32"):
        x, gate = numbers((3, 5, 2, 128), dtype, 6), numbers((3, 5, 300), dtype, 7)
        weight = np.random.default_rng(8).standard_normal(128).astype(np.float32)
        wide, opened = x.astype(np.float32), xla_silu(gate[..., 44:].astype(np.float32)).reshape(x.shape)
        for scale in (weight, None):
            with np.errstate(all="ignore"):
                total = halve((wide * wide).reshape(-1, 128)).reshape(3, 5, 2, 1)
                y = wide * (np.float32(1) / np.sqrt(total / np.float32(128) + np.float32(1e-6)))
                y = ((y if scale is None else y * scale) * opened).astype(dtype)
            for schedule in (None, GatedSchedule(8, 1), GatedSchedule(2, 1)):
                found = gated_rms_norm(
                    x=jnp.asarray(x.reshape(-1, 128)),
                    gate=jnp.asarray(gate.reshape(-1, 300)),
                    weight=None if scale is None else jnp.asarray(scale),
                    column=44,
                    eps=1e-6,
                    contract=row_contract(),
                    functions=XLA_FUNCTIONS,
                    target=TARGET,
                    schedule=schedule,
                )
                same(found, [y.reshape(-1, 128)])


if __name__ == "__main__":
    interpret_instructions()
    interpret_launches()
    {"whole": case_whole, "extend": case_extend, "few": case_few, "gated": case_gated}[sys.argv[1]]()
    print("equal")

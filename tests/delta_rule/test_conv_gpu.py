"""The convolution and the gated norm in one kernel, on a GPU: the bits of the operations that they stand for."""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.core.architecture import target_for
from bijax.ops.delta_rule.conv_heads import conv_heads, conv_heads_extend
from bijax.ops.norm.gated import gated_heads
from bijax.testing import assert_bits_equal
from pallas_kernels.causal_conv import portable
from pallas_kernels.causal_conv.heads import Heads
from pallas_kernels.parts.jax_triton.launch import launch
from tests.delta_rule.conv_numbers import KINDS, numbers
from tests.jax_triton.packages import skip_without_jax_triton

pytestmark = pytest.mark.gpu
skip_without_jax_triton()
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from pallas_kernels.parts.jax_triton.arithmetic import xla_silu  # noqa: E402

HEADS: Final = Heads(keys=2, values=3, width=128, value_width=128, eps=1e-6)
TOTAL: Final = 301
DTYPES: Final = ("bfloat16", "float16", "float32")
AT_ONCE: Final = 1 << 27


@triton.jit
def silu_kernel(first, y_ptr):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(y_ptr + i, xla_silu((i + first).to(tl.int32).to(tl.float32, bitcast=True)))


def test_silu_of_all_numbers() -> None:
    """XLA's own silu, of which the kernels have the instructions, on all float32 numbers."""
    by_xla = bijax.elementwise(jax.nn.silu)

    @functools.partial(jax.jit, static_argnums=0)
    def differing(first: int) -> jax.Array:
        bits = jnp.arange(AT_ONCE, dtype=jnp.int32) + jnp.int32(first)
        out = [jax.ShapeDtypeStruct((AT_ONCE,), jnp.float32)]
        options: dict[str, Any] = {"warps": 4, "stages": 1, "fuses": False, "constants": {}, "out": out}
        (y,) = launch(silu_kernel, first, target=target_for("cuda"), grid=(AT_ONCE // 1024,), **options)
        expected = by_xla(jax.lax.bitcast_convert_type(bits, jnp.float32))
        return (jax.lax.bitcast_convert_type(y, jnp.int32) != jax.lax.bitcast_convert_type(expected, jnp.int32)).sum()

    assert [int(differing(first)) for first in range(-(1 << 31), 1 << 31, AT_ONCE)] == [0] * 32


@functools.partial(jax.jit, static_argnames="heads")
def apart(x: jax.Array, weight: jax.Array, before: Any = None, bias: Any = None, heads: Any = None) -> Any:
    """The convolution by XLA's programs, and the norms of heads by themselves."""
    columns = [weight[:, j] for j in range(4)]
    x = x[..., : len(weight)]
    given = jnp.zeros((len(x), 3, len(weight)), x.dtype) if before is None else before
    joined = jnp.concatenate([given, x], axis=1)
    taps = [joined[:, j : j + x.shape[1]] for j in range(4)]
    y = SUMS[bias is not None](*taps, *columns, *(() if bias is None else (bias,))).astype(x.dtype)
    if heads is None:
        return (y,)
    of_keys = heads.keys * heads.width
    query, key, value = (
        a.reshape(*a.shape[:2], -1, heads.width) for a in jnp.split(y, [of_keys, 2 * of_keys], axis=-1)
    )
    return bijax.l2_norm(query), bijax.l2_norm(key), value


SUMS: Final = [bijax.elementwise(portable.program("silu", biased)) for biased in (False, True)]


def inputs(dtype: str, kind: str) -> tuple[jax.Array, jax.Array]:
    x = numbers((3, TOTAL, HEADS.channels + 384), dtype, 2, kind)
    return x, numbers((HEADS.channels, 4), dtype, 1, "wide" if kind == "wide" else "normal")


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_sequences(dtype: str) -> None:
    for kind in KINDS:
        x, weight = inputs(dtype, kind)
        jax.tree.map(
            assert_bits_equal, jax.jit(conv_heads, static_argnums=2)(x, weight, HEADS), apart(x, weight, heads=HEADS)
        )
        before, bias = numbers((3, 3, HEADS.channels), dtype, 3, kind), numbers((HEADS.channels,), dtype, 4, "normal")
        x = x[..., : HEADS.channels]
        run = jax.jit(functools.partial(bijax.causal_conv1d, activation="silu"))
        assert_bits_equal(run(x, weight, bias, before=before), apart(x, weight, before, bias)[0])
    if dtype != "float32":
        return  # results of 16 bits hide the order of four terms
    reverse = apart(x[:, ::-1], weight[:, ::-1])[0][:, ::-1][:, :-3]  # control: the taps in another order
    with pytest.raises(AssertionError):
        assert_bits_equal(reverse, apart(x, weight)[0][:, 3:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_in_slots(dtype: str) -> None:
    slots, sizes = (
        jnp.array([4, 0, 6], jnp.int32),
        [(1, 1)] * 5 + [(8, 5), (8, 3), (64, 50), (64, 64), (1, 1), (64, 33)],
    )

    @functools.partial(jax.jit, donate_argnums=2)
    def step(x: Any, weight: Any, state: Any, start: Any, lengths: Any) -> Any:
        return conv_heads_extend(x, weight, HEADS, state=state, start=start, lengths=lengths, slots=slots)

    for kind in KINDS:
        x, weight = inputs(dtype, kind)
        whole, state, start = apart(x, weight, heads=HEADS), jnp.full((7, 12, HEADS.channels), jnp.nan, dtype), 0
        for size, n in sizes:
            part, counts = x[:, start : start + size], jnp.full(3, n, jnp.int32)
            found, state = step(part, weight, state, jnp.full(3, start, jnp.int32), counts)
            for a, b in zip(found, whole, strict=True):
                assert_bits_equal(a[:, :n], b[:, start : start + n])
                assert not a[:, n:].any()
            start += n
        last = np.arange(start - 12, start)
        assert_bits_equal(state[slots][:, last % 12], x[:, last, : HEADS.channels])
        assert jnp.isnan(jnp.delete(state, slots, axis=0)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_norm(dtype: str) -> None:
    times_silu = bijax.elementwise(lambda x, gate: x * jax.nn.silu(gate.astype(jnp.float32)))

    @jax.jit
    def of_two(x: jax.Array, gate: jax.Array, weight: jax.Array | None) -> jax.Array:
        normal = bijax.rms_norm(x.astype(jnp.float32), weight, eps=1e-6)
        return times_silu(normal, gate[..., -3 * 128 :].reshape(x.shape)).astype(x.dtype)

    for kind in KINDS:
        x, gate = numbers((3, 101, 3, 128), dtype, 5, kind), numbers((3, 101, 1000), dtype, 6, kind)
        for weight in (numbers((128,), "float32", 7, "normal"), None):
            found = jax.jit(functools.partial(gated_heads, eps=1e-6))(x, gate, weight)
            assert_bits_equal(found, of_two(x, gate, weight))

"""Gradients of attention on a Hopper GPU: the same bits alone, in a batch, among few queries, in a longer cache."""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.attention.schedule import hopper as schedule
from pallas_kernels.attention.schedule.gradient_order import GradientOrder, Work, gradient_order
from pallas_kernels.contract import KEY_BLOCK
from pallas_kernels.schedule.hopper.tiles import SMS
from tests.attention.calls_on_gpu import KINDS, Call, array, run

pytestmark = pytest.mark.gpu

LENGTH: Final = 700
HEADS: Final = 8
KEY_HEADS: Final = 2
CHUNKS: Final = ((0, 1), (127, 130), (333, 64), (640, 60))
"""Where queries of a chunk begin, and how many there are: around the edges of tiles and blocks."""

FUNCTIONS: Final[dict[str, Callable[..., jax.Array]]] = {
    "causal": functools.partial(bijax.dot_product_attention, is_causal=True),
    "window": functools.partial(bijax.dot_product_attention, is_causal=True, local_window_size=(200, 0)),
    "full": bijax.dot_product_attention,
}


OTHER_KINDS: Final = ((96, 96, "bfloat16"), (192, 192, "float16"), (192, 128, "bfloat16"), (256, 256, "bfloat16"))

OPTIONS: Final[dict[str, Any]] = {
    "logits_soft_cap": 5.0,
    "alibi_slopes": np.linspace(0.01, 0.1, HEADS, dtype=np.float32),
}


def arrays(size: int, dtype: str, value_size: int | None = None) -> tuple[jax.Array, ...]:
    """Queries, keys, values and cotangents of two sequences."""
    shapes = ((HEADS, size), (KEY_HEADS, size), (KEY_HEADS, value_size or size), (HEADS, value_size or size))
    return tuple(array(seed, 2, LENGTH, *shape, dtype=dtype) for seed, shape in enumerate(shapes))


def pull(function: Callable[..., jax.Array], **options: Any) -> Callable[..., Any]:
    """Returns a function of queries, keys, values and cotangents that gives the three gradients."""
    return lambda q, k, v, g: jax.vjp(functools.partial(function, **options), q, k, v)[1](g)


def exactly(
    name: str, *given: jax.Array, logits_soft_cap: float | None = None, alibi_slopes: Any = None
) -> list[np.ndarray]:
    """The gradients of one sequence in float64, without a batch."""
    q, k, v, g = (np.asarray(x, np.float64) for x in given)
    i, j = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None]
    seen = np.ones((LENGTH, LENGTH), bool) if name == "full" else j <= i
    if name == "window":
        seen &= j >= i - 200
    scale, group = q.shape[-1] ** -0.5, HEADS // KEY_HEADS
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for head in range(HEADS):
        own = head // group
        scores, bent = q[:, head] @ k[:, own].T * scale, np.ones((LENGTH, LENGTH))
        if logits_soft_cap is not None:
            scores, bent = logits_soft_cap * np.tanh(scores / logits_soft_cap), np.cosh(scores / logits_soft_cap) ** -2
        if alibi_slopes is not None:
            scores = scores + float(alibi_slopes[head]) * (j - i)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        out = weights @ v[:, own]
        slopes = weights * (g[:, head] @ v[:, own].T - (g[:, head] * out).sum(1, keepdims=True)) * bent * scale
        dq[:, head] = slopes @ k[:, own]
        dk[:, own] += slopes.T @ q[:, head]
        dv[:, own] += weights.T @ g[:, head]
    return [dq, dk, dv]


@pytest.mark.parametrize(("size", "dtype"), KINDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_and_errors(name: str, size: int, dtype: str) -> None:
    given, function = arrays(size, dtype), FUNCTIONS[name]
    q, k, v, g = given
    room = tuple(jnp.pad(x, ((0, 0), (0, 77), (0, 0), (0, 0)), constant_values=jnp.nan) for x in given)
    lengths = np.full(2, LENGTH)
    calls: list[Call] = [
        (pull(function), given),
        (pull(function), tuple(x[1:] for x in given)),
        (pull(function), tuple(jnp.concatenate([x, x[:1]]) for x in given)),
        (pull(function, query_seq_lengths=lengths, key_value_seq_lengths=lengths), room),
    ]
    chunk_calls = [
        (pull(function, query_offset=start), (q[:, start : start + count], k, v, g[:, start : start + count]))
        for start, count in CHUNKS
    ]
    whole, alone, three, longer, *chunks = run(calls + chunk_calls)
    assert_bits_equal(alone, tuple(x[1:] for x in whole))
    assert_bits_equal(tuple(x[:2] for x in three), whole)
    assert_bits_equal(tuple(x[2:] for x in three), tuple(x[:1] for x in whole))
    assert_bits_equal(tuple(x[:, :LENGTH] for x in longer), whole)
    for x in longer:
        assert not np.asarray(x[:, LENGTH:], np.float32).any()
    for (start, count), found in zip(CHUNKS, chunks, strict=True):
        assert_bits_equal(found[0], whole[0][:, start : start + count])
    program = jax.jit(pull(function))
    for _ in range(5):
        assert_bits_equal(program(*given), whole)
    unit = float(jnp.finfo(dtype).eps)
    for ours, exact in zip(whole, exactly(name, *(x[0] for x in given)), strict=True):
        distance = np.linalg.norm(np.asarray(ours[0], np.float64) - exact)
        assert distance <= unit * np.linalg.norm(exact)


@pytest.mark.parametrize(("size", "value_size", "dtype"), [*OTHER_KINDS, *((n, n, dtype) for n, dtype in KINDS)])
@pytest.mark.parametrize("options", [{}, OPTIONS])
def test_other_widths_and_options(size: int, value_size: int, dtype: str, options: dict[str, Any]) -> None:
    given, function = arrays(size, dtype, value_size), FUNCTIONS["causal"]
    q, k, v, g = given
    chunk = slice(333, 397)
    calls: list[Call] = [
        (pull(function, **options), given),
        (pull(function, **options), tuple(x[1:] for x in given)),
        (pull(function, query_offset=chunk.start, **options), (q[:, chunk], k, v, g[:, chunk])),
    ]
    whole, alone, few = run(calls)
    assert_bits_equal(alone, tuple(x[1:] for x in whole))
    assert_bits_equal(few[0], whole[0][:, chunk])
    program = jax.jit(pull(function, **options))
    for _ in range(3):
        assert_bits_equal(program(*given), whole)
    unit = float(jnp.finfo(dtype).eps)
    for ours, exact in zip(whole, exactly("causal", *(x[0] for x in given), **options), strict=True):
        distance = np.linalg.norm(np.asarray(ours[0], np.float64) - exact)
        assert distance <= unit * np.linalg.norm(exact)


@pytest.mark.parametrize(("size", "dtype"), KINDS)
def test_parts_of_items_have_the_bits_of_whole_ones(size: int, dtype: str) -> None:
    """Blocks of keys of a large batch are cut and taken in another order than those of a sequence alone."""
    heads, key_heads, length = 32, 8, 4096
    rows = schedule.gradient_schedule(size, sees_all=False).rows

    def order(batch: int) -> GradientOrder | None:
        steps = tuple(-(-length // rows) - start // rows for start in range(0, length, KEY_BLOCK))
        return gradient_order(Work(batch * key_heads, heads // key_heads, steps, SMS))

    batch, start = 4, 64
    assert order(batch) is not None
    assert order(batch) != order(1)
    shapes = ((heads, size), (key_heads, size), (key_heads, size), (heads, size))
    q, k, v, g = given = tuple(array(seed, batch, length, *shape, dtype=dtype) for seed, shape in enumerate(shapes))
    few = (q[:, start:], k, v, g[:, start:])
    alone = tuple(x[1:2] for x in given)
    function = FUNCTIONS["causal"]
    whole, one, items = run(
        [(pull(function), given), (pull(function), alone), (pull(function, query_offset=start), few)]
    )
    assert_bits_equal(tuple(x[1:2] for x in whole), one)
    assert_bits_equal(items[0], whole[0][:, start:])  # as many queries as keys are needed for parts
    assert_bits_equal(items[1][:, length // 2 :], whole[1][:, length // 2 :])
    assert_bits_equal(items[2][:, length // 2 :], whole[2][:, length // 2 :])
    program = jax.jit(pull(function))
    for _ in range(3):
        assert_bits_equal(program(*given), whole)


def test_cudnn_gradients_of_few_queries_are_others() -> None:
    """The control: the same comparison of what JAX has for this GPU."""
    q, k, v, g = (x[:, :640] for x in arrays(*KINDS[0]))
    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    whole, few = (jax.jit(pull(cudnn))(q[:, :n], k, v, g[:, :n]) for n in (640, 64))
    assert (np.asarray(few[0]) != np.asarray(whole[0][:, :64])).any()


@pytest.mark.parametrize(("size", "dtype"), KINDS)
@pytest.mark.parametrize("which", range(4))
def test_what_is_not_finite_reaches_those_who_see_it(which: int, size: int, dtype: str) -> None:
    given, at = arrays(size, dtype), 300
    poisoned = list(given)
    poisoned[which] = given[which].at[0, at, 0, 5].set(jnp.inf if which == 2 else jnp.nan)
    program = jax.jit(pull(FUNCTIONS["causal"]))
    group = HEADS // KEY_HEADS
    queries, keys = np.zeros((2, LENGTH, HEADS), bool), np.zeros((2, LENGTH, KEY_HEADS), bool)
    if which in (1, 2):  # every later query sees the key, and every key is seen by one of them
        queries[0, at:, :group] = True
        keys[0, :, 0] = True
    else:
        queries[0, at, 0] = True
        keys[0, : at + 1, 0] = True
    for ours, zero_fill, bad in zip(program(*poisoned), program(*given), (queries, keys, keys), strict=True):
        assert_bits_equal(np.asarray(ours)[~bad], np.asarray(zero_fill)[~bad])
        assert np.isnan(np.asarray(ours, np.float32)[bad]).all()

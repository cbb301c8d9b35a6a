"""The gated delta rule: the same bits from a whole prompt, in parts, token by token, from a snapshot, after drafts."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax import DeltaRuleState
from bijax.dispatch.matmul import Product, multiply
from bijax.testing import assert_bits_equal
from pallas_kernels.contract import DeltaRuleContract
from pallas_kernels.delta_rule import gradients, portable
from pallas_kernels.delta_rule.portable import gated_delta_rule_extend
from pallas_kernels.delta_rule.slots import packed
from pallas_kernels.target import Target
from tests.delta_rule import plain
from tests.delta_rule.tokens import KINDS, SIZES, batch
from tests.delta_rule.ways import check_parts, check_slots, extend, part, same_state, whole

LENGTH: Final = 131
DTYPES: Final = ("bfloat16", "float32", "float16")
EDGES: Final = (0, 1, 63, 64, 65, 127, 128, 129)


def no_tokens(sequences: int, dtype: str) -> DeltaRuleState:
    j, h, d, v = SIZES
    return DeltaRuleState.zeros(sequences, key_heads=j, value_heads=h, key_size=d, value_size=v, dtype=dtype)


def spoilt(state: Any, edge: Any, dtype: str) -> DeltaRuleState:
    """Returns sequences of which only a snapshot is known; everything else is nan."""
    kept = DeltaRuleState.at_edge(state, edge, key_heads=SIZES[0], dtype=dtype)
    nans = {n: jnp.full_like(getattr(kept, n), jnp.nan) for n in ("key", "residual", "inverse", "decay")}
    return DeltaRuleState(state=kept.state, edge=kept.edge, length=kept.length, **nans)


@functools.cache
def prompts(dtype: str) -> tuple[dict[str, Any], np.ndarray, DeltaRuleState]:
    """Returns a sequence of each kind, its outputs and its state from one call."""
    x = batch(KINDS, LENGTH, dtype)
    y, state = extend(**x, state=no_tokens(len(KINDS), dtype))
    return x, np.asarray(y), state


def test_a_state_can_be_donated() -> None:
    """Each of its arrays is one of its own: JAX refuses to donate an array twice."""
    x = batch(KINDS, 1, "bfloat16")  # the program of the next test
    donated = jax.jit(lambda state, x: bijax.gated_delta_rule_extend(**x, state=state), donate_argnums=0)
    y, state = donated(no_tokens(len(KINDS), "bfloat16"), x)
    expected, _ = extend(**x, state=no_tokens(len(KINDS), "bfloat16"))
    assert_bits_equal(y, expected)
    y, _ = donated(
        DeltaRuleState.at_edge(state.state, np.full(len(KINDS), 64), key_heads=SIZES[0], dtype="bfloat16"), x
    )
    assert y.shape == expected.shape


@pytest.mark.tier("full", fast=("bfloat16",))
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_slots(dtype: str) -> None:
    x, expected, single = prompts(dtype)
    check_slots(x, expected, single, (1, 8, 70, 2))


def test_slots_in_a_mapped_axis() -> None:
    """Slots are counted in each entry."""
    x, (j, h, d, v) = batch(KINDS[:2], 3, "bfloat16"), SIZES
    state = DeltaRuleState.zeros(3, key_heads=j, value_heads=h, key_size=d, value_size=v, dtype="bfloat16")
    state = dataclasses.replace(state, inverse=packed(state.inverse))

    def run(x: Any, slot: Any) -> Any:
        one = {n: a[None] for n, a in x.items()}
        return bijax.gated_delta_rule_extend(**one, state=state, slots=slot[None], lengths=np.array([3]))

    y, after = jax.jit(jax.vmap(run))(x, np.array([2, 0]))
    expected, _ = extend(**x, state=no_tokens(2, "bfloat16"))
    assert_bits_equal(np.asarray(y)[:, 0], np.asarray(expected))
    assert after.length.tolist() == [[0, 0, 3], [3, 0, 0]]


@pytest.mark.tier("full", fast=("bfloat16",))
@pytest.mark.parametrize("dtype", DTYPES)
def test_token_by_token(dtype: str) -> None:
    x, expected, single = prompts(dtype)
    state, snapshots = no_tokens(len(KINDS), dtype), {}
    for i in range(LENGTH):
        y, state = extend(**{n: a[:, i : i + 1] for n, a in x.items()}, state=state)
        assert_bits_equal(np.asarray(y)[:, 0], expected[:, i])
        snapshots[i] = state
    same_state(state, single)
    # From a snapshot alone, with nothing else left, a token at an edge has its bits.
    for edge in (64, 128):
        warm = spoilt(snapshots[edge].state, [edge] * len(KINDS), dtype)
        y, _ = extend(**{n: a[:, edge : edge + 1] for n, a in x.items()}, state=warm)
        assert_bits_equal(np.asarray(y)[:, 0], expected[:, edge])
    finite = np.isfinite(np.asarray(expected, np.float32)).reshape(len(KINDS), -1).mean(1)
    assert 0.1 < finite[8] < 0.9
    if dtype != "float16":  # which cannot hold the numbers of all kinds
        assert finite[:8].min() > 0.5


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", ["edges", "all"])
def test_two_parts(dtype: str, cuts: str) -> None:
    x, expected, single = prompts(dtype)
    n = len(KINDS)
    for first in _cuts(cuts, n):
        same_state(check_parts(x, expected, [[0] * n, first, [LENGTH] * n], no_tokens(n, dtype), LENGTH), single)
    check_parts(x, expected, [[128] * n, [LENGTH] * n], spoilt(single.state, [128] * n, dtype), LENGTH)


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_sequences(dtype: str) -> None:
    x, expected, single = prompts(dtype)
    y, _ = whole(**x)
    assert_bits_equal(np.asarray(y), expected)
    # The state after a sequence that ends at an edge is a snapshot.
    _, snapshot = whole(**x, lengths=np.full(len(KINDS), 128))
    assert_bits_equal(snapshot, single.state)


def _cuts(which: str, sequences: int) -> Iterator[list[int]]:
    if which == "edges":
        yield [EDGES[i % len(EDGES)] for i in range(sequences)]
        return
    for first in range(LENGTH):
        yield [(first + 15 * i) % LENGTH for i in range(sequences)]


@pytest.mark.tier("full", fast=("bfloat16",))
@pytest.mark.parametrize("dtype", DTYPES)
def test_control_the_usual_forms_differ(dtype: str) -> None:
    x, expected, _ = prompts(dtype)
    x = {name: a[:1] for name, a in x.items()}
    state = jnp.zeros((1, *SIZES[1:]), jnp.float32)
    ones, others = jax.jit(plain.recurrent)(**x, state=state)[0], jax.jit(plain.chunked)(**x, state=state)[0]
    with pytest.raises(AssertionError):
        assert_bits_equal(others, ones)
    for y in (ones, others):  # but they are the same rule
        np.testing.assert_allclose(np.asarray(y, np.float32), np.asarray(expected[:1], np.float32), rtol=0.1, atol=0.02)


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3, 8, 9, 70])
def test_parts_that_cross_edges(dtype: str, size: int) -> None:
    x, expected, single = prompts(dtype)
    n = len(KINDS)
    bounds = [[min(i, LENGTH)] * n for i in range(0, LENGTH + size, size)]
    same_state(check_parts(x, expected, bounds, no_tokens(n, dtype), size), single)


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", DTYPES)
def test_drafts_of_which_some_are_wrong(dtype: str) -> None:
    x, expected, _ = prompts(dtype)
    n, rng, start, state = len(KINDS), np.random.default_rng(5), 0, no_tokens(len(KINDS), dtype)
    while start < LENGTH:
        room = min(4, 64 - start % 64, LENGTH - start)
        right = int(rng.integers(1, room + 1))
        some = part(x, [start] * n, 4)
        wrong = part(x, rng.integers(0, LENGTH - 4, n), 4)
        drafts = {name: np.concatenate([a[:, :right], wrong[name][:, right:]], 1) for name, a in some.items()}
        y, state = extend(**drafts, state=state, start=np.full(n, start), lengths=np.full(n, room))
        assert_bits_equal(np.asarray(y)[:, :right], expected[:, start : start + right])
        start += right


@pytest.mark.tier("full")
@pytest.mark.parametrize("sequences", [1, 2, 3, 5, 8])
def test_batches_at_other_positions(sequences: int) -> None:
    x, expected, _ = prompts("bfloat16")
    chosen = [(2 * i + sequences) % len(KINDS) for i in range(sequences)]
    ours = {name: a[np.array(chosen)] for name, a in x.items()}
    lengths = [LENGTH - 5 * (i % 4) for i in range(sequences)]
    cuts = [(7 * i + 3) % (n - 1) + 1 for i, n in enumerate(lengths)]
    bounds = [[0] * sequences, cuts, lengths]
    state = check_parts(ours, expected[np.array(chosen)], bounds, no_tokens(sequences, "bfloat16"), LENGTH)
    check_parts(ours, expected[np.array(chosen)], [lengths, [min(n + 1, LENGTH) for n in lengths]], state, 1)
    y, last = whole(**ours, lengths=jnp.asarray(lengths))
    y = np.asarray(y)
    for i, n in enumerate(lengths):
        assert_bits_equal(y[i, :n], expected[chosen[i], :n])
    sums = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    packed = {name: np.concatenate([a[i, :n] for i, n in enumerate(lengths)]) for name, a in ours.items()}
    y, states = jax.jit(functools.partial(bijax.gated_delta_rule, cu_seq_lengths=sums))(**packed)
    y = np.asarray(y)
    for i, n in enumerate(lengths):
        assert_bits_equal(y[sums[i] : sums[i] + n], expected[chosen[i], :n])
    assert_bits_equal(states, last)


@pytest.mark.tier("full")
def test_sizes_of_a_model() -> None:
    sizes, length = (1, 2, 128, 128), 150
    x = batch(("normal", "repeated", "broken"), length, "bfloat16", sizes)
    expected = np.asarray(whole(**x)[0])
    j, h, d, v = sizes
    state = DeltaRuleState.zeros(3, key_heads=j, value_heads=h, key_size=d, value_size=v, dtype="bfloat16")
    check_parts(x, expected, [[i] * 3 for i in range(length + 1)], state, 1)
    for cut in range(0, length, 7):
        check_parts(x, expected, [[0] * 3, [cut] * 3, [length] * 3], state, length)


@pytest.mark.tier("full")
@pytest.mark.parametrize("length", [0, 1, 8, 9, 63, 64, 65])
def test_short_sequences(length: int) -> None:
    x, expected, _ = prompts("bfloat16")
    y, state = whole(**{name: a[:2, :length] for name, a in x.items()})
    assert_bits_equal(y, expected[:2, :length])
    _, same = whole(**{name: a[:2] for name, a in x.items()}, lengths=jnp.full(2, length))
    assert_bits_equal(state, same)


@pytest.mark.tier("full")
@pytest.mark.parametrize("size", [4, LENGTH])
def test_sequences_together_as_on_a_gpu(size: int) -> None:
    """A GPU computes all sequences at once, also those that have ended already; a CPU one after another."""
    x, expected, _ = prompts("float32")
    n = len(KINDS)

    def product(a: jax.Array, w: jax.Array, transpose_w: bool) -> jax.Array:
        return multiply(Target("cpu"), a, w, product=Product("float32", transpose_w, "highest"))[0]

    @jax.jit
    def run(x: tuple[jax.Array, ...], state: DeltaRuleState, lengths: jax.Array) -> tuple[jax.Array, ...]:
        fields = (state.state, state.key, state.residual, state.inverse, state.decay, state.edge, state.length)
        options = {"scale": SIZES[2] ** -0.5, "product": product, "together": True, "contract": DeltaRuleContract()}
        return gated_delta_rule_extend(*x, *fields, lengths, **options)

    state = no_tokens(n, "float32")
    first = [0] * n if size == LENGTH else [60] * n
    if size != LENGTH:
        _, state = extend(**part(x, [0] * n, LENGTH), state=state, lengths=np.array(first))
    lengths = np.minimum([EDGES[i % len(EDGES)] for i in range(n)], size).astype(np.int32)
    y, *_ = run(tuple(part(x, first, size).values()), state, lengths)
    for i, count in enumerate(lengths):
        assert_bits_equal(np.asarray(y)[i, :count], expected[i, first[i] : first[i] + count])


@pytest.mark.tier("full")
def test_an_invariant_scan_of_the_recurrence_has_its_own_bits() -> None:
    x, expected, _ = prompts("float32")
    x = {name: a[:1] for name, a in x.items()}
    scan = jax.jit(bijax.invariant(plain.recurrent))
    state = jnp.zeros((1, *SIZES[1:]), jnp.float32)
    whole = np.asarray(scan(**x, state=state)[0])
    for i in range(70):
        y, state = scan(**{name: a[:, i : i + 1] for name, a in x.items()}, state=state)
        assert_bits_equal(np.asarray(y)[:, 0], whole[:, i])
    assert (whole != expected[:1]).any()


@pytest.mark.tier("full")
@pytest.mark.parametrize("together", [4, 64])
def test_gradients_of_several_chunks_at_once(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the bits of one chunk after the other."""
    x, lengths = batch(KINDS[:3], 300, "bfloat16"), np.array([300, 263, 150], np.int32)

    def multiplied(a: jax.Array, w: jax.Array, transpose_w: bool) -> jax.Array:
        precision = "highest" if a.dtype == jnp.float32 else "default"
        return multiply(Target("cpu"), a, w, product=Product("float32", transpose_w, precision))[0]

    options: dict[str, Any] = {"scale": 0.3, "product": multiplied, "contract": DeltaRuleContract(), "together": True}
    state = jnp.zeros((3, SIZES[1], *SIZES[2:]), jnp.float32)
    whole_with_edges = functools.partial(portable.gated_delta_rule, keep_edges=True, **options)
    y, last, edges = jax.jit(whole_with_edges)(*x.values(), state, lengths)
    rng = np.random.default_rng(0)
    cotangents = [rng.standard_normal(a.shape).astype(a.dtype) for a in (y, last)]

    def found(at_once: int) -> Any:
        monkeypatch.setattr(gradients, "_TOGETHER", at_once)
        run = functools.partial(gradients.gated_delta_rule_gradients, **options)
        return jax.jit(run)(*x.values(), edges, lengths, *cotangents)

    for ours, theirs in zip(found(together), found(1), strict=True):
        assert np.isfinite(np.asarray(ours, np.float32)).all()
        assert_bits_equal(ours, theirs)

"""The gradients of attention for Hopper under Mosaic's interpreter, which finds races, and as programs for a GPU."""

import dataclasses
import functools
import re
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from pallas_kernels.attention.call import AttentionCall, AttentionOptions, AttentionResults
from pallas_kernels.attention.hopper import attention_gradients, backward
from pallas_kernels.attention.hopper.gradients import Body
from pallas_kernels.attention.schedule.gradient_order import GradientOrder, Part, Work
from pallas_kernels.attention.schedule.hopper import GradientSchedule, gradient_schedule
from pallas_kernels.contract import AttentionGradientContract, attention_gradient_contract, split_attention_contract
from pallas_kernels.errors import UnsupportedError
from tests.arrays import on_device
from tests.attention.programs import INTERPRETER, lowered
from tests.mosaic import Races

pytestmark = pytest.mark.usefixtures("hopper")

CONTRACT: Final = AttentionGradientContract()


class Case(NamedTuple):
    """Two sequences: where the queries begin, how many there are, and how many keys; query heads, one key head."""

    offsets: tuple[int, int]
    queries: tuple[int, int]
    keys: tuple[int, int]
    heads: int
    size: int
    causal: bool = True
    window: tuple[int, int] | None = None
    soft_cap: float | None = None
    sloped: bool = False
    value_size: int | None = None

    @property
    def contract(self) -> AttentionGradientContract:
        """The contract of its head sizes."""
        found = attention_gradient_contract(self.size, "bfloat16", self.value_size)
        assert found is not None
        return found

    @property
    def schedule(self) -> GradientSchedule:
        """One block of the grid: the interpreter runs a thread for each warpgroup of each block."""
        sees_all = not self.causal and self.window is None
        return dataclasses.replace(gradient_schedule(self.size, sees_all, self.value_size), blocks=1, heads=1)

    @property
    def slopes(self) -> np.ndarray | None:
        """Slopes of each head of each sequence, if there are any."""
        return np.linspace(0.02, 0.1, 2 * self.heads, dtype=np.float32).reshape(2, -1) if self.sloped else None


CASES: Final = {
    "causal": Case((0, 0), (150, 20), (150, 20), 2, 64),
    "window, offsets": Case((80, 70), (70, 7), (150, 140), 1, 128, True, (60, 0)),
    "full": Case((0, 0), (9, 3), (140, 0), 1, 128, False),
    "soft cap, slopes, heads of 96": Case((80, 0), (70, 0), (150, 0), 2, 96, soft_cap=1.5, sloped=True),
    "values of another width": Case((80, 0), (70, 20), (150, 20), 2, 192, value_size=128),
    "heads of 256, window": Case((80, 0), (70, 0), (150, 0), 1, 256, True, (60, 0)),
}


class Arrays(NamedTuple):
    """Arguments of the backward pass."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    cotangent: np.ndarray


def seen_by(case: Case, sequence: int) -> np.ndarray:
    """Which keys (queries, keys) each query sees."""
    position = case.offsets[sequence] + np.arange(max(case.queries))[:, None]
    key = np.arange(max(case.keys))[None]
    seen = (np.arange(len(position))[:, None] < case.queries[sequence]) & (key < case.keys[sequence])
    if case.causal:
        seen &= key <= position
    if case.window is not None:
        seen &= (key >= position - case.window[0]) & (key <= position + case.window[1])
    return seen


def score(case: Case, sequence: int, head: int, products: np.ndarray) -> tuple[np.ndarray, Any]:
    """Scores (queries, keys) of scaled products, and the derivative of the soft cap."""
    bent: Any = 1.0
    if case.soft_cap is not None:
        tangents = np.tanh(products / case.soft_cap)
        products, bent = case.soft_cap * tangents, 1 - tangents**2
    if case.slopes is not None:
        distance = np.arange(products.shape[1]) - np.arange(len(products))[:, None] - case.offsets[sequence]
        products = products + case.slopes[sequence, head] * distance
    return products, bent


def softmax(case: Case, sequence: int, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights and log-sum-exp of scores (queries, keys) in float64; zeros and -inf where nothing is seen."""
    scores = np.where(seen_by(case, sequence), scores, -np.inf)
    largest = np.maximum(scores.max(1, keepdims=True), -1e30)
    weights = np.exp(scores - largest)
    total = weights.sum(1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights / np.where(total == 0, 1, total), (largest + np.log(total))[:, 0]


@functools.cache
def arrays(name: str) -> Arrays:
    """Random arrays, with nan in whatever is after a length, and what the forward pass makes of them."""
    case, rng = CASES[name], np.random.default_rng(0)
    given = []
    of_values = case.value_size or case.size
    of_queries, of_keys = (case.queries, case.heads), (case.keys, 1)
    widths = (case.size, case.size, of_values, of_values)
    for (lengths, heads), width in zip((of_queries, of_keys, of_keys, of_queries), widths, strict=True):
        x = rng.standard_normal((2, max(lengths), heads, width)).astype(jnp.bfloat16)
        for sequence, length in enumerate(lengths):
            x[sequence, length:] = np.nan
        given.append(x)
    query, key, value, cotangent = given
    out, lse = np.zeros_like(cotangent), np.full(query.shape[:3], -np.inf, np.float32)
    for sequence in range(2):
        k, v = (np.nan_to_num(x[sequence, :, 0].astype(np.float64)) for x in (key, value))
        for head in range(case.heads):
            products = np.nan_to_num(query[sequence, :, head].astype(np.float64)) @ k.T * case.size**-0.5
            scores, _ = score(case, sequence, head, products)
            weights, lse[sequence, :, head] = softmax(case, sequence, scores)
            out[sequence, :, head] = weights @ v
    return Arrays(query, key, value, out, lse, cotangent)


def differentiate(case: Case, given: Arrays, schedule: GradientSchedule | None = None) -> list[np.ndarray]:
    limits = on_device(np.stack([case.offsets, case.queries, case.keys], axis=1), jnp.int32)
    options = AttentionOptions(case.size**-0.5, case.causal, case.window, case.soft_cap)
    query, key, value, *results = (jnp.asarray(x) for x in given)
    slopes = None if case.slopes is None else jnp.asarray(case.slopes)
    call = AttentionCall(query, key, value, limits, options, alibi_slopes=slopes)
    how = {"contract": case.contract, "schedule": schedule or case.schedule, "interpret": INTERPRETER}
    found = jax.jit(lambda *of: attention_gradients(*of, **how))(call, AttentionResults(*results))
    return [np.asarray(x) for x in found]


@functools.cache
def plain(name: str) -> list[np.ndarray]:
    return differentiate(CASES[name], arrays(name))


def as_contracted(case: Case, given: Arrays) -> list[np.ndarray]:
    """The contract's program: its blocks, its order and its roundings, with float32 products in NumPy's order."""
    found = [np.zeros(x.shape, np.float32) for x in given[:3]]
    scale, block = np.float32(case.size**-0.5), case.contract.key_block
    for sequence in range(2):
        seen = seen_by(case, sequence)
        k, v = (np.nan_to_num(x[sequence, :, 0].astype(np.float32)) for x in (given.key, given.value))
        for head in range(case.heads):
            q, o, g = (
                np.nan_to_num(x[sequence, :, head].astype(np.float32))
                for x in (given.query, given.out, given.cotangent)
            )
            delta = (o * g).sum(1, keepdims=True)
            lse = given.lse[sequence, :, head, None].astype(np.float32)
            scores, bent = score(case, sequence, head, q @ k.T * scale)
            weights = np.where(seen, np.exp(np.where(seen, scores - lse, 0)), 0).astype(np.float32)
            slopes = (weights * bent * (g @ v.T - delta)).astype(jnp.bfloat16).astype(np.float32)
            for start in range((len(k) - 1) // block * block, -1, -block):
                part = slice(start, start + block)
                found[0][sequence, :, head] += slopes[:, part] @ k[part]
            found[1][sequence, :, 0] += slopes.T @ q
            found[2][sequence, :, 0] += weights.astype(jnp.bfloat16).astype(np.float32).T @ g
    return [found[0] * scale, found[1] * scale, found[2]]


def exactly(case: Case, given: Arrays) -> list[np.ndarray]:
    """The gradients in float64."""
    found = [np.zeros(x.shape) for x in given[:3]]
    scale = case.size**-0.5
    for sequence in range(2):
        k, v = (np.nan_to_num(x[sequence, :, 0].astype(np.float64)) for x in (given.key, given.value))
        for head in range(case.heads):
            q, g = (np.nan_to_num(x[sequence, :, head].astype(np.float64)) for x in (given.query, given.cotangent))
            scores, bent = score(case, sequence, head, q @ k.T * scale)
            weights, _ = softmax(case, sequence, scores)
            out = weights @ v
            slopes = weights * bent * (g @ v.T - (g * out).sum(1, keepdims=True))
            found[0][sequence, :, head] = slopes @ k * scale
            found[1][sequence, :, 0] += slopes.T @ q * scale
            found[2][sequence, :, 0] += weights.T @ g
    return found


@pytest.mark.tier("full", fast=("soft cap, slopes, heads of 96",))
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_differentiate(name: str, races: Races) -> None:
    case, given = CASES[name], arrays(name)
    found = plain(name)
    assert not races()
    for ours, contracted, exact, like in zip(
        found, as_contracted(case, given), exactly(case, given), given[:3], strict=True
    ):
        assert ours.shape == like.shape
        assert ours.dtype == like.dtype
        magnitude = np.abs(exact).max()
        # The contract's roundings alone are seen to be closer to the kernel than to the exact gradients.
        np.testing.assert_allclose(ours.astype(np.float64), contracted, rtol=2**-8, atol=2e-4 * magnitude)
        np.testing.assert_allclose(ours.astype(np.float64), exact, rtol=0, atol=0.01 * magnitude)
    for sequence, (queries, keys) in enumerate(zip(case.queries, case.keys, strict=True)):
        assert not found[0][sequence, queries:].any()
        assert not found[1][sequence, keys:].any()
        assert not found[2][sequence, keys:].any()


@pytest.mark.tier("full")
def test_parts_of_items_have_the_bits_of_whole_ones(races: Races) -> None:
    case, given = CASES["causal"], arrays("causal")
    heads = len(case.offsets)  # of keys, of all sequences
    work = Work(heads, case.heads, (2, 1), 1)
    parts = [Part(head, 1, 0, 2) for head in range(heads)]
    parts += [Part(0, 0, 0, 1), Part(1, 0, 0, 1), Part(1, 0, 1, 2), Part(0, 0, 1, 2)]
    order = GradientOrder((tuple(work.code(part) for part in parts),), 1)
    found = differentiate(case, given, dataclasses.replace(case.schedule, heads=heads, order=order))
    assert not races()
    for ours, whole in zip(found, plain("causal"), strict=True):
        assert_bits_equal(ours, whole)


@pytest.mark.tier("full")
def test_gradients_of_a_query_alone_and_of_few() -> None:
    """The gradient of a query has its bits when the other queries of its sequence are absent."""
    case, given = CASES["window, offsets"], arrays("window, offsets")
    few = slice(30, 37)
    cut = given._replace(**{name: getattr(given, name)[:, few] for name in ("query", "out", "lse", "cotangent")})
    shorter = case._replace(offsets=(case.offsets[0] + 30, 0), queries=(7, 0))
    assert_bits_equal(differentiate(shorter, cut)[0][0], plain("window, offsets")[0][0, few])


@pytest.mark.tier("full")
@pytest.mark.parametrize(("which", "at"), [("key", 40), ("query", 100)])
def test_what_is_not_finite_reaches_those_who_see_it(which: str, at: int, races: Races) -> None:
    name = "causal"
    case, given = CASES[name], arrays(name)
    poisoned = getattr(given, which).copy()
    poisoned[0, at, 0, 3] = np.nan
    lse, seen = given.lse.copy(), seen_by(case, 0)
    if which in ("key", "value", "query"):  # as the forward pass has it
        rows = seen[:, at] if which != "query" else np.arange(len(seen)) == at
        lse[0, rows, : case.heads if which != "query" else 1] = np.nan
    found = differentiate(case, given._replace(**{which: poisoned, "lse": lse}))
    assert not races()
    bad_queries = np.zeros((2, len(seen), case.heads), bool)
    if which in ("key", "value"):
        bad_queries[0, seen[:, at]] = True
    else:
        bad_queries[0, at, 0] = True
    bad_keys = np.zeros((2, seen.shape[1], 1), bool)
    bad_keys[0, seen[bad_queries[0].any(1)].any(0)] = True
    for ours, theirs, bad in zip(found, plain(name), (bad_queries, bad_keys, bad_keys), strict=True):
        assert_bits_equal(ours[~bad], theirs[~bad])
        assert np.isnan(ours[bad].astype(np.float32)).all()


@pytest.mark.tier("full")
def test_the_interpreter_finds_a_missing_wait(races: Races, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the wait for a gradient to leave, that of the next queries is written over it.

    That the interpreter reports a wait that is missing is checked in each run by the same test in test_mosaic.py.
    """
    one_step = Body.one_step

    def without_wait(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(plgpu, "wait_smem_to_gmem", lambda *_, **__: None)
            return one_step(*arguments)

    monkeypatch.setattr(Body, "one_step", without_wait)
    differentiate(CASES["window, offsets"], arrays("window, offsets"))
    assert races()


def lower_gradients(*shapes: Any, **options: Any) -> str:
    def loss(*arrays: jax.Array) -> jax.Array:
        return bijax.dot_product_attention(*arrays, is_causal=True, **options).astype(jnp.float32).sum()

    return lowered(jax.grad(loss, (0, 1, 2)), *shapes)


@pytest.mark.tier("full", fast=("False-True",))
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_programs_for_hopper_hold_the_kernels(wide: bool, mapped: bool) -> None:
    query, key = (jax.ShapeDtypeStruct((2, 320, heads, 128), "bfloat16") for heads in (8, 2))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return bijax.dot_product_attention(q, k, v, is_causal=True).astype(jnp.float32).sum()

    function, shapes = jax.grad(loss, (0, 1, 2)), (query, key, key)
    if mapped:
        function = jax.vmap(function)
        shapes = tuple(jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in shapes)
    with jax.enable_x64(wide):
        text = lowered(function, *shapes)
    # The forward pass, the sums of result times cotangent, the gradients.
    assert len(re.findall(r"custom_call @mosaic_gpu\w*", text)) == 3
    assert "stablehlo.dot_general" not in text
    assert "320x320" not in text


@pytest.mark.parametrize("causal", [True, False])
def test_the_grid_has_the_blocks_that_run_at_once(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block waits for others, so a GPU of 78 multiprocessors has a grid of 78 blocks, and an order made for these."""
    query, key = (jnp.ones((1, 8192, heads, 128), jnp.bfloat16) for heads in (32, 8))
    call = AttentionCall(query, key, key, jnp.full((1, 3), 8192, jnp.int32), AttentionOptions(1.0, causal=causal))
    found: list[GradientSchedule] = []

    def note(*_: Any, body: Body, **__: Any) -> Any:
        found.append(body.schedule)
        return query.astype(jnp.float32), key, key

    monkeypatch.setattr(backward, "gradients", note)
    monkeypatch.setattr(backward, "resident_blocks", lambda: 78)
    results = AttentionResults(query, jnp.ones((1, 8192, 32)), query)
    jax.eval_shape(lambda: attention_gradients(call, results, contract=CONTRACT, interpret=INTERPRETER))
    assert found[0].blocks == 78
    order = found[0].order
    assert (order is not None) == causal
    assert order is None or len(order.codes) == 78


@pytest.mark.tier("full")
@pytest.mark.parametrize(("size", "value_size"), [(96, 96), (192, 128), (256, 256)])
def test_other_widths_and_options_have_kernels_too(size: int, value_size: int) -> None:
    query, key, value = (jax.ShapeDtypeStruct((1, 320, 2, n), "bfloat16") for n in (size, size, value_size))
    options = {"logits_soft_cap": 30.0, "alibi_slopes": np.ones(2, np.float32), "sinks": np.ones(2, np.float32)}
    text = lower_gradients(query, key, value, **options)
    assert len(re.findall(r"custom_call @mosaic_gpu\w*", text)) == 3


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("size", "dtype", "scale", "architecture"),
    [(80, "bfloat16", None, "sm_90"), (128, "float32", None, "sm_90"), (64, "float16", -1.0, "sm_90"),
     (128, "bfloat16", None, "sm_80")],
)  # fmt: skip
def test_everything_else_gets_the_portable_program(
    size: int, dtype: str, scale: float | None, architecture: str
) -> None:
    x = jax.ShapeDtypeStruct((1, 3, 2, size), dtype)
    with bijax.lowering_for(architecture):
        assert "mosaic_gpu" not in lower_gradients(x, x, x, scale=scale)


def test_unsupported_calls_are_named() -> None:
    x, n = jnp.ones((1, 3, 2, 64), jnp.bfloat16), jnp.ones((1, 3), jnp.int32)
    call = AttentionCall(x, x, x, n, AttentionOptions(1.0))
    results = AttentionResults(x, jnp.ones((1, 3, 2)), x)
    with pytest.raises(UnsupportedError, match="expected an AttentionGradientContract"):
        attention_gradients(call, results, contract=split_attention_contract(64, "bfloat16"))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="expected a scale"):
        attention_gradients(dataclasses.replace(call, options=AttentionOptions(0.0)), results, contract=CONTRACT)


@pytest.mark.parametrize(
    ("change", "message"), [({"key_block": 32}, "must be 128 or 64"), ({"sum_chains": 3}, "power of two")]
)
def test_contracts_that_cannot_be(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONTRACT, **change)

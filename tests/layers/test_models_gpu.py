"""Whole models on a GPU: a request has the same bits in every batch, chunk and cache, and so have training steps.

The own model, a plain one under `bijax.invariant`, and one of Flax's layers, converted, and under it for what stands
between the layers; in bfloat16.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import bijax
from benchmarks.cudnn_ops import CudnnOps
from bijax.testing import assert_bits_equal
from flax_layers import INVARIANT, PLAIN, KVCache, Llama, Ops, convert
from tests.layers import small_llama as small
from tests.layers.flax_model import FlaxModel

pytestmark = pytest.mark.gpu

CONFIG: Final = dataclasses.replace(small.CONFIG, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64)
SIZES: Final = (1, 2, 3, 8, 64)
REQUESTS: Final = 64
BFLOAT16: Final[dict[str, Any]] = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
STEPS, BATCH, UNIT, LENGTH = 20, 32, 8, 64

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def llama(ops: Ops, **options: Any) -> Llama:
    checkpoint = small.Checkpoint(CONFIG, small.weights(CONFIG), tokenizer=None)  # type: ignore[arg-type]
    return Llama.from_checkpoint(checkpoint, ops=ops, **options)


def flax_model(implementation: str | None = None, **options: Any) -> Any:
    return convert(FlaxModel(CONFIG, implementation, **options))


MODELS: Final[dict[str, tuple[Callable[..., Any], Transform]]] = {
    "own": (functools.partial(llama, INVARIANT), _as_it_is),
    "transformed": (functools.partial(llama, PLAIN), bijax.invariant),
    "transformed_cudnn": (functools.partial(llama, CudnnOps()), bijax.invariant),
    "flax": (flax_model, bijax.invariant),
    "flax_cudnn": (functools.partial(flax_model, "cudnn"), bijax.invariant),
}


def rows_behind_embedding(model: Any, x: jax.Array) -> jax.Array:
    """Returns the logits for what the first block is given."""
    if isinstance(model, FlaxModel):
        return model.from_rows(x)
    angles = model.rotary(jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]))
    for block in model.blocks:
        x = block(x, angles)
    return model.logits(x)


def compiled(function: Callable[..., Any], shapes: Sequence[tuple[Any, ...]]) -> list[Callable[..., Any]]:
    """Compiles a function for several shapes at once."""
    lowered = [jax.jit(function).lower(*shape) for shape in shapes]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda program: program.compile(), lowered))


@jax.jit
def differing(found: Any, expected: Any) -> jax.Array:
    """Returns how many elements differ in a bit."""
    unsigned = {2: jnp.uint16, 4: jnp.uint32}

    def count(a: jax.Array, b: jax.Array) -> jax.Array:
        kind = unsigned[a.dtype.itemsize]
        return (jax.lax.bitcast_convert_type(a, kind) != jax.lax.bitcast_convert_type(b, kind)).sum()

    return sum(map(count, *map(jax.tree.leaves, (found, expected))), start=jnp.int32(0))


def differences(function: Callable[..., Any], *batched: jax.Array) -> list[int]:
    """Returns, by size of the batch, how many elements differ from those of each request alone, at any position."""
    shapes = [tuple(jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype) for x in batched) for n in SIZES]
    programs = compiled(function, shapes)
    parts = [programs[0](*(x[i : i + 1] for x in batched)) for i in range(REQUESTS)]
    alone = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    found = []
    for size, program in zip(SIZES, programs, strict=True):
        total = 0
        for turn in range(size):
            order = np.roll(np.arange(size), turn)
            there, expected = (jax.tree.map(operator.itemgetter(order), arrays) for arrays in (batched, alone))
            total += int(differing(program(*there), expected))
        found.append(total)
    return found


def tokens(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, CONFIG.vocab_size, shape).astype(np.int32))


def gradient_of_rows(model: Any) -> Callable[..., Any]:
    def gradient(x: jax.Array, labels: jax.Array) -> jax.Array:
        def total(x: jax.Array) -> jax.Array:
            return bijax.softmax_cross_entropy(rows_behind_embedding(model, x), labels).sum()

        return jax.grad(total)(x)

    return gradient


def rows(*shape: int) -> jax.Array:
    draw = np.random.default_rng(2).standard_normal((*shape, CONFIG.hidden_size))
    return jnp.asarray(draw, jnp.bfloat16)


@pytest.mark.parametrize("name", MODELS)
def test_a_request_has_the_same_logits_in_every_batch(name: str) -> None:
    make, transform = MODELS[name]
    model = make(**BFLOAT16)
    assert differences(transform(lambda x: model(x)), tokens(REQUESTS, 160)) == [0] * len(SIZES)


@pytest.mark.parametrize("name", MODELS)
def test_a_request_has_the_same_gradients_in_every_batch(name: str) -> None:
    make, transform = MODELS[name]
    gradient = transform(gradient_of_rows(make(**BFLOAT16)))
    assert differences(gradient, rows(REQUESTS, LENGTH), tokens(REQUESTS, LENGTH)) == [0] * len(SIZES)


def test_plain_models_differ() -> None:
    """The control: the logits and the gradients."""
    plain = llama(PLAIN, **BFLOAT16)
    assert any(differences(lambda x: plain(x), tokens(REQUESTS, 160)))
    assert any(differences(gradient_of_rows(plain), rows(REQUESTS, LENGTH), tokens(REQUESTS, LENGTH)))


def cached(model: Llama, make: small.Make) -> tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]:
    """Returns a step of decoding and what it takes of each request, whose texts have other lengths, in the cache."""
    cache, lengths = make(model, REQUESTS), 1 + 2 * jnp.arange(REQUESTS, dtype=jnp.int32)
    _, cache = jax.jit(model.extend)(tokens(REQUESTS, 160), cache, lengths=lengths)
    if cache.page_table is not None:
        pages = cache.keys, cache.values

        def from_pages(new: jax.Array, held: jax.Array, table: jax.Array) -> jax.Array:
            return model.extend(new, KVCache(*pages, held, table))[0]

        return from_pages, (tokens(REQUESTS, 1), cache.lengths, cache.page_table)

    def step(new: jax.Array, held: jax.Array, *both: jax.Array) -> jax.Array:
        keys, values = both[: len(both) // 2], both[len(both) // 2 :]
        return model.extend(new, KVCache(keys, values, held))[0]

    return step, (tokens(REQUESTS, 1), cache.lengths, *cache.keys, *cache.values)


LLAMAS: Final = [name for name in MODELS if "flax" not in name]


@pytest.mark.parametrize("make", [small.contiguous, small.paged])
@pytest.mark.parametrize("name", LLAMAS)
def test_a_request_is_decoded_alike_in_every_batch(name: str, make: small.Make) -> None:
    make_model, transform = MODELS[name]
    step, given = cached(make_model(**BFLOAT16), make)
    assert differences(transform(step), *given) == [0] * len(SIZES)


def test_a_plain_model_decodes_by_the_batch() -> None:
    """The control."""
    step, given = cached(llama(PLAIN, **BFLOAT16), small.contiguous)
    assert any(differences(step, *given))


def in_training(model: Any, transform: Transform, length: int) -> list[np.ndarray]:
    """Log-probabilities of `small.sequences`, padded, as they come out of a program that computes gradients too."""
    requests = small.sequences()
    given = small.padded(requests, length)
    graph, state, others = nnx.split(model, nnx.Param, ...)
    ops = INVARIANT if transform is _as_it_is else PLAIN

    def trainer(state: Any, following: jax.Array) -> jax.Array:
        def loss(state: Any) -> tuple[jax.Array, jax.Array]:
            scores = small.score(ops, nnx.merge(graph, state, others)(given), following)
            return scores.sum(), scores

        (_, scores), gradient = jax.value_and_grad(loss, has_aux=True)(state)
        return jax.lax.optimization_barrier((scores, gradient))[0]

    return small.trimmed(np.asarray(jax.jit(transform(trainer))(state, small.targets(given))), requests)


WAYS: Final = [(160, small.paged), *((chunk, make) for chunk in (40, 1) for make in (small.contiguous, small.paged))]


def test_own_model_in_every_way() -> None:
    """Whole, in chunks, token by token, from both caches, and in the trainer: forward, and under the gradient."""
    model, requests = llama(INVARIANT, **BFLOAT16), small.sequences()
    expected = small.in_full(model, requests)
    assert_bits_equal(small.in_chunks(model, requests, 160), expected)
    for chunk, make in WAYS:
        assert_bits_equal(small.in_chunks(model, requests, chunk, make), expected)
    assert_bits_equal(in_training(llama(INVARIANT, remat=True, **BFLOAT16), _as_it_is, small.LENGTH), expected)


def test_a_transformed_model_in_every_way() -> None:
    """From caches of one size: plain attention sees every place of it, so the trainer has texts of that size."""
    model, requests = llama(PLAIN, **BFLOAT16), small.sequences()
    with bijax.set_batch_invariant_mode():
        expected = small.in_chunks(model, requests, 160)
        for chunk, make in WAYS:
            assert_bits_equal(small.in_chunks(model, requests, chunk, make), expected)
        assert_bits_equal(small.in_chunks(model, requests[1:2], 40)[0], expected[1])
    capacity = small.contiguous(model, 1).capacity
    assert_bits_equal(in_training(llama(PLAIN, remat=True, **BFLOAT16), bijax.invariant, capacity), expected)


def test_a_transformed_model_with_cudnn_in_every_way() -> None:
    """Whole, token by token, from both caches, and in the trainer; chunks need a mask that cuDNN has no name for."""
    model, requests = llama(CudnnOps(), **BFLOAT16), small.sequences()
    with bijax.set_batch_invariant_mode():
        expected = small.in_full(model, requests)
        for chunk, make in [(160, small.contiguous), *(way for way in WAYS if way[0] != 40)]:
            assert_bits_equal(small.in_chunks(model, requests, chunk, make), expected)
    assert_bits_equal(in_training(llama(CudnnOps(), remat=True, **BFLOAT16), bijax.invariant, small.LENGTH), expected)


def token_by_token(model: FlaxModel, given: np.ndarray) -> np.ndarray:
    """Log-probabilities from Flax's cache, which all sequences fill at the same pace."""
    model.init_cache(*given.shape)
    graph, cache, others = nnx.split(model, nnx.Cache, ...)

    @jax.jit
    @bijax.invariant
    def step(cache: Any, new: jax.Array, following: jax.Array) -> tuple[jax.Array, Any]:
        merged = nnx.merge(graph, cache, others)
        scores = small.score(PLAIN, merged(new, decode=True), following)
        return scores, nnx.state(merged, nnx.Cache)

    following, parts = small.targets(given), []
    for at in range(given.shape[1]):
        scores, cache = step(cache, given[:, at : at + 1], following[:, at : at + 1])
        parts.append(np.asarray(scores))
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("implementation", [None, "cudnn"])
def test_a_flax_model_in_every_way(implementation: str | None) -> None:
    """Whole, token by token, in a batch and alone, and in the trainer: Flax's cache has no chunks and no pages."""
    model, requests = flax_model(implementation, **BFLOAT16), small.sequences()
    given = small.padded(requests, small.LENGTH)

    @jax.jit
    @bijax.invariant
    def whole(given: jax.Array, following: jax.Array) -> jax.Array:
        return small.score(PLAIN, model(given), following)

    expected = small.trimmed(np.asarray(whole(given, small.targets(given))), requests)
    assert_bits_equal(in_training(model, bijax.invariant, small.LENGTH), expected)
    if implementation is None:  # Flax's cache has a mask, to cuDNN a bias, which rounds the scores in another place
        assert_bits_equal(small.trimmed(token_by_token(model, given), requests), expected)
        assert_bits_equal(small.trimmed(token_by_token(model, given[3:]), requests[3:]), expected[3:])


def test_a_plain_model_differs_by_the_way() -> None:
    """The control."""
    model, requests = llama(PLAIN, **BFLOAT16), small.sequences()
    whole, single = (small.in_chunks(model, requests, chunk) for chunk in (160, 1))
    assert any((a.view(np.uint32) != b.view(np.uint32)).any() for a, b in zip(whole, single, strict=True))


OPTIMIZER: Final = optax.adamw(1e-3)


def trained(model: Any, parts: int, accumulate: bool = True) -> Any:
    """Returns the parameters after 20 steps of which each sees its batch in so many parts."""
    graph, state, others = nnx.split(model, nnx.Param, ...)

    def loss(state: Any, texts: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(nnx.merge(graph, state, others)(texts[:, :-1]))
        return -jnp.take_along_axis(scores, texts[:, 1:, None], axis=-1).mean()

    total = bijax.accumulate_gradients(loss, unit=UNIT)

    def gradient(state: Any, texts: Sequence[jax.Array]) -> Any:
        if not accumulate:
            found = [jax.grad(loss)(state, part) for part in texts]
            return jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]) / len(leaves), *found)
        held = total.start(state, texts[0])
        for part in texts:
            held = total.add(held, state, part)
        return held.value_and_grad()[1]

    @jax.jit
    def step(state: Any, moments: Any, texts: Sequence[jax.Array]) -> Any:
        slopes = gradient(state, texts)
        update = bijax.invariant(OPTIMIZER.update) if accumulate else OPTIMIZER.update
        updates, moments = update(slopes, moments, state)
        return optax.apply_updates(state, updates), moments

    moments, batches = OPTIMIZER.init(state), tokens(STEPS, parts, BATCH // parts, LENGTH + 1)
    for batch in batches:
        state, moments = step(state, moments, tuple(batch))
    return state


MIXED: Final[dict[str, Any]] = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}


@pytest.mark.parametrize("name", ["own", "transformed", "flax_cudnn"])
def test_twenty_steps_do_not_depend_on_the_micro_batches(name: str) -> None:
    """float32 weights, bfloat16 computation: 32 texts at once, 2 x 16 and 4 x 8."""
    make, _ = MODELS[name]
    whole, halves, quarters = (trained(make(**MIXED), parts) for parts in (1, 2, 4))
    assert_bits_equal(halves, whole)
    assert_bits_equal(quarters, whole)


def test_plain_training_depends_on_them() -> None:
    """The control."""
    model = llama(PLAIN, **MIXED)
    whole, quarters = (trained(model, parts, accumulate=False) for parts in (1, 4))
    assert int(differing(whole, quarters)) > 0

"""The log-probabilities of a sequence have the same bits however they are computed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bijax.testing import assert_bits_equal
from flax_layers import INVARIANT, PLAIN, Llama
from tests.layers import small_llama as small


@functools.cache
def alone() -> list[np.ndarray]:
    """Each sequence by itself: what everything else is compared with."""
    return [small.in_full(small.model(), (row,))[0] for row in small.sequences()]


@pytest.mark.tier("full")
def test_in_company() -> None:
    rows = small.sequences()
    assert_bits_equal(small.in_full(small.model(), rows), alone())
    assert_bits_equal(small.in_full(small.model(), (*rows[2:], *rows[:2])), [*alone()[2:], *alone()[:2]])


@pytest.mark.tier("full")
def test_without_padding() -> None:
    row = small.sequences()[1]
    assert_bits_equal(small.in_full(small.model(), (row,), len(row))[0], alone()[1])


@pytest.mark.tier("full")
def test_eager() -> None:
    rows = small.sequences()
    tokens = small.padded(rows, small.LENGTH)
    scores = small.score(INVARIANT, small.model()(jnp.asarray(tokens)), small.targets(tokens))
    assert_bits_equal(small.trimmed(np.asarray(scores), rows), alone())


@pytest.mark.tier("full")  # test_generate.py has chunks and single tokens of a model of one block
@pytest.mark.parametrize(
    ("chunk", "make"),
    [(1, small.contiguous), (7, small.contiguous), (160, small.contiguous), (1, small.paged), (64, small.paged)],
)
def test_prefill_chunks_and_token_by_token(chunk: int, make: small.Make) -> None:
    assert_bits_equal(small.in_chunks(small.model(), small.sequences(), chunk, make), alone())


@pytest.mark.tier("full")
def test_token_by_token_alone() -> None:
    rows = small.sequences()[1:2]
    assert_bits_equal(small.in_chunks(small.model(), rows, 1), alone()[1:2])


@pytest.mark.tier("full")
def test_mixed_chunks_of_mixed_lengths() -> None:
    """Sequences at different positions, with different numbers of new tokens, in one call."""
    rows, model = small.sequences(), small.model()
    cache = small.paged(model, len(rows))
    rng = np.random.default_rng(3)
    parts: list[list[np.ndarray]] = [[] for _ in rows]
    held = np.zeros(len(rows), np.int32)
    while (left := np.array([len(row) for row in rows]) - held).any():
        new = np.minimum(left, rng.integers(0, 33, len(rows))).astype(np.int32)
        tokens = np.zeros((len(rows), 32), np.int32)
        following = np.zeros((len(rows), 32), np.int32)
        for index, row in enumerate(rows):
            here = slice(held[index], held[index] + new[index])
            tokens[index, : new[index]] = row[here]
            following[index, : new[index]] = np.roll(row, -1)[here]
        scores, cache = small.step(model, tokens, following, new, cache)
        for index, part in enumerate(parts):
            part.append(np.asarray(scores)[index, : new[index]])
        held += new
    assert_bits_equal([np.concatenate(part)[:-1] for part in parts], alone())


@pytest.mark.tier("full")
def test_inside_gradients() -> None:
    """The forward pass of `jax.value_and_grad`, blocks computed again in the backward pass included."""
    rows, model = small.sequences(), small.model(config=small.SHALLOW)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def value_and_grad(model: Llama, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = small.score(INVARIANT, model(tokens), small.targets(tokens))
        return scores.sum(), scores

    again = nnx.with_attributes(model, remat=True)
    (_, scores), _ = value_and_grad(again, small.padded(rows, small.LENGTH))
    assert_bits_equal(small.trimmed(np.asarray(scores), rows), small.in_full(model, rows))


@pytest.mark.tier("full")
def test_under_vmap() -> None:
    rows = small.sequences()
    tokens = small.padded(rows, small.LENGTH)
    scores = jax.jit(jax.vmap(small.full, in_axes=(None, 0, 0)))(
        small.model(), tokens[:, None], small.targets(tokens)[:, None]
    )
    assert_bits_equal(small.trimmed(np.asarray(scores)[:, 0], rows), alone())


def test_plain_jax_differs() -> None:
    """The control: the same comparisons, on the same model with stock operations."""
    rows, model = small.sequences(), small.model(PLAIN)
    expected = np.concatenate(small.in_full(model, rows))
    by_token = np.concatenate(small.in_chunks(model, rows, 1))
    assert (expected.view(np.uint32) != by_token.view(np.uint32)).any()
    np.testing.assert_allclose(by_token, expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(np.concatenate(alone()), expected, rtol=0, atol=1e-4)


def test_switching_operations_shares_the_parameters() -> None:
    model = small.model()
    plain = nnx.with_attributes(model, ops=PLAIN)
    assert plain.blocks[0].mlp.ops == plain.embed.ops == PLAIN
    assert model.blocks[0].mlp.ops == INVARIANT
    assert plain.embed.embedding[...] is model.embed.embedding[...]


@pytest.mark.tier("full")
def test_gradients_take_micro_batches() -> None:
    """Micro-batches of 128 tokens, added in order, give the parameter gradients of the whole batch bit for bit.

    The gradients of a sequence's own inputs are the same in either batch.
    """
    model = small.model(config=dataclasses.replace(small.SHALLOW, tie_word_embeddings=False))
    tokens = np.random.default_rng(5).integers(0, small.CONFIG.vocab_size, (12, 32)).astype(np.int32)

    @nnx.jit
    @functools.partial(nnx.grad, argnums=(0, 1))
    def gradients(model: Llama, shift: jax.Array, tokens: jax.Array) -> jax.Array:
        x = model.embed(tokens) + shift
        rotary = model.rotary(jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]))
        for block in model.blocks:
            x = block(x, rotary)
        return small.score(INVARIANT, model.logits(x), small.targets(tokens)).sum()

    shift = jnp.zeros((*tokens.shape, small.CONFIG.hidden_size))
    whole, inputs = gradients(model, shift, tokens)
    parts = [gradients(model, shift[i : i + 4], tokens[i : i + 4]) for i in (0, 4, 8)]
    summed = jax.tree.map(lambda a, b, c: (a + b) + c, *(part for part, _ in parts))
    assert_bits_equal(nnx.to_pure_dict(summed), nnx.to_pure_dict(whole))
    assert_bits_equal(jnp.concatenate([part for _, part in parts]), inputs)

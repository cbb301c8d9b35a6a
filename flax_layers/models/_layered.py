"""Running a Llama model block by block, for generation."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from .adapters import Group, Stacks, attach
from .block import Block, Rotary, Stream, added, project, start_tokens
from .layers import DeltaNetSlots, DeltaNetState, Embed, KVCache, LayerCache, Linear, RMSNorm, RotaryEmbedding
from .llama import Llama

type Stored = tuple[jax.Array, jax.Array | None] | DeltaNetState | DeltaNetSlots
"""What a layer keeps: keys and values, latents without values, or states, each its sequence's own or in slots."""


class Additions(NamedTuple):
    """What a server adds to the blocks of a model.

    Attributes:
        stacks: The adapters of each block, or None.
        groups: Which tokens have which adapter.
        cache_scales: For each block the scales of keys and values in a cache of 8 bits, or None.
    """

    stacks: tuple[Stacks, ...] | None = None
    groups: tuple[Group, ...] = ()
    cache_scales: tuple[tuple[jax.Array, jax.Array], ...] | None = None

    def of_block(self, index: int) -> "OfBlock":
        """Returns those of one block."""
        stacks = None if self.stacks is None else self.stacks[index]
        return OfBlock(stacks, self.groups, None if self.cache_scales is None else self.cache_scales[index])


class OfBlock(NamedTuple):
    """The `Additions` of one block."""

    stacks: Stacks | None = None
    groups: tuple[Group, ...] = ()
    cache_scales: tuple[jax.Array, jax.Array] | None = None


class Layers:
    """The blocks of a model, separated for a program that all blocks of one kind share.

    Args:
        model: The model.

    Attributes:
        blocks: The structure of each block, its parameters, and which rotary embedding it has.
    """

    def __init__(self, model: Llama) -> None:
        # Flattening a module takes longer than a block of a small model, so it is done once. Structures that are equal
        # become one object, which is compared in no time.
        structures: dict[Any, Any] = {}
        self.blocks: list[tuple[Any, tuple[jax.Array, ...], int]] = []
        for index, block in enumerate(model.blocks):
            structure = jax.tree.structure(block)
            structure = structures.setdefault(structure, structure)
            self.blocks.append((structure, tuple(jax.tree.leaves(block)), model.rotary_of(index)))

    def extend(
        self,
        x: jax.Array,
        angles: Sequence[Rotary],
        stored: Sequence[Stored],
        page_table: jax.Array | None,
        start: jax.Array,
        lengths: jax.Array,
        common_prefix: jax.Array | None = None,
        slots: jax.Array | None = None,
        additions: Additions | None = None,
    ) -> tuple[jax.Array, list[Stored]]:
        """Runs the blocks one after the other.

        Args:
            x: (B, T, hidden_size), new tokens before the first block.
            angles: Their cosines and sines, as `start_tokens` returns them.
            stored: Keys and values of each layer, or its state, which are used up.
            page_table: Their page table, or None.
            start: (B,) tokens that each sequence holds.
            lengths: (B,) new tokens of each sequence.
            common_prefix: () tokens that all sequences begin with, in the same pages, or None.
            slots: (B,) where the states of the sequences are; None if state b is that of sequence b.
            additions: What a server adds, or None.

        Returns:
            The residual stream after the last block, and what the layers keep.
        """
        given = (page_table, start, lengths, common_prefix, slots, additions)
        return run_blocks(self.blocks, x, angles, stored, *given, one_program=False)


def run_blocks(
    blocks: Iterable[tuple[Any, tuple[jax.Array, ...], int]],
    x: jax.Array,
    angles: Sequence[Rotary],
    stored: Sequence[Stored],
    page_table: jax.Array | None,
    start: jax.Array,
    lengths: jax.Array,
    common_prefix: jax.Array | None = None,
    slots: jax.Array | None = None,
    additions: Additions | None = None,
    *,
    one_program: bool,
) -> tuple[jax.Array, list[Stored]]:
    """Runs blocks one after the other; see `Layers.extend`.

    Inside one program, blocks of a kind are lowered once, except the first, and the addition at the end of a block is
    left to the norm of the next one. Separate programs are the same for all blocks of a kind.
    """
    written = []
    stream: Stream = (x, None)
    for index, ((structure, parameters, rotary), layer) in enumerate(zip(blocks, stored, strict=True)):
        of_block = OfBlock() if additions is None else additions.of_block(index)
        given = (angles[rotary], layer, page_table, start, lengths, common_prefix, slots, of_block)
        stream, kept = _extend(structure, parameters, stream, *given, alone=not one_program)
        written.append(kept)
    return added(stream), written


class LayeredModel:
    """A model and a cache that it owns, run by three jitted functions: before, in and after the blocks.

    All blocks of one kind share one compiled program, where XLA would compile each of them again in a program for the
    whole model; the cache is updated in place. The bits are those of the whole model in one program.

    Args:
        model: The model.
        cache: An empty cache. Its arrays are used up.
    """

    def __init__(self, model: Llama, cache: KVCache) -> None:
        self._model = model
        self._layers = Layers(model)
        self._stored: list[Stored] = [
            layer if isinstance(layer, DeltaNetState) else (layer.keys, layer.values)
            for layer in cache.layers(model.config)
        ]
        self._page_table = cache.page_table
        self._capacity = cache.capacity

    def extend(self, tokens: np.ndarray, start: np.ndarray, lengths: np.ndarray) -> jax.Array:
        """Appends tokens to the sequences; returns the residual stream (B, T, hidden_size) after the last block.

        Args:
            tokens: (B, T) token ids, each sequence padded at its end.
            start: (B,) tokens that each sequence holds.
            lengths: (B,) new tokens of each sequence. There must be room for them; that is not checked here.
        """
        places = (jnp.asarray(start), jnp.asarray(lengths))
        x, angles = _start(self._model.embed, self._model.rotaries, jnp.asarray(tokens), *places, self._capacity)
        x, self._stored = self._layers.extend(x, angles, self._stored, self._page_table, *places)
        return x

    def choose(self, x: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        """Returns the most probable token (B,) after each row of x (B, hidden_size), and its log-probability."""
        token, logprob = _choose(self._model.norm, self._model.projection, x, self._model.config.logits_soft_cap)
        return np.asarray(token), np.asarray(logprob)


@functools.partial(jax.jit, static_argnames="capacity")
def _start(
    embed: Embed,
    rotaries: tuple[RotaryEmbedding, ...],
    tokens: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    capacity: int,
) -> tuple[jax.Array, tuple[Rotary, ...]]:
    return start_tokens(embed, rotaries, tokens, start=start, lengths=lengths, capacity=capacity)


@functools.partial(jax.jit, static_argnames=("structure", "alone"), donate_argnames="stored")
def _extend(
    structure: Any,
    parameters: tuple[jax.Array, ...],
    stream: Stream,
    rotary: Rotary,
    stored: Stored,
    page_table: jax.Array | None,
    start: jax.Array,
    lengths: jax.Array,
    common_prefix: jax.Array | None,
    slots: jax.Array | None,
    additions: OfBlock,
    *,
    alone: bool,
) -> tuple[Stream, Stored]:
    block: Block = jax.tree.unflatten(structure, parameters)
    if additions.stacks is not None:
        attach(block, additions.stacks, additions.groups)
    places = (page_table, start, lengths, common_prefix, slots)
    stream, kept = extend_block(block, stream, rotary, stored, *places, additions.cache_scales)
    return (added(stream), None) if alone else stream, kept


def extend_block(
    block: Block,
    stream: Stream,
    rotary: Rotary,
    stored: Stored,
    page_table: jax.Array | None,
    start: jax.Array,
    lengths: jax.Array,
    common_prefix: jax.Array | None,
    slots: jax.Array | None,
    cache_scales: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[Stream, Stored]:
    """Runs a block on new tokens, with what its layer keeps; see `Layers.extend`."""
    if isinstance(stored, DeltaNetState):
        stream, after = block.extend(stream, rotary, stored, start=start, lengths=lengths)
        return stream, cast(DeltaNetState, after)
    if isinstance(stored, DeltaNetSlots):
        stream, after = block.extend(stream, rotary, stored, start=start, lengths=lengths, slots=slots)
        return stream, cast(DeltaNetSlots, after)
    cache = LayerCache(*stored, page_table, common_prefix, cache_scales)
    stream, after = block.extend(stream, rotary, cache, start=start, lengths=lengths)
    written = cast(LayerCache, after)
    return stream, (written.keys, written.values)


@functools.partial(jax.jit, static_argnames="soft_cap")
def _choose(
    norm: RMSNorm, projection: Embed | Linear, x: jax.Array, soft_cap: float | None
) -> tuple[jax.Array, jax.Array]:
    logits = project(norm, projection, (x, None), soft_cap)
    token = jnp.argmax(logits, axis=-1)
    return token, jnp.take_along_axis(norm.ops.log_softmax(logits), token[:, None], axis=-1)[:, 0]

"""What a model's head drafts after each step: its inputs as arrays, and the compiled function."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.hashed_once import HashedOnce
from bijax.serving.batches import Batch
from bijax.serving.device import draw_drafted, ends, for_host
from bijax.serving.packed import Given, unpack
from bijax.serving.scheduler import Work


def wants_drafts(work: Work) -> bool:
    """Returns whether a sequence continues after work whose results it has."""
    return work.samples and work.sequence.finish_reason is None


def repacked(batch: Batch, packed: np.ndarray) -> np.ndarray:
    """Returns the inputs of the head after a batch whose results its sequences have.

    An entry of the head is made of a token's hidden state and of the next token, so entries go as far as tokens are
    known, and those of rejected drafts are left out.

    Args:
        batch: The batch.
        packed: What it was computed with, see `bijax.serving.packed`. A row has the pages that its sequence had then.
    """
    found, width = packed.copy(), batch.shape[1]
    found[:, 1:4] = (0, -1, -1)
    found[:, -width:] = 0
    for row, work in enumerate(batch.works):
        tokens = work.sequence.tokens
        end = min(work.start + len(work.tokens), len(tokens) - 1)
        found[row, 1] = end - work.start
        found[row, found.shape[1] - width :][: end - work.start] = tokens[work.start + 1 : end + 1]
    return found


def room_of(works: Sequence[Work], rows: int, page_size: int) -> np.ndarray:
    """Returns for how many entries each sequence has pages, (rows,) int32; 0 for those that do not continue."""
    room = np.zeros(rows, np.int32)
    room[: len(works)] = [
        min(len(work.sequence.pages) * page_size, work.sequence.most) if wants_drafts(work) else 0 for work in works
    ]
    return room


def hand_out(works: Sequence[Work], drafts: np.ndarray, packed: np.ndarray, room: np.ndarray) -> None:
    """Gives the sequences of works their drafts, of drafts (B, steps).

    A draft counts if there was room for all entries that it depends on. -1 is drawn where logits hold nan.
    """
    for row, work in enumerate(works):
        if not wants_drafts(work):
            continue
        made = int(room[row]) - int(packed[row, :2].sum()) + 1
        tokens = drafts[row, : max(0, made)].tolist()
        work.sequence.drafts = tokens[: tokens.index(-1)] if -1 in tokens else tokens


def propose(
    model: Any, pages: Any, hidden: jax.Array, given: Given, room: Any, *, steps: int, batch_invariant: bool
) -> tuple[jax.Array | None, Any]:
    """Appends entries to what the head keeps, and drafts tokens after them.

    A draft is drawn as the token itself will be, with the request's temperature and random numbers: if the head's
    logits were the model's, each draft would be accepted.

    Args:
        model: A `DraftingModel`.
        pages: The cache. It is used up.
        hidden: (B, T, ...), the model's hidden states.
        given: The inputs of `repacked`.
        room: (B,) int32, entries for which each sequence has pages.
        steps: Drafts; each is an entry of the next one.
        batch_invariant: Whether bits must not depend on the batch.

    Returns:
        The drafts (B, steps), None for 0 steps, and the cache.
    """
    hidden, pages = model.draft(pages, hidden, given.tokens, given.page_table, given.start, given.lengths, own=False)
    rows, drafts = ends(hidden, given.lengths), []
    for step in range(steps):
        place = _place(given.start, given.lengths, room, np.int32(step))
        drawn = (model.draft_logits(rows), given.temperature, given.seeds, place[2])
        drafts.append(draw_drafted(*drawn, batch_invariant=batch_invariant))
        if step + 1 < steps:
            numbers = (given.page_table, *place[:2])
            hidden, pages = model.draft(pages, *_one(rows, drafts[-1]), *numbers, own=True)
            rows = ends(hidden, place[1])
    return _stacked(drafts) if drafts else None, pages


@functools.partial(
    jax.jit,
    static_argnames=("structure", "table_width", "steps", "batch_invariant", "to_host"),
    donate_argnames="pages",
)
def propose_in_one(
    structure: HashedOnce,
    weights: list[jax.Array],
    pages: Any,
    hidden: jax.Array,
    packed: jax.Array,
    room: jax.Array,
    last: jax.Array,
    *,
    table_width: int,
    steps: int,
    batch_invariant: bool,
    to_host: bool,
) -> tuple[jax.Array | None, Any]:
    """`propose` as one program, with the arguments of `bijax.serving.device.advance_and_draw`."""
    model, given = jax.tree.unflatten(structure.parts[0], weights), unpack(packed, last, table_width=table_width)
    drafts, pages = propose(model, pages, hidden, given, room, steps=steps, batch_invariant=batch_invariant)
    return None if drafts is None else for_host(drafts, to_host), pages


@jax.jit
def _place(start: jax.Array, lengths: jax.Array, room: Any, step: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns where the entry of a draft goes, whether there is room for it, and the draft's position."""
    entry = start + lengths + step
    return entry, ((lengths > 0) & (entry < room)).astype(jnp.int32), entry + 1


@jax.jit
def _one(rows: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rows[:, None], jnp.maximum(tokens, 0)[:, None]


@jax.jit
def _stacked(drafts: list[jax.Array]) -> jax.Array:
    return jnp.stack(drafts, axis=1)


@jax.jit
def copied(hidden: jax.Array) -> jax.Array:
    """Returns a copy of hidden states, which the next step would write to."""
    return jnp.copy(hidden)

"""What is computed on the device: models and sampling, in batches of few sizes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bijax.sampling._arguments import PENALTIES, read_request
from bijax.sampling._arithmetic import Arithmetic
from bijax.sampling._draw import draw
from bijax.sampling._measure import Measured, measure
from bijax.sampling._restrict import what_is_left
from bijax.serving.model import Model
from bijax.serving.params import MAX_TOP_LOGPROBS
from bijax.serving.sizes import Sizes
from bijax.serving.slots import Slots


class Rows(NamedTuple):
    """What rows of logits are sampled with; (R,) each but for the last three.

    Attributes:
        seeds: (R, 2) uint32.
        positions: int32.
        temperature: float32.
        top_k: int32.
        top_p: float32.
        min_p: float32.
        unread: bool, whether `extras.output_counts` lacks the last token, which the device keeps.
        restricted: Whether any row has a filter or extras.
        need_logprobs: Whether any row's log-probabilities are wanted.
        extras: What penalties, biases and bans need; None where no row has any.
    """

    seeds: np.ndarray
    positions: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    unread: np.ndarray
    restricted: bool = False
    need_logprobs: bool = False
    extras: "Extras | None" = None


class Extras(NamedTuple):
    """Arrays (R, V) and (R,) for `sample`."""

    repetition_penalty: np.ndarray
    frequency_penalty: np.ndarray
    presence_penalty: np.ndarray
    prompt_mask: np.ndarray
    output_counts: np.ndarray
    logit_bias: np.ndarray
    allowed: np.ndarray


class Drawn(NamedTuple):
    """Tokens (R,) int32, -1 for rows of padding, and their log-probabilities, if any row's are wanted."""

    tokens: jax.Array
    measured: Measured | None


class Scored(NamedTuple):
    """Log-probabilities of given tokens, (R,) float32, and the largest ones, (R, top)."""

    logprobs: jax.Array
    top_logprobs: jax.Array
    top_tokens: jax.Array


class Programs:
    """Runs a model and samples, and keeps the cache and the last token of each sequence.

    Nothing here waits for the device: a token that was sampled goes into the next call without passing the host.

    Args:
        model: The model.
        sizes: Of the batches.
        num_pages: Pages of the cache.
        page_size: Tokens of a page.
        table_width: Entries of a page table.
        num_slots: Sequences whose last tokens are kept.
        batch_invariant: Whether bits are to be the same in any batch.

    Attributes:
        slots: What steps read of each running sequence.
        compiled: Number of programs, by what has been run: one for each shape.
    """

    def __init__(
        self,
        model: Model,
        sizes: Sizes,
        *,
        num_pages: int,
        page_size: int,
        table_width: int,
        num_slots: int,
        batch_invariant: bool,
    ) -> None:
        self.model = model if batch_invariant else model.plain()
        self.sizes = sizes
        self.slots = Slots(num_slots, table_width, model.vocab_size)
        self._table_width = table_width
        self.top = min(MAX_TOP_LOGPROBS, model.vocab_size)
        self._batch_invariant = batch_invariant
        self._num_pages = num_pages
        self._page_size = page_size
        self._pages = self.model.init_pages(num_pages, page_size)
        self._last = jnp.zeros(num_slots, jnp.int32)
        self._known: set[tuple[Any, ...]] = set()

    @property
    def compiled(self) -> int:
        """Number of programs that have run."""
        return len(self._known)

    def replace_model(self, model: Model) -> None:
        """Takes a model with other weights. What the cache holds has no meaning any more."""
        self.model = model if self._batch_invariant else model.plain()

    def extend(
        self, tokens: np.ndarray, page_table: np.ndarray, start: np.ndarray, lengths: np.ndarray, unread: np.ndarray
    ) -> jax.Array:
        """Appends tokens to sequences.

        Args:
            tokens: (B, T) int32.
            page_table: As `Model.extend`.
            start: As `Model.extend`.
            lengths: As `Model.extend`.
            unread: (B,) int32, the slots whose tokens are meant in place of those given; -1 for none. For T = 1.

        Returns:
            hidden (B, T, ...).
        """
        self._known.add(("extend", tokens.shape))
        given = _last_tokens(self._last, tokens, unread) if tokens.shape[1] == 1 else tokens
        hidden, self._pages = self.model.extend(self._pages, given, page_table, start, lengths)
        return hidden

    def logits(self, hidden: jax.Array, index: np.ndarray) -> jax.Array:
        """Returns the logits (R, V) of the tokens `index` (R,) of hidden (B, T, ...), counted row by row."""
        self._known |= {("take", hidden.shape, index.shape), ("logits", index.shape)}
        return self.model.logits(_take(hidden, index))

    def sample(self, logits: jax.Array, rows: Rows, slots: np.ndarray) -> Drawn:
        """Samples a token from each row of logits, and keeps it in a slot; -1 for none, with rows of padding.

        Filters and log-probabilities that no row asks for are not computed; that moves no bit of a row.
        """
        shape, invariant = logits.shape, self._batch_invariant
        left = logits
        if rows.restricted:
            self._known.add(("restrict", shape, rows.extras is None))
            given = rows._replace(restricted=False, need_logprobs=False)
            left = _restrict(logits, given, self._last, slots, invariant)
        self._known.add(("draw", shape))
        tokens, self._last = _draw(
            left, rows.temperature, rows.seeds, rows.positions, self._last, slots, batch_invariant=invariant
        )
        measured = None
        if rows.need_logprobs:
            self._known.add(("measure", shape))
            measured = _measure(logits, left, rows.temperature, tokens, top=self.top, batch_invariant=invariant)
        return Drawn(tokens, measured)

    def score(self, logits: jax.Array, tokens: np.ndarray) -> Scored:
        """Returns the log-probabilities of tokens (R,)."""
        self._known.add(("score", logits.shape))
        scored: Scored = _score(logits, tokens, self.top, self._batch_invariant)
        return scored

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """Runs each program once, on rows of padding.

        Args:
            on_progress: Called with the number of shapes that are done, and of all.
        """
        shapes = self.sizes.shapes
        sampled: set[int] = set()
        for done, (rows, tokens) in enumerate(shapes):
            on_progress(done, len(shapes))
            zeros, nowhere = np.zeros(rows, np.int32), np.full(rows, -1, np.int32)
            hidden = self.extend(
                np.zeros((rows, tokens), np.int32), np.zeros((rows, self._table_width), np.int32), zeros, zeros, nowhere
            )
            logits = self.logits(hidden, zeros)
            if tokens > 1:  # the log-probabilities of prompts are computed in batches of the largest size
                self.logits(hidden, np.zeros(self.sizes.decode[-1], np.int32))
            if rows not in sampled:
                sampled.add(rows)
                everything = empty_rows(rows)._replace(restricted=True, need_logprobs=True)
                self.sample(logits, everything, nowhere)
                extras = empty_extras(rows, self.model.vocab_size)
                self.sample(logits, everything._replace(extras=extras), nowhere)
                self.score(logits, zeros)
            jax.block_until_ready(logits)
        on_progress(len(shapes), len(shapes))


def empty_rows(rows: int) -> Rows:
    """Returns parameters of rows of padding."""
    # Each array is one of its own: the caller writes into them.
    return Rows(
        seeds=np.zeros((rows, 2), np.uint32),
        positions=np.zeros(rows, np.int32),
        temperature=np.zeros(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        unread=np.zeros(rows, bool),
    )


def empty_extras(rows: int, vocab_size: int) -> Extras:
    """Returns extras that change nothing."""
    shape = (rows, vocab_size)
    return Extras(
        np.ones(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros(shape, bool),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.float32),
        np.ones(shape, bool),
    )


@jax.jit
def _take(hidden: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(hidden.reshape(-1, *hidden.shape[2:]), index, axis=0)


@jax.jit
def _last_tokens(last: jax.Array, tokens: jax.Array, slots: jax.Array) -> jax.Array:
    # -1 is sampled where the logits hold nan: the sequence ends there, and what it computes until then is dropped.
    return jnp.where(slots[:, None] < 0, tokens, jnp.maximum(last[slots], 0)[:, None])


@functools.partial(jax.jit, static_argnames="batch_invariant")
def _restrict(logits: jax.Array, rows: Rows, last: jax.Array, slots: jax.Array, batch_invariant: bool) -> jax.Array:
    """Returns the logits that are drawn from."""
    extras: dict[str, Any] = dict.fromkeys(Extras._fields)
    if rows.extras is not None:
        extras = rows.extras._asdict()
        lacking = jnp.where(rows.unread, last[slots], -1)[:, None] == jnp.arange(logits.shape[1])
        extras["output_counts"] = rows.extras.output_counts + lacking
    request = read_request(
        logits,
        seeds=rows.seeds,
        positions=rows.positions,
        temperature=rows.temperature,
        filters={name: getattr(rows, name) for name in ("top_k", "top_p", "min_p")},
        penalties={name: extras.pop(name) for name in PENALTIES},
        **extras,
        num_top=0,
    )
    return what_is_left(request, Arithmetic(batch_invariant))


@functools.partial(jax.jit, static_argnames="batch_invariant", donate_argnames="last")
def _draw(
    left: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    last: jax.Array,
    slots: jax.Array,
    batch_invariant: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns tokens, and the last token of each slot."""
    tokens = draw(left, temperature, seeds, positions.astype(jnp.uint32), Arithmetic(batch_invariant))
    places = jnp.where(slots < 0, last.shape[0], slots)
    return tokens, last.at[places].set(tokens, mode="drop")


@functools.partial(jax.jit, static_argnames=("top", "batch_invariant"))
def _measure(
    logits: jax.Array, left: jax.Array, temperature: jax.Array, tokens: jax.Array, top: int, batch_invariant: bool
) -> Measured:
    return measure(logits, left, temperature, tokens, top, Arithmetic(batch_invariant))


@functools.partial(jax.jit, static_argnames=("top", "batch_invariant"))
def _score(logits: jax.Array, tokens: jax.Array, top: int, batch_invariant: bool) -> Scored:
    logprobs = Arithmetic(batch_invariant).log_softmax(logits)
    found = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    top_logprobs, top_tokens = jax.lax.top_k(logprobs, top)
    return Scored(found, top_logprobs, top_tokens.astype(jnp.int32))

"""The computations on the device: models and sampling, in batches of a few sizes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from bijax.core.hashed_once import HashedOnce
from bijax.sampling._measure import Measured
from bijax.serving import device
from bijax.serving.draft_head import copied, propose, propose_in_one
from bijax.serving.model import Model, state_interval
from bijax.serving.packed import one_step_on, pack
from bijax.serving.params import MAX_TOP_LOGPROBS
from bijax.serving.rows import Rows, empty_extras, empty_rows
from bijax.serving.sizes import Sizes
from bijax.serving.slots import Slots
from bijax.serving.states import Copy

_ROWS_IN_COMMON: Final = 8
"""Fewest rows of a batch for which reading a common prefix once is worth a program."""


class Drawn(NamedTuple):
    """Tokens (R,) int32, and their log-probabilities, if any row's are wanted. Rows of padding are undefined.

    The host reads them, in its own memory if possible.
    """

    tokens: jax.Array
    measured: Measured | None


class Programs:
    """Runs a model and samples, and keeps the cache and the last token of each sequence.

    Nothing here waits for the device: a token that was sampled goes into the next call without passing the host.

    Args:
        model: The model.
        sizes: Of the batches.
        num_pages: Pages of the cache.
        page_size: Tokens of a page.
        table_width: Entries of a page table.
        num_slots: Sequences whose last tokens are stored.
        batch_invariant: Whether bits must be the same in any batch.
        num_snapshots: Snapshots of states, with a model that keeps some.
        draft_steps: Tokens that the model's head drafts after each step; 0 if it is not used.

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
        num_snapshots: int = 0,
        draft_steps: int = 0,
    ) -> None:
        self._num_snapshots = num_snapshots
        self.draft_steps = draft_steps
        self._batch_invariant = batch_invariant
        self._structure: HashedOnce | None = None
        self.replace_model(model)
        self.sizes = sizes
        self.slots = Slots(num_slots, table_width, model.vocab_size)
        self.top = min(MAX_TOP_LOGPROBS, model.vocab_size)
        self._table_width, self._num_pages, self._page_size = table_width, num_pages, page_size
        self._known: set[tuple[Any, ...]] = set()
        self.start_over()
        self._allocate()

    @property
    def compiled(self) -> int:
        """Number of programs that have run."""
        return len(self._known)

    def replace_model(self, model: Model) -> None:
        """Replaces the model by one with other weights. The contents of the cache are no longer valid."""
        self.model = model if self._batch_invariant else model.plain()
        if self.model.one_program:
            # Flattened once, since that takes longer than a call.
            self._weights, tree = jax.tree.flatten(self.model)
            if self._structure is None or self._structure.parts != (tree,):
                self._structure = HashedOnce(tree)

    def start_over(self) -> None:
        """Drops the cache and all other arrays. New ones are made when they are needed."""
        self._pages: Any = None  # and states, if the model keeps some
        self._snapshots: Any = None
        self._memory: dict[tuple[int, ...], device.Memory] = {}
        # What the device has made of the last array, and what that is.
        self._expected: tuple[np.ndarray, jax.Array] | None = None

    def _allocate(self) -> None:
        pages = self.model.init_pages(self._num_pages, self._page_size)
        if state_interval(self.model) is not None:
            model: Any = self.model
            pages = (pages, model.init_states(len(self.slots.rows)))
            self._snapshots = model.init_snapshots(self._num_snapshots)
        last = jnp.zeros(len(self.slots.rows), jnp.int32)
        # Outputs with an explicit memory kind are committed; uncommitted first inputs would trigger a recompile.
        self._gpu = _one_gpu(pages)
        self._place = self._gpu or _mesh_of(pages)
        self._last: jax.Array
        self._last = self._bound(last)
        if self._gpu is None:  # pages on a mesh may be sharded
            self._pages = pages
        else:
            self._pages, self._snapshots = self._bound((pages, self._snapshots))

    def restore(self, copies: Iterable[Copy]) -> None:
        """Copies snapshots to slots."""
        model: Any = self.model
        for copy in copies:
            if self._pages is None:
                self._allocate()
            self._known.add(("restore",))
            pages, states = self._pages
            self._pages = pages, model.restore_state(states, self._snapshots, *copy)

    def keep(self, copies: Iterable[Copy]) -> None:
        """Copies slots to snapshots."""
        model: Any = self.model
        for copy in copies:
            self._known.add(("keep",))
            self._snapshots = model.keep_state(self._pages[1], self._snapshots, *copy)

    def extend(self, packed: np.ndarray) -> jax.Array:
        """Appends tokens to sequences and returns hidden (B, T, ...).

        Args:
            packed: See `bijax.serving.packed`.
        """
        self._known.add(("extend", packed.shape))
        if self._pages is None:
            self._allocate()
        given = device.begin(packed, self._last, table_width=self._table_width)
        hidden, self._pages = device.extend(self.model, self._pages, given)
        return hidden

    def advance(self, packed: np.ndarray, rows: Rows | None, *, common_prefix: bool = False) -> tuple[jax.Array, Drawn]:
        """Appends tokens to sequences, and samples the next one of each.

        Filters and log-probabilities that no row needs are not computed; this changes no bit of a row.

        Args:
            packed: See `bijax.serving.packed`.
            rows: What the rows are sampled with, if any has filters or extras or wants log-probabilities.
            common_prefix: Whether the model is given the common prefix of all sequences; see `asks_for_common_prefix`.

        Returns:
            hidden (B, T, ...), which the next call may write to, and the tokens.
        """
        self._known.add(("advance", packed.shape, common_prefix))
        if self._pages is None:
            self._allocate()
        width, invariant = self._table_width, self._batch_invariant
        given = drawn = None
        read: Any = None
        if self.model.one_program:
            memory = self._memory.get(packed.shape) or self._bound(
                device.memory_for(self.model, self._pages, self._last, packed, table_width=width)
            )
            self._last, following, found, drawn, read = device.advance_and_draw(
                self._structure,
                self._weights,
                self._pages,
                self._last,
                self._on_device(packed),
                memory,
                table_width=width,
                batch_invariant=invariant,
                common_page_size=self._page_size if common_prefix else None,
                to_host=self._gpu is not None,
            )
            self._expected = one_step_on(packed), following
            self._memory[packed.shape] = found[:3]
        else:
            given = device.begin(packed, self._last, table_width=width)
            found = device.advance(self.model, self._pages, given)
        hidden, logits, fed, self._pages = found
        left = logits if rows is None else self._left(logits, rows, fed)
        if drawn is None or left is not logits:
            self._known.add(("draw", logits.shape))
            # After the one program the last tokens are new ones, but drawing does not look at those that were fed.
            given = given or device.begin(packed, self._last, table_width=width)
            drawn, self._last = device.draw_tokens(left, given, self._last, batch_invariant=invariant)
            read = drawn
        measured = None if rows is None else self._measure(logits, left, rows, drawn)
        return hidden, Drawn(read, measured)

    def kept(self, hidden: jax.Array) -> jax.Array:
        """Returns hidden states for `draft`: later calls may write to those that `advance` returned."""
        return copied(hidden) if self.model.one_program else hidden

    def draft(self, hidden: jax.Array, packed: np.ndarray, room: np.ndarray, *, drafts: bool) -> jax.Array | None:
        """Lets the model's head process sequences to their end.

        Args:
            hidden: (B, T, ...), as `kept` returns them.
            packed: See `bijax.serving.draft_head.repacked`.
            room: (B,) int32, entries of the head for which each sequence has pages.
            drafts: Whether drafts are wanted. Those of few tokens are made in any case: another program takes longer.

        Returns:
            (B, draft_steps) drafts, for the host; None if none were made.
        """
        shape = (hidden.shape[0], hidden.shape[1])
        steps = self.draft_steps if drafts or shape not in self.sizes.prefill else 0
        self._known.add(("draft", shape, steps))
        how: dict[str, Any] = {"steps": steps, "batch_invariant": self._batch_invariant}
        if self.model.one_program:
            to_host = {"to_host": self._gpu is not None, "table_width": self._table_width}
            given = (self._bound(packed), self._bound(room), self._last)
            found, self._pages = propose_in_one(
                self._structure, self._weights, self._pages, hidden, *given, **how, **to_host
            )
        else:
            begun = device.begin(packed, self._last, table_width=self._table_width)
            found, self._pages = propose(self.model, self._pages, hidden, begun, room, **how)
        return found

    def asks_for_common_prefix(self, rows: int, width: int) -> bool:
        """Whether there is a program for such batches whose sequences begin with the same pages."""
        asks = self.model.one_program and self.model.least_common_prefix is not None
        return asks and width == 1 and rows >= _ROWS_IN_COMMON

    def have_common_prefix(self, slots: Sequence[int], starts: Iterable[int]) -> bool:
        """Whether the sequences share a prefix of pages as long as the model requires.

        Args:
            slots: Of the sequences.
            starts: Tokens that each has in its pages.
        """
        least = self.model.least_common_prefix
        if least is None or min(starts) < least:
            return False
        # Pages form a tree: two sequences that share a page share all pages before it.
        pages = self.slots.table[slots, -(-least // self._page_size) - 1]
        return bool((pages == pages[0]).all())

    def read_pages(self, pages: Sequence[int]) -> Any:
        """Returns a copy of pages, in arrays whose first dimension is the page, padded to a power of two."""
        if self._pages is None:
            self._allocate()
        index = _padded(pages)
        self._known.add(("read pages", index.shape))
        return device.read_pages(self._pages, index)

    def write_pages(self, pages: Sequence[int], copied: Any) -> None:
        """Sets pages to what `read_pages` of another engine returned for as many."""
        if self._pages is None:
            self._allocate()
        index = _padded(pages)
        self._known.add(("write pages", index.shape))
        here = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), copied, self._pages)
        self._pages = device.write_pages(self._pages, index, here)

    def logits(self, hidden: jax.Array, index: np.ndarray) -> jax.Array:
        """Returns the logits (R, V) of the tokens `index` (R,) of hidden (B, T, ...), counted row by row."""
        self._known |= {("take", hidden.shape, index.shape), ("logits", index.shape)}
        return self.model.logits(device.take(hidden, index))

    def embed(self, hidden: jax.Array, index: np.ndarray) -> jax.Array:
        """Returns the embeddings (R, D) of the tokens `index` (R,) of hidden (B, T, ...), counted row by row."""
        self._known |= {("take", hidden.shape, index.shape), ("embed", index.shape)}
        model: Any = self.model  # the engine has checked that it has embeddings
        return model.embed(device.take(hidden, index))

    def sample(self, logits: jax.Array, rows: Rows) -> Drawn:
        """Samples a token from each row of logits (R, V), of drafts and of the tokens before them."""
        self._known.add(("draw drafted", logits.shape))
        left = self._left(logits, rows, np.full(len(logits), -1, np.int32))
        tokens = device.draw_drafted(
            left, rows.temperature, rows.seeds, rows.positions, batch_invariant=self._batch_invariant
        )
        return Drawn(tokens, self._measure(logits, left, rows, tokens))

    def score(self, logits: jax.Array, tokens: np.ndarray) -> device.Scored:
        """Returns the log-probabilities of tokens (R,)."""
        self._known.add(("score", logits.shape))
        return device.score(
            logits, tokens, top=self.top, batch_invariant=self._batch_invariant, to_host=self._gpu is not None
        )

    def _on_device(self, packed: np.ndarray) -> Any:
        """Returns the array as the device has it, or to be sent."""
        if self._expected is not None and np.array_equal(self._expected[0], packed):
            return self._expected[1]
        return self._bound(packed)

    def _bound[T](self, arrays: T) -> T:
        """Returns arrays that are bound to the GPU, or to all devices of a mesh, if there is one."""
        return arrays if self._place is None else jax.device_put(arrays, self._place)

    def _left(self, logits: jax.Array, rows: Rows, fed: Any) -> jax.Array:
        """Returns the logits that are drawn from."""
        if not rows.restricted:
            return logits
        self._known.add(("restrict", logits.shape, rows.extras is None))
        given = rows._replace(restricted=False, need_logprobs=False)
        return device.restrict(logits, given, fed, batch_invariant=self._batch_invariant)

    def _measure(self, logits: jax.Array, left: jax.Array, rows: Rows, tokens: jax.Array) -> Measured | None:
        if not rows.need_logprobs:
            return None
        self._known.add(("measure", logits.shape))
        return device.measure_tokens(
            *(logits, left, rows.temperature, tokens),
            **{"top": self.top, "batch_invariant": self._batch_invariant, "to_host": self._gpu is not None},
        )

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """Runs each program once, on rows of padding.

        Args:
            on_progress: Called with the number of finished shapes and their total.
        """
        shapes = self.sizes.shapes
        advanced = [s for s in shapes if s[1] != self.sizes.drafted or s in self.sizes.prefill]
        sampled: set[int] = set()
        for done, (rows, tokens) in enumerate(shapes):
            on_progress(done, len(shapes))
            packed = pack([], self.slots.rows[:0], [], rows, tokens)
            everything = empty_rows(rows)._replace(restricted=True, need_logprobs=True)
            extras = everything._replace(extras=empty_extras(rows, self.model.vocab_size))
            places, most = np.zeros(rows, np.int32), np.zeros(self.sizes.decode[-1], np.int32)
            if tokens == self.sizes.drafted:
                logits = self.logits(self.extend(packed), places)
                for sampling in (everything, extras):
                    self.sample(logits, sampling)
            if self.draft_steps and tokens == self.sizes.drafted:
                self._warm_head(self.extend(packed), packed)
            if (rows, tokens) in advanced:
                for sampling in (everything, extras)[: 1 if rows in sampled else 2]:
                    hidden, _ = self.advance(packed, sampling)
                sampled.add(rows)
                if self.asks_for_common_prefix(rows, tokens):
                    hidden, _ = self.advance(packed, None, common_prefix=True)
                if self.draft_steps:
                    self._warm_head(self.kept(hidden), packed)
                self.score(self.logits(hidden, places), places)
                if hasattr(self.model, "embed"):
                    self.embed(hidden, places)
                if tokens > 1:  # the log-probabilities of prompts are computed in batches of the largest size
                    self.score(self.logits(hidden, most), most)
            jax.block_until_ready(self._pages)
        # Committed weights commit the outputs of a first call, and JAX would compile again for these.
        for rows, tokens in advanced if self.model.one_program else advanced[:1]:
            self.advance(pack([], self.slots.rows[:0], [], rows, tokens), empty_rows(rows)._replace(restricted=True))
        if self._snapshots is not None:  # outside of both, so that nothing is changed
            nowhere = Copy(len(self.slots.rows), self._num_snapshots, 0)
            self.keep([nowhere])
            self.restore([nowhere])
        jax.block_until_ready(self._pages)
        on_progress(len(shapes), len(shapes))

    def _warm_head(self, hidden: jax.Array, packed: np.ndarray) -> None:
        for drafts in (False, True):
            self.draft(hidden, packed, np.zeros(len(packed), np.int32), drafts=drafts)


def _one_gpu(pages: Any) -> jax.Device | None:
    """Returns the GPU that holds the cache, if it is one."""
    devices = {device for array in jax.tree.leaves(pages) for device in array.devices()}
    return next((d for d in devices if d.platform == "gpu"), None) if len(devices) == 1 else None


def _padded(pages: Sequence[int]) -> np.ndarray:
    """Returns pages in an array whose length is a power of two; the last one is repeated."""
    size = 1 << (len(pages) - 1).bit_length()
    return np.array([*pages, *[pages[-1]] * (size - len(pages))], np.int32)


def _mesh_of(pages: Any) -> NamedSharding | None:
    """Returns where arrays are that all devices of the cache have, if these are several."""
    shardings = (array.sharding for array in jax.tree.leaves(pages))
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding) and len(s.device_set) > 1]
    return NamedSharding(meshes[0], PartitionSpec()) if meshes else None

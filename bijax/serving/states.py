"""States of sequences, in addition to the pages: which positions are kept as snapshots, and who holds them."""

import math
from typing import NamedTuple

from bijax.serving.pages import PagePool
from bijax.serving.prefix import PrefixCache
from bijax.serving.sequence import Sequence
from bijax.serving.snapshot import Snapshot


class Copy(NamedTuple):
    """A state that the device is to copy, from a snapshot to a slot or the other way.

    Attributes:
        slot: Of the running sequence.
        row: Of the snapshot.
        position: Tokens before the state.
    """

    slot: int
    row: int
    position: int


class States:
    """Decides at which positions the states of running sequences are copied, and from which sequences continue.

    A running sequence has a state in its slot. A snapshot holds the state at one position, and begins another sequence
    with the same tokens, or the same sequence again. No bit depends on which snapshots exist. Kept are the states

    - at the last position of a prompt at which a later prompt could find one,
    - at each multiple of `snapshot_interval` in a prompt,
    - at the last such position of an output, so that its sequence can continue later.

    All of these are multiples of `interval` and of the page size.

    Args:
        interval: Positions at which the model has a state to keep are multiples of this.
        page_size: Tokens of a page.
        num_snapshots: Number of snapshots.
        snapshot_interval: Tokens of long prompts between snapshots.

    Attributes:
        pool: The snapshots.
        restores: Copies to slots that the device must make before the next step.
        keeps: Copies of slots that it must make after the last one.

    Raises:
        ValueError: If the page size and the interval do not fit, or `snapshot_interval` is not a multiple of both.

    Example:
        >>> states = States(interval=64, page_size=16, num_snapshots=4, snapshot_interval=128)
        >>> states.kept(prompt=300, tokens=300)
        [128, 256]
    """

    def __init__(self, *, interval: int, page_size: int, num_snapshots: int, snapshot_interval: int) -> None:
        self.interval = interval
        self._unit = math.lcm(interval, page_size)
        if self._unit not in (interval, page_size):
            raise ValueError(
                f"Engine: page_size must divide {interval} or be a multiple of it with a model that keeps states at"
                f" multiples of {interval}, got {page_size}."
            )
        if snapshot_interval % self._unit:
            raise ValueError(
                f"Engine: snapshot_interval must be a multiple of {self._unit} for this model and {page_size=},"
                f" got {snapshot_interval}."
            )
        self._snapshot_interval = snapshot_interval
        self._num_snapshots = num_snapshots
        self.start_over()

    def start_over(self) -> None:
        """Drops all snapshots."""
        self.pool = PagePool(self._num_snapshots)
        self.restores: list[Copy] = []
        self.keeps: list[Copy] = []

    def kept(self, *, prompt: int, tokens: int) -> list[int]:
        """Returns the positions at which a sequence that is computed from its beginning leaves snapshots.

        Args:
            prompt: Length of its prompt.
            tokens: Length of all its tokens: more than the prompt if it is computed again.
        """
        # A sequence with the same tokens must compute its last one.
        last = {(length - 1) // self._unit * self._unit for length in (prompt, tokens)}
        return sorted({*last, *range(0, prompt, self._snapshot_interval)} - {0})

    def stop(self, sequence: Sequence, start: int, end: int) -> int:
        """Returns where work on tokens from `start` to `end` must end: at the first position to be kept."""
        kept = self.kept(prompt=len(sequence.request.prompt), tokens=len(sequence.tokens))
        return next((position for position in kept if start < position < end), end)

    def most_drafts(self, start: int) -> int:
        """Returns how many drafts may follow the token at `start`: they must not pass a multiple of the interval."""
        return self.interval - 1 - start % self.interval

    def begin(self, sequence: Sequence, snapshot: Snapshot | None) -> None:
        """Lets a sequence that got a slot continue from a snapshot, whose hold it takes over."""
        sequence.snapshot = snapshot
        if snapshot is not None:
            self.restores.append(Copy(sequence.slot, snapshot.row, snapshot.position))

    def computed(self, sequence: Sequence, prefix: PrefixCache | None) -> None:
        """Keeps the state of a running sequence if it stands at a position to be kept."""
        position, prompt = sequence.computed, len(sequence.request.prompt)
        if position % self._unit or (sequence.snapshot is not None and sequence.snapshot.position >= position):
            return
        if position <= prompt and position not in self.kept(prompt=prompt, tokens=len(sequence.tokens)):
            return
        self._give_up(sequence)
        if not self.pool.free and (prefix is None or not prefix.evict_snapshot()):
            return
        sequence.snapshot = Snapshot(position, self.pool.take())
        self.keeps.append(Copy(sequence.slot, sequence.snapshot.row, position))
        if position <= prompt and prefix is not None:
            prefix.attach(sequence.tokens, *sequence.snapshot, adapter=sequence.request.adapter)

    def leave(self, sequence: Sequence, prefix: PrefixCache | None) -> None:
        """Gives the prefix cache the last snapshot of a sequence that gives up its slot."""
        if sequence.snapshot is not None and prefix is not None:
            prefix.attach(sequence.tokens, *sequence.snapshot, adapter=sequence.request.adapter)
        self._give_up(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        if sequence.snapshot is not None:
            self.pool.release(sequence.snapshot.row)
            sequence.snapshot = None

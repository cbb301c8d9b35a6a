"""Which sequences a step computes, and in which pages."""

import bisect
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from bijax.serving.drafts import look_up
from bijax.serving.pages import PagePool
from bijax.serving.prefix import PrefixCache
from bijax.serving.sequence import Sequence
from bijax.serving.snapshot import Snapshot
from bijax.serving.states import States
from bijax.serving.tokens import Tokens


@dataclass(eq=False, slots=True)
class Work:
    """Tokens of a sequence that are computed in a step: those from `sequence.computed` on, and then drafts.

    Attributes:
        sequence: The sequence.
        start: Tokens that are in its pages.
        tokens: The new ones, drafts included.
        reaches_end: Whether the next token can be sampled after this.
        drafts: Number of drafts among them.
        unread: Whether the only token was sampled by the device and not yet read by the host; `tokens` then holds 0 for
            it.
        samples: Whether a token is sampled after this.
    """

    sequence: Sequence
    start: int
    tokens: Tokens | tuple[int, ...]
    reaches_end: bool
    drafts: int = 0
    unread: bool = False
    samples: bool = True


_UNREAD: Final = (0,)

_key = operator.attrgetter("key")


class Scheduler:
    """Allocates pages and schedules sequences.

    All sequences are ordered by their keys. The first ones get pages; when none are free, the prefix cache evicts some,
    then the last running sequence loses its pages and is computed again later. So the first sequence always makes
    progress, and every sequence becomes the first (no starvation).

    Args:
        num_pages: Pages of the cache.
        page_size: Tokens of a page.
        max_running: Sequences that hold pages at most.
        max_prefill_tokens: Maximum number of prompt tokens per step.
        prefix_cache: Whether pages are cached for later requests.
        speculative_tokens: Maximum number of drafts per sequence and step.
        draft_head: Whether the model's head makes the drafts, and keeps something of each token in the pages.
        states: The states of sequences, with a model that keeps some.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_running: int,
        max_prefill_tokens: int,
        prefix_cache: bool,
        speculative_tokens: int,
        draft_head: bool = False,
        states: States | None = None,
    ) -> None:
        self.states = states
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._num_pages, self._page_size = num_pages, page_size
        self._prefix_cache = prefix_cache
        self._max_running = max_running
        self._max_prefill_tokens = max_prefill_tokens
        self._speculative_tokens = speculative_tokens
        self._draft_head = draft_head
        self._lookahead = int(draft_head)
        self._grew = False  # whether a running sequence got a page in this plan
        self.start_over()

    def start_over(self) -> None:
        """Drops all sequences and the contents of the pages."""
        self.pool = PagePool(self._num_pages)
        if self.states is not None:
            self.states.start_over()
        snapshots = None if self.states is None else self.states.pool
        self.prefix = None
        if self._prefix_cache:
            self.prefix = PrefixCache(self.pool, self._page_size, snapshots, lookahead=self._lookahead)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._slots = list(range(self._max_running))

    def match(self, tokens: Tokens, adapter: int = 0) -> list[int]:
        """Returns the pages in the prefix cache that hold the start of some tokens, held once more."""
        return [] if self.prefix is None else self.prefix.match(tokens, limit=len(tokens), adapter=adapter)

    def take(self, number: int) -> list[int]:
        """Returns free pages, held, at most `number`; for these the prefix cache gives up others."""
        if self.prefix is not None and number > self.pool.free:
            self.prefix.evict(number - self.pool.free)
        return [self.pool.take() for _ in range(min(number, self.pool.free))]

    def insert(self, tokens: Tokens, pages: Iterable[int], adapter: int = 0) -> None:
        """Adds computed pages to the prefix cache, if there is one."""
        if self.prefix is not None:
            self.prefix.insert(tokens, list(pages), adapter=adapter)

    def release(self, pages: Iterable[int]) -> None:
        """Gives up a hold of each page."""
        for page in pages:
            self.pool.release(page)

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence in its place among those that wait."""
        bisect.insort(self.waiting, sequence, key=lambda s: s.key)

    def plan(self) -> list[Work]:
        """Returns the work of the next step, and gives it pages.

        The previous step may be unread: its samples have their places, and the tokens are not needed here.
        """
        budget = self._max_prefill_tokens
        works: list[Work] = []
        self._grew = False
        # No more waiting sequences than this can be admitted in one step.
        candidates = [*self.running, *self.waiting[: self._max_running]]
        for sequence in sorted(candidates, key=_key):
            if sequence.slot < 0:  # it keeps waiting
                if budget == 0 or self._waits_for_sibling(sequence):
                    continue
                # One that was preempted with a step in flight must have read all its tokens to compute them again.
                if sequence.in_flight or not self._admit(sequence):
                    break  # no later one runs any more, and none may take the pages that it waits for
            if sequence.unread:
                if self._goes_on(sequence):
                    works.append(Work(sequence, sequence.computed, _UNREAD, True, unread=True))
                continue
            missing = sequence.missing
            if missing == 0 or (missing > 1 and budget == 0):
                continue
            work = self._work(sequence, missing, budget)
            if work is not None:
                works.append(work)
                if missing > 1:
                    budget -= len(work.tokens)
        if self._grew:
            self._grow_ahead()
        return works

    def dispatched(self, works: Iterable[Work]) -> None:
        """Records that this work was dispatched. Later work finds it done."""
        for work in works:
            sequence = work.sequence
            end = work.start + len(work.tokens) - work.drafts
            sequence.computed = end
            sequence.in_flight += 1
            sequence.unread += work.samples
            request = sequence.request
            if request.scored < len(request.prompt) and sequence.index == 0:
                request.scored = max(request.scored, min(end, len(request.prompt) - 1) + 1)
            if end >= (sequence.inserted + 1) * self._page_size:
                self._offer(sequence)
            if self.states is not None:
                self.states.computed(sequence, self.prefix)

    def read(self, work: Work, accepted: int) -> None:
        """Records that a sequence has received a work's results, with `accepted` draft tokens."""
        sequence = work.sequence
        sequence.in_flight -= 1
        sequence.unread -= work.samples
        sequence.computed += accepted
        if sequence.computed >= (sequence.inserted + 1) * self._page_size:
            self._offer(sequence)
        if self.states is not None and accepted:
            self.states.computed(sequence, self.prefix)

    def _offer(self, sequence: Sequence) -> None:
        """Gives the prefix cache pages that are full, of tokens that are known."""
        full = min(sequence.computed, len(sequence.tokens) - self._lookahead) // self._page_size
        if self.prefix is not None and full > sequence.inserted:
            tokens, adapter = sequence.tokens[: full * self._page_size + self._lookahead], sequence.request.adapter
            self.prefix.insert(tokens, sequence.pages[:full], adapter=adapter)
            sequence.inserted = full

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence and releases its pages."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Takes the pages of a running sequence; it will be computed again."""
        self.running.remove(sequence)
        self._release(sequence)
        self.preemptions += 1
        sequence.preempted = True
        self.add(sequence)

    def flush(self) -> None:
        """Empties the prefix cache. Pages of running sequences stay theirs."""
        if self.prefix is not None:
            self.prefix.clear()

    @property
    def usage(self) -> float:
        """Fraction of the pages that sequences hold."""
        return 1 - (self.pool.free + self.pool.kept_alone) / self.pool.num_pages

    def _goes_on(self, sequence: Sequence) -> bool:
        """Whether a sequence continues after the tokens that the device is sampling, and has room for them."""
        if len(sequence.tokens) + sequence.unread >= sequence.most:
            return False
        if sequence.matcher is not None:
            return False  # what may come next follows from a token that is not read yet
        length = sequence.computed + 1
        return length <= len(sequence.pages) * self._page_size or self._grow(sequence, length)

    def _work(self, sequence: Sequence, missing: int, budget: int) -> Work | None:
        start = sequence.computed
        count = min(missing, budget) if missing > 1 else 1
        if missing > 1 and self.states is not None:
            count = self.states.stop(sequence, start, start + count) - start
        if start + count > len(sequence.pages) * self._page_size and not self._grow(sequence, start + count):
            return None
        tokens = sequence.tokens[start : start + count]
        samples = count == missing and sequence.request.params.max_new_tokens > 0
        if missing > 1 or not self._speculative_tokens:
            if samples:
                self._grow_for_head(sequence, len(sequence.tokens))
            return Work(sequence, start, tokens, count == missing, samples=samples)
        drafts = self._drafts(sequence)
        return Work(sequence, start, (*tokens, *drafts), True, len(drafts), samples=samples)

    def _drafts(self, sequence: Sequence) -> list[int]:
        """Returns drafts that fit without preempting a sequence."""
        wanted = min(self._speculative_tokens, sequence.most - len(sequence.tokens) - 1)
        if self.states is not None:
            wanted = min(wanted, self.states.most_drafts(sequence.computed))
        drafts: list[int] = []
        if wanted > 0:
            drafts = sequence.drafts[:wanted] if self._draft_head else look_up(sequence.tokens, wanted)
        if drafts and sequence.matcher is not None:
            drafts = drafts[: sequence.matcher.allowed(drafts)]
        room = (len(sequence.pages) + self.pool.free) * self._page_size - len(sequence.tokens)
        drafts = drafts[: max(0, room)]
        if drafts:
            self._grow(sequence, len(sequence.tokens) + len(drafts))
        self._grow_for_head(sequence, len(sequence.tokens) + len(drafts))
        return drafts

    def _grow_for_head(self, sequence: Sequence, length: int) -> None:
        """Gives a sequence of `length` tokens with its drafts free pages for what the head keeps of the next drafts."""
        if not self._draft_head:
            return
        length = min(length + self._speculative_tokens - 1, sequence.most)
        if 0 < self._pages(length) - len(sequence.pages) <= self.pool.free:
            self._grow(sequence, length)

    def _admit(self, sequence: Sequence) -> bool:
        if len(self.running) >= self._max_running and not self._preempt_later(sequence):
            return False
        pages, snapshot = self._find_prefix(sequence)
        needed = self._pages(len(sequence.tokens)) - len(pages)
        while not self._reclaim(needed):
            if not self._preempt_later(sequence):
                for page in pages:
                    self.pool.release(page)
                if self.states is not None and snapshot is not None:
                    self.states.pool.release(snapshot.row)
                return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.slot = self._slots.pop()
        sequence.pages = pages + [self.pool.take() for _ in range(needed)]
        sequence.computed = len(pages) * self._page_size
        sequence.inserted = len(pages)
        if self.states is not None:
            self.states.begin(sequence, snapshot)
        in_prompt = min(sequence.computed, len(sequence.request.prompt))
        if not sequence.preempted:
            self.prefix_queries += len(sequence.request.prompt)
            self.prefix_hits += in_prompt
            if sequence.index == 0:
                sequence.request.cached_tokens = in_prompt
        return True

    def _find_prefix(self, sequence: Sequence) -> tuple[list[int], Snapshot | None]:
        """Returns held pages with the start of a sequence, and a held snapshot after them if the model keeps states."""
        limit = len(sequence.tokens) - 1  # the last token must be computed, since the next one is sampled after it
        scored = sequence.request.next_prompt_logprob if sequence.index == 0 else None
        if scored is not None:
            limit = min(limit, scored - 1)
        adapter = sequence.request.adapter
        if self.prefix is not None and self.states is not None:
            pages, index = self.prefix.match_snapshot(sequence.tokens, limit=limit, adapter=adapter)
            return pages, None if index is None else Snapshot(len(pages) * self._page_size, index)
        if self.prefix is not None:
            return self.prefix.match(sequence.tokens, limit=limit, adapter=adapter), None
        return self._sibling_prefix(sequence, limit)

    def _sibling_prefix(self, sequence: Sequence, limit: int) -> tuple[list[int], Snapshot | None]:
        """Returns what outputs of one prompt share without a prefix cache."""
        first = sequence.request.sequences[0]
        shared = min(limit, first.computed, len(sequence.request.prompt)) // self._page_size
        snapshot = None
        if self.states is not None:
            snapshot = first.snapshot
            if snapshot is None or snapshot.position > shared * self._page_size:
                return [], None
            shared = snapshot.position // self._page_size
        pages = first.pages[:shared] if first is not sequence else []
        if not pages:
            return [], None
        for page in pages:
            self.pool.hold(page)
        if self.states is not None and snapshot is not None:
            self.states.pool.hold(snapshot.row)
        return pages, snapshot

    def _waits_for_sibling(self, sequence: Sequence) -> bool:
        """Whether the first output of the request is still computing the prompt, whose pages this one will share."""
        first = sequence.request.sequences[0]
        return first is not sequence and first.finish_reason is None and first.computed < len(sequence.request.prompt)

    def _grow(self, sequence: Sequence, length: int) -> bool:
        """Gives a running sequence pages for its first `length` tokens; False if it was preempted instead."""
        needed = self._pages(length) - len(sequence.pages)
        while needed > 0 and not self._reclaim(needed):
            if not self._preempt_later(sequence):
                self.preempt(sequence)
                return False
        sequence.pages.extend(self.pool.take() for _ in range(needed))
        self._grew |= needed > 0
        return True

    def _grow_ahead(self) -> None:
        """Gives a page to all that will soon need one, where there are plenty.

        Page tables then change in one step for many sequences, and not in each step for some: while they stay,
        the device needs nothing from the host.
        """
        soon = []
        for sequence in self.running:
            room = len(sequence.pages) * self._page_size
            if room < min(len(sequence.tokens) + sequence.unread + self._page_size // 2, sequence.most):
                soon.append(sequence)
        if self.pool.free + self.pool.kept_alone >= len(self.running) + len(soon) and self._reclaim(len(soon)):
            for sequence in soon:
                sequence.pages.append(self.pool.take())

    def _reclaim(self, needed: int) -> bool:
        """Whether this many pages are free, after evictions from the prefix cache if needed."""
        lacking = needed - self.pool.free
        if lacking <= 0:
            return True
        # Some that it alone holds may have to stay, for pages after them.
        if self.prefix is None or self.pool.kept_alone < lacking:
            return False
        return self.prefix.evict(lacking) == lacking

    def _preempt_later(self, sequence: Sequence) -> bool:
        """Preempts the last running sequence that comes after this one; False if there is none."""
        last = max(self.running, key=lambda s: s.key, default=None)
        if last is None or last.key <= sequence.key:
            return False
        self.preempt(last)
        return True

    def _release(self, sequence: Sequence) -> None:
        if self.states is not None:
            self.states.leave(sequence, self.prefix)
        for page in sequence.pages:
            self.pool.release(page)
        if sequence.slot >= 0:
            self._slots.append(sequence.slot)
        sequence.pages, sequence.slot, sequence.drafts = [], -1, []
        sequence.computed = sequence.inserted = sequence.written = 0

    def _pages(self, length: int) -> int:
        return -(-length // self._page_size)

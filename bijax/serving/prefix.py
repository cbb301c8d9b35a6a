"""The prefix cache: a radix tree whose edges are pages of tokens."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bijax.serving.pages import PagePool
from bijax.serving.tokens import Tokens

type Chunk = bytes


@dataclass(eq=False)
class _Node:
    page: int
    parent: "_Node | None"
    chunk: Chunk = b""
    snapshot: int | None = None
    children: dict[Chunk, "_Node"] = field(default_factory=dict)


class PrefixCache:
    """Caches full computed pages, and finds them by a sequence's tokens from its start.

    Sequences with different adapters have different keys and values for the same tokens, and share no pages.

    The cache is one of the holders of its pages. It evicts those that only it holds, the least recently used first.
    With a model that keeps states, the end of a page may have a snapshot, and a match ends where there is one. What a
    draft head keeps of a token depends on the token after it; with `lookahead` a page is found by the tokens after its
    end too.

    Args:
        pool: Where the pages are from.
        page_size: Tokens of a page.
        snapshots: Where the snapshots are from; None with a model that has none.
        lookahead: Tokens after a page on which its contents depend.

    Example:
        >>> from bijax.serving.tokens import as_tokens
        >>> pool = PagePool(4)
        >>> cache = PrefixCache(pool, page_size=2)
        >>> cache.insert(as_tokens([5, 6, 7]), [pool.take()])
        >>> cache.match(as_tokens([5, 6, 9, 9]), limit=3)
        [0]
    """

    def __init__(
        self, pool: PagePool, page_size: int, snapshots: PagePool | None = None, *, lookahead: int = 0
    ) -> None:
        self._pool = pool
        self._lookahead = lookahead
        self._snapshots = snapshots
        self._page_size = page_size
        self._roots: defaultdict[int, _Node] = defaultdict(lambda: _Node(-1, None))  # by adapter
        # The least recently used first; a node always before its parent.
        self._nodes: OrderedDict[_Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, tokens: Tokens, *, limit: int, adapter: int = 0) -> list[int]:
        """Returns the pages that hold the longest known start of the tokens, and holds each of them once more.

        Args:
            tokens: The sequence.
            limit: Maximum number of tokens to match.
            adapter: The adapter that they are computed with.
        """
        return self._held(self._path(tokens, limit, adapter))

    def match_snapshot(self, tokens: Tokens, *, limit: int, adapter: int = 0) -> tuple[list[int], int | None]:
        """Returns what `match` does up to the last snapshot on the way, and that snapshot, held once more too.

        Args:
            tokens: The sequence.
            limit: Maximum number of tokens to match.
            adapter: The adapter that they are computed with.
        """
        path = self._path(tokens, limit, adapter)
        while path and path[-1].snapshot is None:
            path.pop()
        snapshot = path[-1].snapshot if path else None
        if snapshot is not None and self._snapshots is not None:
            self._snapshots.hold(snapshot)
        return self._held(path), snapshot

    def attach(self, tokens: Tokens, position: int, index: int, *, adapter: int = 0) -> None:
        """Keeps a snapshot after the first `position` tokens, if their pages are known and have none there.

        Args:
            tokens: The sequence.
            position: Tokens before the state, a multiple of the page size.
            index: The snapshot.
            adapter: The adapter that they were computed with.
        """
        path = self._path(tokens, position, adapter)
        if self._snapshots is None or len(path) * self._page_size != position or path[-1].snapshot is not None:
            return
        self._snapshots.keep(index)
        path[-1].snapshot = index

    def evict_snapshot(self) -> bool:
        """Evicts the least recently used snapshot that only the cache holds; False if there is none."""
        for node in self._nodes:
            if (
                node.snapshot is not None
                and self._snapshots is not None
                and self._snapshots.holders(node.snapshot) == 1
            ):
                self._give_up_snapshot(node)
                return True
        return False

    def insert(self, tokens: Tokens, pages: Sequence[int], *, adapter: int = 0) -> None:
        """Adds the full pages of a sequence, except pages past the tokens and pages already known.

        If only the cache holds a known page, the sequence's page, which was computed again, replaces it.

        Args:
            tokens: Tokens whose keys and values are computed, and those on which the last page depends.
            pages: The pages that hold them, from the start of the sequence on.
            adapter: The adapter that they were computed with.
        """
        node, path = self._roots[adapter], []
        for page, chunk in zip(pages, self._chunks(tokens, len(tokens)), strict=False):
            child = node.children.get(chunk)
            if child is None:
                self._pool.keep(page)
                child = node.children[chunk] = _Node(page, node, chunk)
            elif child.page != page and self._pool.holders(child.page) == 1:
                # The same numbers, computed again. Its pages after this one would keep the other from being evicted.
                self._pool.keep(page)
                self._pool.give_up(child.page)
                child.page = page
            node = child
            path.append(node)
        self._touch(path)

    def evict(self, number: int) -> int:
        """Evicts pages that only the cache holds; returns their number, at most `number`."""
        found: list[_Node] = []
        given_up: Counter[_Node] = Counter()  # children of a node that are evicted with it
        for node in self._nodes:  # a node before its parent
            if len(found) == number:
                break
            if len(node.children) == given_up[node] and self._pool.holders(node.page) == 1:
                found.append(node)
                if node.parent is not None:
                    given_up[node.parent] += 1
        for node in found:
            self._remove(node)
        return len(found)

    def clear(self) -> None:
        """Gives up all pages."""
        for node in list(self._nodes):
            self._remove(node)

    def _chunks(self, tokens: Tokens, limit: int) -> Iterator[Chunk]:
        size, more = self._page_size, self._lookahead
        for start in range(0, min(limit, len(tokens) - more) - size + 1, size):
            yield tokens[start : start + size + more].tobytes()

    def _path(self, tokens: Tokens, limit: int, adapter: int) -> list[_Node]:
        node, path = self._roots[adapter], []
        for chunk in self._chunks(tokens, limit):
            child = node.children.get(chunk)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _held(self, path: list[_Node]) -> list[int]:
        self._touch(path)
        for node in path:
            self._pool.hold(node.page)
        return [node.page for node in path]

    def _give_up_snapshot(self, node: _Node) -> None:
        if node.snapshot is not None and self._snapshots is not None:
            self._snapshots.give_up(node.snapshot)
            node.snapshot = None

    def _touch(self, path: list[_Node]) -> None:
        for node in reversed(path):
            self._nodes[node] = None
            self._nodes.move_to_end(node)

    def _remove(self, node: _Node) -> None:
        del self._nodes[node]
        if node.parent is not None:
            node.parent.children.pop(node.chunk, None)
        self._pool.give_up(node.page)
        self._give_up_snapshot(node)

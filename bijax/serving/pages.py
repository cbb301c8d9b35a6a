"""Pages of the cache, with reference counts."""


class PagePool:
    """Pages that are free or held, each by one or more.

    Args:
        num_pages: Number of pages.

    Example:
        >>> pool = PagePool(2)
        >>> page = pool.take()
        >>> pool.hold(page), pool.release(page), pool.free
        (None, None, 1)
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._kept = [False] * num_pages
        self._kept_alone = 0

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def kept_alone(self) -> int:
        """Number of pages that only the prefix cache holds."""
        return self._kept_alone

    def take(self) -> int:
        """Returns a free page, held once.

        Raises:
            IndexError: If no page is free.
        """
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Adds a hold to a page that is already held."""
        if not self._holders[page]:
            raise ValueError(f"page {page} is free; only a page that somebody holds can be shared.")
        self._kept_alone -= self._kept[page] and self._holders[page] == 1
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """Gives up one hold of a page; the last one frees it."""
        if not self._holders[page]:
            raise ValueError(f"page {page} is free already.")
        self._holders[page] -= 1
        self._kept_alone += self._kept[page] and self._holders[page] == 1
        if not self._holders[page]:
            self._free.append(page)

    def keep(self, page: int) -> None:
        """Holds a page once more, for the prefix cache."""
        self.hold(page)
        self._kept[page] = True

    def give_up(self, page: int) -> None:
        """Gives up the hold of the prefix cache."""
        self._kept_alone -= self._holders[page] == 1
        self._kept[page] = False
        self.release(page)

    def holders(self, page: int) -> int:
        """Returns how often a page is held."""
        return self._holders[page]

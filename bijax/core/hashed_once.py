"""The static arguments of a jitted function that take long to hash and to compare."""

from typing import Any


class HashedOnce:
    """Parts of a program without arrays, such as tree structures: hashed once, and compared by identity first.

    Args:
        *parts: Hashable values. Objects of one class are equal if their parts are.

    Example:
        >>> HashedOnce(1, "a") == HashedOnce(1, "a")
        True
    """

    def __init__(self, *parts: Any) -> None:
        self.parts = parts
        self._hash = hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, HashedOnce) and type(other) is type(self) and self.parts == other.parts

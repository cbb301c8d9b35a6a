"""Cases that `make test` leaves to `make test-all`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rarely(*values: Any) -> Any:
    """Returns parameters of a test that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def sampled[T](cases: Iterable[T], few: Collection[T]) -> list[Any]:
    """Returns all cases; those that are not among the few are left to `make test-all`."""
    cases = list(cases)
    assert all(case in cases for case in few)
    return [case if case in few else rarely(case) for case in cases]

"""Placeholder values of a row index where there is no row."""

from typing import Final

NO_ROW: Final = -1
"""No row."""

WRONG: Final = -2
"""An invalid row index: results computed from it are nan."""

UNREAD: Final = -3
"""No row, and nobody reads what is there: a GPU leaves it unwritten, other backends write zeros."""

BEFORE_ALL: Final = -(2**31)
"""Less than the number of any row and its negative."""

"""Placeholder values of a row index where there is no row."""

from typing import Final

NO_ROW: Final = -1
"""No row."""

WRONG: Final = -2
"""An invalid row index: results computed from it are nan."""

"""Numbers that stand in the place of a row."""

from typing import Final

NO_ROW: Final = -1
"""There is none."""

WRONG: Final = -2
"""There is no telling which: what is computed of it is nan."""

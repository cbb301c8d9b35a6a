"""The tree of a kernel's records, as a parameter of its primitive."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class RecordTree:
    """Which arrays of which records the operands of a primitive are.

    Attributes:
        tree: The tree of a tuple of records of this library, whose static fields a text tells from all others
            (`bijax.core.lowering_cache.lowered_forms`).
    """

    tree: jax.tree_util.PyTreeDef

    def records(self, leaves: Sequence[Any]) -> Any:
        """Returns the records of leaves."""
        return jax.tree.unflatten(self.tree, leaves)

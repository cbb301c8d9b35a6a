"""The tree of a kernel's records, as a parameter of its primitive."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class RecordTree:
    """Maps the operands of a primitive to the arrays of its records.

    Attributes:
        tree: The tree of a tuple of this library's records, whose static fields have a text that identifies them
            (`bijax.core.lowering_cache.lowered_forms`).
    """

    tree: jax.tree_util.PyTreeDef

    def records(self, leaves: Sequence[Any]) -> Any:
        """Returns the records of leaves."""
        return jax.tree.unflatten(self.tree, leaves)

"""How results of rotate_and_store are compared."""

from typing import Any

import jax

from bijax.testing import assert_bits_equal


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_bits_equal(a, b)

"""Recurrent cells and attention of Flax and Equinox in a batch, alone and in a scan."""

import pytest

import bijax
from tests.transform.cells import CELLS, sizes_that_differ

SIZES = (1, 5, 33)


@pytest.mark.tier("full", fast=("equinox LSTM-(1, 33)",))
@pytest.mark.parametrize("sizes", [(1, 33), (1, 5, 33)], ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_cells_are_invariant(name: str, sizes: tuple[int, ...]) -> None:
    assert not sizes_that_differ(CELLS[name](), bijax.invariant, sizes, scan="GRU" in name)


def test_the_same_cells_without_the_transform_are_not() -> None:
    assert any(sizes_that_differ(CELLS[name](), lambda f: f, SIZES, scan=True) for name in CELLS if "linen" in name)

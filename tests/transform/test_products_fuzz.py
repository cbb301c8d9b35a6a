"""Random programs of products under the transform: a quick sample; `product_programs` makes any number of them."""

import pytest

import bijax
from tests.transform.product_programs import differences, random_case


@pytest.mark.tier("full", fast=("(1, 2, 5)-14",))
@pytest.mark.parametrize("seed", [0, 1, 2, 4, 6, 14])
@pytest.mark.parametrize("sizes", [(1, 5), (1, 2, 5)], ids=str)
def test_random_products_are_invariant(seed: int, sizes: tuple[int, ...]) -> None:
    assert not differences(random_case(seed), bijax.invariant, sizes)


def test_the_same_products_without_the_transform_are_not() -> None:
    assert any(differences(random_case(seed), batches=(1, 2, 5)) for seed in (14, 6, 2, 10, 0, 4))

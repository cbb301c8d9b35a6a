"""Bits on 1, 2, 4 and 8 devices, in a process of its own, which has eight devices of a CPU."""

import pytest

from tests import fake_devices
from tests.tiers import full_only

FAST = ("products", "bad input", "fingerprints", "experts", "few rows on Hopper")
OTHERS = (
    ("sums", "rows", "weights of leaves", "gradients"),
    ("vocabulary", "lowering for Hopper", "gradients without types"),
    ("experts on any number of devices", "experts in parts"),
    ("products with cut rows",),
    ("products in bfloat16",),
    ("products of huge numbers", "leaves of 11008, 8960 and 6912"),
)


@pytest.mark.parametrize("names", [FAST, *map(full_only, OTHERS)], ids=lambda names: names[0])
def test_bits_do_not_depend_on_the_number_of_devices(names: tuple[str, ...]) -> None:
    assert fake_devices.run("tests.parallel.on_devices", *names) == list(names)

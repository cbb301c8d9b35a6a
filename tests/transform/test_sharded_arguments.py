"""`jax.jit` with sharded arguments: programs that XLA divides among devices have the bits of one device."""

import pytest

from tests import fake_devices


@pytest.mark.tier("full", fault=("some",))
@pytest.mark.parametrize("which", ["some", "everything"])
def test_bits_of_one_device(which: str) -> None:
    assert fake_devices.run("tests.transform.sharded_arguments", which) == ["held"]

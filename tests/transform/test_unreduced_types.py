"""Partial sums over devices are refused by name, instead of an internal error of JAX."""

from tests import fake_devices


def test_unreduced_and_reduced_types() -> None:
    assert fake_devices.run("tests.transform.unreduced_types") == ["held"]

"""Programs whose rows alone are cut, in a process of its own, which has eight devices of a CPU: nothing moves."""

import pytest

from tests import fake_devices
from tests.tiers import full_only

FAST = ("rows", "control", "attributes", "audits", "forms", "places")
OTHERS = (
    ("tokens",),
    ("one axis of two", "two axes", "explicit"),
    ("gradients", "not rows", "labelled", "inner shardings"),
    ("loops",),
    ("loops over rows",),
)


@pytest.mark.parametrize("names", [FAST, *map(full_only, OTHERS)], ids=lambda names: names[0])
def test_rows_stay_on_their_devices(names: tuple[str, ...]) -> None:
    assert fake_devices.run("tests.transform.sharded_rows", *names) == list(names)


def test_explicit_meshes() -> None:
    names = ["columns", "mixed", "sixteen bits", "accumulated", "control"]
    assert fake_devices.run("tests.transform.explicit_rows", *names) == names

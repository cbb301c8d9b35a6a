"""The transform with `shard_map`, `psum` and sharded arrays, in a process with two devices."""

import pytest

from tests import fake_devices
from tests.tiers import full_only

ALL = ["psum", "psum dx outside", "psum dx inside", "psum dw inside"]


@pytest.mark.tier("full")
@pytest.mark.parametrize("names", [[], full_only(ALL)], ids=["cut batches", "and sums over devices"])
def test_two_devices(names: list[str]) -> None:
    assert fake_devices.run("tests.transform.matrix_devices", *names, devices=2) == [*names, "one device"]

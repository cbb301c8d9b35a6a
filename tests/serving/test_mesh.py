"""Engines whose models are cut over devices, in a process of its own, which has eight devices of a CPU."""

import pytest

from tests import fake_devices
from tests.tiers import full_only

FAST = ("fingerprints",)
OTHERS = (
    ("bad input", "flags", "start", "smallest"),
    ("any number of devices", "plain"),
    ("one program",),
    ("weights", "disaggregated"),
    ("8 bits",),
    ("command",),
)


@pytest.mark.parametrize("names", [FAST, *map(full_only, OTHERS)], ids=lambda names: names[0])
def test_engines_have_the_same_bits_on_any_number_of_devices(names: tuple[str, ...]) -> None:
    assert fake_devices.run("tests.serving.mesh_engines", *names) == list(names)


WITH_EXPERTS = (
    ("start with experts",),
    ("experts over 2, 4 and 8 devices",),
    ("experts and heads",),
    ("together with experts",),
    ("plain experts", "weights of experts"),
    ("DeepSeek",),
    ("Qwen3-Next",),
    ("snapshots",),
    ("hybrid on 8 devices",),
    ("DeepSeek on 8 devices",),
    ("drafts of a hybrid",),
    ("hybrid in one program",),
    ("drafts by a head",),
    ("drafts by a head of a hybrid",),
    ("DeepSeek in int8",),
    ("hybrid in int8",),
    ("modes of DeepSeek",),
    ("modes of DeepSeek in int8",),
    ("modes of a hybrid",),
    ("command with experts",),
)


@pytest.mark.parametrize("names", [*map(full_only, WITH_EXPERTS)], ids=lambda names: names[0])
def test_experts_have_the_same_bits_on_any_number_of_devices(names: tuple[str, ...]) -> None:
    assert fake_devices.run("tests.serving.mesh_experts", *names) == list(names)


WITH_OVERLAP = (
    ("overlap",),
    ("overlap without shared experts",),
    ("overlap of int8",),
    ("overlap on 8 devices",),
    ("overlap of DeepSeek",),
    ("overlap of Qwen3-Next",),
    ("overlap in one program", "overlap after a warm-up"),
    ("any split",),
    ("wrong splits", "plain halves", "bad overlap"),
    ("command with overlap",),
)


@pytest.mark.parametrize("names", [*map(full_only, WITH_OVERLAP)], ids=lambda names: names[0])
def test_overlap_has_the_bits_of_none(names: tuple[str, ...]) -> None:
    assert fake_devices.run("tests.serving.mesh_overlap", *names) == list(names)


WITH_ADAPTERS = (
    ("adapters",),
    ("adapters on 8 devices",),
    ("adapters beside int8",),
    ("plain adapters", "bad adapters"),
    ("adapters in one program",),
    ("adapters and a head", "adapters of latent attention"),
    ("start with adapters",),
)


@pytest.mark.parametrize("names", [*map(full_only, WITH_ADAPTERS)], ids=lambda names: names[0])
def test_adapters_have_the_same_bits_on_any_number_of_devices(names: tuple[str, ...]) -> None:
    assert fake_devices.run("tests.serving.mesh_adapters", *names) == list(names)

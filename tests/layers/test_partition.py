"""Models that are cut over 1, 2, 4 and 8 devices, in a process of its own, which has eight devices of a CPU."""

import pytest

from tests import fake_devices
from tests.tiers import full_only

FAST = ("bad input",)
OTHERS = (
    ("parameters", "loading", "layers"),
    ("small", "chunks"),
    ("gradients of Qwen3",),
    ("gradients in bfloat16",),
    ("gradients with shared heads",),
)


@pytest.mark.parametrize("names", [FAST, *map(full_only, OTHERS)], ids=lambda names: names[0])
def test_models_have_the_same_bits_on_any_number_of_devices(names: tuple[str, ...]) -> None:
    assert fake_devices.run("tests.layers.partitioned_models", *names) == list(names)


WITH_EXPERTS = (
    ("loading experts", "latent attention"),
    ("linear attention",),
    ("gradients with experts",),
    ("gradients with experts on both axes",),
)


@pytest.mark.parametrize("names", [*map(full_only, WITH_EXPERTS)], ids=lambda names: names[0])
def test_experts_have_the_same_bits_on_any_number_of_devices(names: tuple[str, ...]) -> None:
    assert fake_devices.run("tests.layers.partitioned_experts", *names) == list(names)

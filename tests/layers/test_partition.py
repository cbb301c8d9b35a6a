"""Models that are cut over 1, 2, 4 and 8 devices, in a process of its own, which has eight devices of a CPU."""

import pytest

from tests import fake_devices
from tests.tiers import full_only


def test_what_devices_cannot_share_is_refused() -> None:
    names = ["bad models", "bad heads"]
    assert fake_devices.run("tests.layers.partitioned_errors", *names) == names


MODELS = (
    ("parameters", "loading", "layers"),
    ("small", "chunks"),
    ("adapters",),
    ("gradients of Qwen3",),
    ("gradients in bfloat16",),
    ("gradients with shared heads",),
)


@pytest.mark.parametrize("names", [*map(full_only, MODELS)], ids=lambda names: names[0])
def test_models_have_the_same_bits_on_any_number_of_devices(names: tuple[str, ...]) -> None:
    assert fake_devices.run("tests.layers.partitioned_models", *names) == list(names)


@pytest.mark.parametrize("names", [full_only(("rows", "gradient"))], ids=lambda names: names[0])
def test_long_prompts_whose_rows_are_cut_have_the_same_bits_on_any_number_of_devices(names: tuple[str, ...]) -> None:
    assert fake_devices.run("tests.layers.partitioned_rows", *names) == list(names)


WITH_EXPERTS = (
    ("loading experts", "latent attention"),
    ("linear attention",),
    ("gradients with experts",),
    ("gradients with experts on both axes",),
)


@pytest.mark.parametrize("names", [*map(full_only, WITH_EXPERTS)], ids=lambda names: names[0])
def test_experts_have_the_same_bits_on_any_number_of_devices(names: tuple[str, ...]) -> None:
    assert fake_devices.run("tests.layers.partitioned_experts", *names) == list(names)


ATTENTION = (
    ("chunks of linear attention", "chunks of latent attention"),
    ("gradients of linear attention",),
    ("gradients of latent attention",),
    ("linear attention with experts",),
    ("latent attention in bfloat16",),
)


@pytest.mark.parametrize("names", [*map(full_only, ATTENTION)], ids=lambda names: names[0])
def test_latent_and_linear_attention_have_the_same_bits_on_any_number_of_devices(names: tuple[str, ...]) -> None:
    assert fake_devices.run("tests.layers.partitioned_attention", *names) == list(names)


INT8 = (
    ("layers of int8", "loading int8"),
    ("experts of int8",),
    ("linear attention in int8",),
    ("latent attention in int8",),
)


@pytest.mark.parametrize("names", [*map(full_only, INT8)], ids=lambda names: names[0])
def test_int8_has_the_bits_of_a_model_that_is_not_cut(names: tuple[str, ...]) -> None:
    assert fake_devices.run("tests.layers.partitioned_int8", *names) == list(names)

"""A new optional array of attention reaches only the kernels that say that they read it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention.call import OPTIONAL, AttentionCall, AttentionOptions
from pallas_kernels.backends import hopper, jax_triton
from pallas_kernels.registry import find
from pallas_kernels.target import Target

WIDTHS = (64, "bfloat16", 64)


@dataclasses.dataclass(frozen=True, eq=False)
class WithMore(AttentionCall):
    """A call with an array that no kernel knows yet."""

    @property
    def present(self) -> tuple[str, ...]:
        return (*super().present, "more")


def call_of(kind: type[AttentionCall]) -> AttentionCall:
    query, limits = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16), jax.ShapeDtypeStruct((1, 3), jnp.int32)
    return kind(query, query, query, limits, AttentionOptions(0.125))  # type: ignore[arg-type]


def latents_of(kind: type[AttentionCall]) -> AttentionCall:
    query, key = (jax.ShapeDtypeStruct((1, 8, heads, 576), jnp.bfloat16) for heads in (2, 1))
    limits = jax.ShapeDtypeStruct((1, 3), jnp.int32)
    return kind(query, key, None, limits, AttentionOptions(0.125, latent_value_size=512))  # type: ignore[arg-type]


def kernel_for(kind: type[AttentionCall], architecture: str) -> str:
    return str(find("attention", Target.parse(architecture), WIDTHS, call_of(kind)).function.__module__)


@pytest.mark.parametrize("architecture", ["cpu", "sm_80", "sm_90"])
def test_portable_programs_serve_a_call_with_an_array_that_no_backend_lists(architecture: str) -> None:
    assert kernel_for(WithMore, architecture).startswith("pallas_kernels.attention.")
    if architecture == "sm_90":  # the control; Triton's kernels need packages that may be missing
        assert "hopper" in kernel_for(AttentionCall, architecture)
    if architecture != "cpu":
        assert kernel_for(WithMore, architecture) == "pallas_kernels.attention.portable"


@pytest.mark.parametrize("operation", ["attention", "attention_gradients"])
@pytest.mark.parametrize("backend", [hopper, jax_triton])
def test_kernels_of_a_backend_refuse_an_array_that_it_does_not_list(backend: Any, operation: str) -> None:
    kernels = [k for k in backend.KERNELS if k.operation == operation]
    assert kernels
    for kernel in kernels:
        assert any(kernel.serves(call(AttentionCall)) for call in (call_of, latents_of))
        assert not any(kernel.serves(call(WithMore)) for call in (call_of, latents_of))


@pytest.mark.parametrize("backend", [hopper, jax_triton])
def test_backends_list_arrays_that_exist(backend: Any) -> None:
    assert vars(backend)["_ATTENTION_ARRAYS"] <= set(OPTIONAL)

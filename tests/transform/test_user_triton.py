"""A user's own kernel, called through jax-triton, in a program that is made invariant."""

import importlib.util
from typing import Any

import jax
import pytest

import bijax

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "jax_triton")),
    reason="needs jax-triton and triton",
)
X = jax.ShapeDtypeStruct((128,), "float32")


def twice(x: jax.Array, configurations: int = 0) -> jax.Array:
    import jax_triton
    import triton

    from tests.jax_triton.small_kernel import multiply_add

    kernel: Any = multiply_add
    constants = {"BLOCK": 64}
    if configurations:
        found = [triton.Config({"BLOCK": 32 * 2**i}) for i in range(configurations)]
        kernel, constants = triton.autotune(found, key=[])(kernel), {}
    out: Any = jax.ShapeDtypeStruct(x.shape, x.dtype)
    result = {"out_type": out} if hasattr(jax_triton, "TensorDescriptor") else {"out_shape": out}
    return jax_triton.triton_call(x, x, x.size, kernel=kernel, grid=(4,), **result, **constants)


def model(x: jax.Array, configurations: int = 0) -> jax.Array:
    return jax.numpy.tanh(twice(x, configurations)) * 2


def verdict(configurations: int) -> tuple[str, str]:
    f = bijax.invariant(lambda x: model(x, configurations))
    report = bijax.audit(f, X, platform="cuda", architecture="sm_80")
    (found,) = [o for o in report.operations if o.primitive == "triton_kernel_call"]
    return found.verdict, found.evidence


def test_a_kernel_is_named_and_left_as_it_is() -> None:
    assert verdict(0) == (
        "believed",
        "a kernel whose author fixed its blocks and its order; lowered as it is written",
    )
    assert verdict(1)[0] == "believed"
    f = bijax.invariant(model)
    assert bijax.contracts(f, X, platform="cuda", architecture="sm_80").believed == ("triton_kernel_call",)


def test_a_kernel_that_is_tuned_on_the_gpu_is_refused() -> None:
    assert verdict(2)[0] == "refused"
    assert "give the kernel one configuration" in verdict(2)[1]
    with pytest.raises(ValueError, match="triton_kernel_call"):
        bijax.contracts(bijax.invariant(lambda x: model(x, 2)), X, platform="cuda", architecture="sm_80")

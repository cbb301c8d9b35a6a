"""What `bijax.matmul` and the transform's products become for a GPU, seen from a process that has none."""

import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import bijax
from bijax.ops import weight_gradient
from bijax.transform.rules.equations import equations
from bijax.transform.rules.uses import kernels_of
from tests.jax_triton.packages import HAS_JAX_TRITON, launches_in

pytestmark = pytest.mark.usefixtures("hopper")

X, W = jax.ShapeDtypeStruct((24, 64), "bfloat16"), jax.ShapeDtypeStruct((64, 32), "bfloat16")
STACK_X, STACK_W = jax.ShapeDtypeStruct((3, 24, 64), "bfloat16"), jax.ShapeDtypeStruct((3, 64, 32), "bfloat16")
BIAS, G = jax.ShapeDtypeStruct((32,), "bfloat16"), jax.ShapeDtypeStruct((24, 32), "bfloat16")
SQUARES = jax.ShapeDtypeStruct((3, 64, 64), "bfloat16")
TOTAL = jax.ShapeDtypeStruct((64, 32), "float32")


def loss(x: jax.Array, w: jax.Array) -> jax.Array:
    return bijax.matmul(x, w).astype(jnp.float32).sum()


def plain_loss(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.exp(x @ w).astype(jnp.float32).max()


def dense(params: Any, x: jax.Array) -> jax.Array:
    return nn.Dense(32, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16).apply(params, x)


PARAMS = {"params": {"kernel": W, "bias": BIAS}}

# A program and how often the kernel is launched.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "matmul": (bijax.matmul, (X, W), 1),
    "bias": (lambda x, w, bias: bijax.matmul(x, w, bias=bias), (X, W, BIAS), 1),
    "float32 result": (lambda x, w: bijax.matmul(x, w, preferred_element_type="float32"), (X, W), 1),
    "gradients": (jax.grad(loss, (0, 1)), (X, W), 2),
    "continued gradient": (lambda x, g, total: weight_gradient(x, g, accumulate=total), (X, G, TOTAL), 1),
    "stack": (bijax.matmul, (STACK_X, STACK_W), 1),
    "gradients of a stack": (jax.grad(loss, (0, 1)), (STACK_X, STACK_W), 2),
    "vmap over rows": (jax.vmap(bijax.matmul, (0, None)), (STACK_X, W), 1),
    "vmap over weights": (jax.vmap(bijax.matmul, (None, 0)), (X, STACK_W), 1),
    "vmap over both": (jax.vmap(bijax.matmul), (STACK_X, STACK_W), 1),
    "vmap of gradients": (jax.vmap(jax.grad(loss, (0, 1)), (0, None)), (STACK_X, W), 2),
    "scan": (lambda x, ws: jax.lax.scan(lambda h, w: (bijax.matmul(h, w), None), x, ws)[0], (X, SQUARES), 1),
    "invariant": (bijax.invariant(jnp.dot), (X, W), 1),
    "invariant, transposed": (bijax.invariant(lambda x, w: x @ w.T), (G, W), 1),
    "invariant gradients": (bijax.invariant(jax.grad(plain_loss, (0, 1))), (X, W), 3),
    "invariant einsum": (bijax.invariant(lambda x, w: jnp.einsum("gmk,gkn->gmn", x, w)), (STACK_X, STACK_W), 1),
    "invariant Dense": (bijax.invariant(dense), (PARAMS, X), 1),
}


def lowered(function: Callable[..., Any], *args: Any) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.tier(
    "full",
    fast=("gradients", "gradients of a stack", "scan", "invariant, transposed", "invariant einsum", "invariant Dense"),
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_for_hopper_holds_the_kernel_and_no_dot(name: str) -> None:
    function, args, launches = PROGRAMS[name]
    text = lowered(function, *args)
    assert len(re.findall(r"custom_call @mosaic_gpu\w*", text)) == launches
    assert "stablehlo.dot" not in text


def test_the_result_leaves_the_kernel_in_its_own_dtype() -> None:
    """There is no second pass over a float32 result."""
    w, bias = jax.ShapeDtypeStruct((64, 128), "bfloat16"), jax.ShapeDtypeStruct((128,), "bfloat16")
    text = lowered(lambda x, w, bias: bijax.matmul(x, w, bias=bias), X, w, bias)
    assert not re.search(r"stablehlo\.(convert|add)", text)


def test_float64_is_summed_in_a_fixed_order() -> None:
    """XLA's dot would depend on the number of columns, among which the batch may be."""
    with jax.enable_x64(True):
        x, w = (jax.ShapeDtypeStruct(a.shape, "float64") for a in (X, W))
        text = lowered(bijax.invariant(jax.grad(lambda x, w: jax.lax.dot(x, w).sum(), (0, 1))), x, w)
    assert (launches_in(text) > 0) == HAS_JAX_TRITON
    assert "stablehlo.dot" not in text
    assert "mosaic_gpu" not in text


@pytest.mark.parametrize(
    ("precision", "kernel"),
    [(None, "tf32"), ("high", "tf32"), ("highest", "bf16x6"), (lax.DotAlgorithmPreset.BF16_BF16_F32_X6, "bf16x6")],
)
def test_precision_chooses_the_kernel_of_float32(precision: Any, kernel: str) -> None:
    def gradient(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.grad(lambda x, w: (bijax.matmul(x, w, precision=precision) ** 2).sum())(x, w)

    x, w = (jax.ShapeDtypeStruct(a.shape, "float32") for a in (X, W))
    traced = jax.make_jaxpr(gradient)(x, w)
    uses = [use.kernel for equation in equations(traced, "cuda") for use in kernels_of(equation, "cuda")]
    assert [k for k in uses if "hopper" in k] == [f"pallas_kernels.matmul.hopper.{kernel}.matmul"] * 2
    text = lowered(gradient, x, w)
    assert len(re.findall(r"custom_call @mosaic_gpu\w*", text)) == 2
    assert "stablehlo.dot" not in text


def test_gradients_of_float32_weights_are_products_of_chunks() -> None:
    """Those of bfloat16 weights too, where the result and its cotangent are float32."""
    text = lowered(lambda x, g: weight_gradient(x, g), X, jax.ShapeDtypeStruct(G.shape, "float32"))
    assert "mosaic_gpu" in text
    assert "stablehlo.dot" not in text


def test_mixed_dtypes_under_the_transform_are_widened() -> None:
    w = jax.ShapeDtypeStruct(W.shape, "float16")
    text = lowered(bijax.invariant(lambda x, w: jax.lax.dot(x, w, preferred_element_type=jnp.float32)), X, w)
    assert "mosaic_gpu" in text
    assert "stablehlo.dot" not in text


def test_an_older_gpu_has_other_kernels() -> None:
    with bijax.lowering_for("sm_80"):
        text = lowered(jax.grad(lambda x, w: loss(x, w) * 2, (0, 1)), X, W)
    assert "mosaic_gpu" not in text
    assert "stablehlo.dot" not in text
    assert (launches_in(text) > 0) == HAS_JAX_TRITON


@pytest.mark.parametrize(("m", "k", "n"), [(0, 8, 8), (3, 0, 8), (3, 8, 0)])
def test_zero_sizes_launch_nothing(m: int, k: int, n: int) -> None:
    x, w = jax.ShapeDtypeStruct((m, k), "bfloat16"), jax.ShapeDtypeStruct((k, n), "bfloat16")
    assert "mosaic_gpu" not in lowered(bijax.matmul, x, w)
    assert "mosaic_gpu" not in lowered(lambda x, w: jax.grad(loss, 1)(x, w), x, w)


def test_one_program_for_several_platforms() -> None:
    exported = jax.export.export(jax.jit(bijax.matmul), platforms=("cpu", "cuda"))(X, W)
    assert "mosaic_gpu" in exported.mlir_module()
    x, w = jnp.ones(X.shape, X.dtype), jnp.ones(W.shape, W.dtype)
    assert (exported.call(x, w) == bijax.matmul(x, w)).all()

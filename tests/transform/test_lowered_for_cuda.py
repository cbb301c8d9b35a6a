"""No product is left to XLA in what is lowered for a GPU, of whatever architecture: it would choose the order."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters.mlir import ir

import bijax
from tests.transform.lowered import operations

_PRODUCTS = {"stablehlo.dot", "stablehlo.dot_general", "stablehlo.convolution", "chlo.ragged_dot"}


def products(lowered: jax.stages.Lowered) -> list[str]:
    """Returns the products of floats in a lowered program, with their types."""
    module = lowered.compiler_ir("stablehlo").operation
    found = (op for op in operations(module) if op.name in _PRODUCTS)
    return [str(op) for op in found if not str(ir.RankedTensorType(op.results[0].type).element_type).startswith("i")]


def shaped(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the gradients of the sum of the squares of what `f` returns, by all arguments."""

    def squares(*args: Any) -> Any:
        return sum(jnp.sum(jnp.square(y.astype(jnp.float32))) for y in jax.tree.leaves(f(*args)))

    return lambda *args: jax.grad(squares, tuple(range(len(args))))(*args)


def convolve(x: Any, w: Any) -> Any:
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def attend(q: Any, k: Any, v: Any) -> Any:
    return bijax.dot_product_attention(q, k, v, is_causal=True)


def attend_masked(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return bijax.dot_product_attention(q, k, v, jax.lax.stop_gradient(bias), bias > 0)


def attend_pages(q: Any, k: Any, v: Any) -> Any:
    return bijax.paged_attention(q, k, v, jnp.zeros((2, 3), jnp.int32), 40)


def all_attention(dtype: str, size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    return shaped(2, 33, 4, size, dtype=dtype), *[shaped(2, 33, 2, size, dtype=dtype)] * 2


MATRICES = (shaped(5, 96), shaped(96, 40))
HALVES = (shaped(5, 96, dtype="bfloat16"), shaped(96, 40, dtype="bfloat16"))
STACKS = (shaped(3, 5, 96), shaped(3, 96, 40))
IMAGES = (shaped(2, 8, 8, 16), shaped(3, 3, 16, 24))
PAGES = (shaped(2, 1, 4, 96), shaped(9, 16, 2, 96), shaped(9, 16, 2, 96))

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]] = {
    "matmul": (bijax.matmul, MATRICES),
    "matmul, 16 bits": (bijax.matmul, HALVES),
    "matmul, highest": (lambda x, w: bijax.matmul(x, w, precision="highest"), MATRICES),
    "matmul, gradients": (gradients(bijax.matmul), MATRICES),
    "matmul, gradients, 16 bits": (gradients(bijax.matmul), HALVES),
    "matmul, shards": (lambda x, w: bijax.matmul(x, w, split_k=2), MATRICES),
    "matmul, stacks, gradients": (gradients(bijax.matmul), STACKS),
    "gated": (gradients(lambda x, w: bijax.gated_matmul(x, w, w)), MATRICES),
    "attention, float32": (attend, all_attention("float32", 96)),
    "attention, 16 bits": (attend, all_attention("bfloat16", 128)),
    "attention, gradients": (gradients(attend), all_attention("float32", 128)),
    "attention, gradients, 16 bits": (gradients(attend), all_attention("bfloat16", 128)),
    "attention, bias and mask": (attend_masked, (*all_attention("bfloat16", 64), shaped(4, 33, 33))),
    "paged attention": (attend_pages, PAGES),
    "norms": (gradients(lambda x: bijax.rms_norm(x, x[0])), MATRICES[:1]),
    "softmax": (gradients(bijax.log_softmax), MATRICES[:1]),
    "cross entropy": (gradients(lambda x: bijax.softmax_cross_entropy(x, jnp.zeros(5, jnp.int32))), MATRICES[:1]),
    "sums": (gradients(lambda x: (bijax.sum(x, -1), bijax.mean(x, -1), bijax.var(x, -1))), MATRICES[:1]),
    "invariant, product": (bijax.invariant(gradients(lambda x, w: x @ w)), MATRICES),
    "invariant, float64": (bijax.invariant(gradients(lambda x, w: x @ w)), (shaped(33, 40, dtype="float64"),) * 2),
    "invariant, convolution": (bijax.invariant(gradients(convolve)), IMAGES),
    "invariant, ragged": (
        bijax.invariant(gradients(lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([2, 1, 2])))),
        (shaped(5, 96), shaped(3, 96, 40)),
    ),
    "invariant, attention": (bijax.invariant(gradients(jax.nn.dot_product_attention)), all_attention("float32", 64)),
}


@pytest.mark.tier(
    "full",
    fast=(
        "matmul-sm_90",
        "matmul, 16 bits-sm_90",
        "matmul, gradients-sm_80",
        "matmul, shards-sm_80",
        "attention, gradients-sm_80",
    ),
)
@pytest.mark.parametrize("architecture", ["sm_90", "sm_80"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_product_is_left(name: str, architecture: str) -> None:
    program, args = PROGRAMS[name]
    with jax.enable_x64("float64" in name), bijax.lowering_for(architecture):
        if "float64" in name:
            args = (args[0], shaped(40, 24, dtype="float64"))
        lowered = jax.jit(lambda *args: program(*args)).trace(*args).lower(lowering_platforms=("cuda",))
    assert not products(lowered)


def test_a_product_of_plain_jax_is_seen() -> None:
    for f, args in ((jnp.matmul, MATRICES), (convolve, IMAGES)):
        assert products(jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)))

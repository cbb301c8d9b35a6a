"""Matmul: sizes at the edge, and bad input."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.ops import weight_gradient
from pallas_kernels.contract import MatmulContract, RowContract, matmul_contract
from tests.arrays import ones
from tests.tiers import full_only

X, W = ones((4, 6)), ones((6, 3))


@pytest.mark.tier(
    "full",
    fast=(
        "(0, 6)-(6, 3)-(0, 3)",
        "(4, 6)-(6, 0)-(4, 0)",
        "(2, 0, 6)-(6, 3)-(2, 0, 3)",
        "(2, 3, 5, 1)-(2, 3, 1, 1)-(2, 3, 5, 1)",
    ),
)
@pytest.mark.parametrize(
    ("x", "w", "shape"),
    [((0, 6), (6, 3), (0, 3)), ((4, 0), (0, 3), (4, 3)), ((4, 6), (6, 0), (4, 0)), ((6,), (6, 3), (3,)),
     ((2, 0, 6), (6, 3), (2, 0, 3)), ((2, 5, 6), (2, 6, 3), (2, 5, 3)), ((0, 5, 6), (0, 6, 3), (0, 5, 3)),
     ((2, 3, 5, 1), (2, 3, 1, 1), (2, 3, 5, 1))],
)  # fmt: skip
def test_edge_sizes(x: tuple[int, ...], w: tuple[int, ...], shape: tuple[int, ...]) -> None:
    y = bijax.matmul(jnp.ones(x), jnp.ones(w))
    assert y.shape == shape
    assert (np.asarray(y) == x[-1]).all()
    gradients = jax.grad(lambda x, w: bijax.matmul(x, w).sum(), argnums=(0, 1))(jnp.ones(x), jnp.ones(w))
    assert [g.shape for g in gradients] == [x, w]


def test_an_empty_sum_over_k_is_the_bias() -> None:
    y = bijax.matmul(jnp.ones((2, 0)), jnp.ones((0, 3)), bias=jnp.array([1.0, 2.0, 3.0]))
    assert y.tolist() == [[1, 2, 3]] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", full_only("float16")])
def test_result_dtypes(dtype: str) -> None:
    x, w = X.astype(dtype), W.astype(dtype)
    assert bijax.matmul(x, w).dtype == dtype
    assert bijax.matmul(x, w, preferred_element_type=jnp.float32).dtype == jnp.float32
    assert [g.dtype for g in jax.grad(lambda x, w: bijax.matmul(x, w).sum(), (0, 1))(x, w)] == [dtype, dtype]


BAD: list[tuple[type[Exception], str, Any]] = [
    (TypeError, "x must have one of the dtypes.*int32", lambda: bijax.matmul(X.astype(int), W)),
    (TypeError, "complex64", lambda: bijax.matmul(X.astype(complex), W)),
    (TypeError, "x must be an array.*got str", lambda: bijax.matmul("rows", W)),
    (TypeError, r"share one dtype.*float32\[4,6\].*bfloat16\[6,3\]", lambda: bijax.matmul(X, W.astype(jnp.bfloat16))),
    (TypeError, "preferred_element_type.*int8", lambda: bijax.matmul(X, W, preferred_element_type=jnp.int8)),
    (ValueError, r"K=3.*transpose_w=True", lambda: bijax.matmul(X, W.T)),
    (ValueError, r"at least 1 and w at least 2 dimensions.*float32\[\]", lambda: bijax.matmul(jnp.float32(1), W)),
    (ValueError, "at least 2", lambda: bijax.matmul(X, W[:, 0])),
    (ValueError, "leading dimensions", lambda: bijax.matmul(X, W[None])),
    (ValueError, r"bias must have the shape \(3,\)", lambda: bijax.matmul(X, W, bias=jnp.ones(4))),
    (ValueError, "precision.*'quick'", lambda: bijax.matmul(X, W, precision="quick")),
    (ValueError, "same rows", lambda: weight_gradient(X, jnp.ones((5, 3)))),
    (ValueError, r"shape \(6, 3\)", lambda: weight_gradient(X, jnp.ones((4, 3)), accumulate=jnp.ones((3, 6)))),
    (TypeError, "float32", lambda: weight_gradient(X, jnp.ones((4, 3)), accumulate=jnp.ones((6, 3), jnp.bfloat16))),
    (ValueError, "K must not be negative", lambda: matmul_contract(-1, transpose_w=False)),
    (ValueError, "k_block", lambda: MatmulContract(0)),
    (ValueError, "power of two", lambda: RowContract(96)),
    (
        TypeError,
        r"bijax\.invariant\(jnp\.matmul\) instead of bijax\.matmul",
        lambda: jax.jvp(lambda x: bijax.matmul(x, W), (X,), (X,)),
    ),
]


@pytest.mark.parametrize(("error", "message", "call"), BAD, ids=[m[:24] for _, m, _ in BAD])
def test_bad_input(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=message):
        call()


def test_an_unknown_platform_is_refused() -> None:
    traced = jax.jit(bijax.matmul).trace(X, W)
    with pytest.raises(NotImplementedError, match="bijax_matmul"):
        traced.lower(lowering_platforms=("tpu",))

"""Wrong arguments of the operations on experts: errors that name the argument."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from tests.arrays import on_device

X, ROW, COLUMN, WEIGHTS = (on_device(np.ones(shape, np.float32)) for shape in ((4, 6), 4, (3, 5), (2, 2)))
Q, W = (on_device(np.ones(shape, np.int8)) for shape in ((4, 6), (3, 6, 5)))
S, OFFSET = jnp.asarray(np.zeros((4, 2), np.int32)), on_device(np.arange(4, dtype=np.int32))


def scatter(*args: Any, **options: Any) -> Any:
    return bijax.moe_scatter(*(args or (X, S)), **{"expert_end_idx": 2, **options})


def quantised(*args: Any, **options: Any) -> Any:
    return bijax.moe_scatter_dynamic_quant(*(args or (X, S)), **{"expert_end_idx": 2, **options})


def group(count: Any = (1, 2, 1), x: Any = Q, w: Any = W, row: Any = ROW, column: Any = COLUMN) -> Any:
    return bijax.moe_quant_group_gemm(x, row, w, column, jnp.asarray(count))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scatter(X, S[:2]), r"shapes \(T, C\) and \(T, topk\), got float32\[4,6\] and int32\[2,2\]"),
        (lambda: scatter(expert_start_idx=3), r"0 <= expert_start_idx <= expert_end_idx < 2\*\*31, got 3 and 2"),
        (lambda: scatter(expert_start_idx=-1), r"got -1 and 2"),
        (lambda: scatter(allocated_tokens=7), r"allocated_tokens must be at least 8, .* experts \[0, 2\), got 7"),
        (lambda: scatter(expert_end_idx=2**70), r"got 0 and 1180591620717411303424"),
        (lambda: scatter(allocated_tokens=-1), r"allocated_tokens must be at least 0 and below 2\*\*31, got -1"),
        (lambda: scatter(allocated_tokens=2**70), r"at least 0 and below 2\*\*31, got 1180591620717411303424"),
        (lambda: scatter(num_shared_experts_per_rank=-1), r"num_shared_experts_per_rank must be at least 0.*got -1"),
        (lambda: scatter(num_tokens_offset=3, num_tokens_per_rank=2), r"lie in \[0, 4\), got 0 shared .* \[3, 5\)"),
        (lambda: quantised(X, S, X), r"smooth_scale must have the shape \(2, 6\), got float32\[4,6\]"),
        (lambda: group(x=Q[0]), r"scatter_tokens must have the shape \(A, K\), got int8\[6\]"),
        (lambda: group(w=W[:, :3]), r"experts_weight must have the shape \(E, K, N\) with K=6, got int8\[3,3,5\]"),
        (lambda: group(row=ROW[:2]), r"per_token_scale must have the shape \(A,\) with A=4, got float32\[2\]"),
        (lambda: group(column=COLUMN[:2]), r"experts_scale must have the shape \(E, N\) with E=3, N=5"),
        (lambda: group((1, 2)), r"experts_token_count must have the shape \(E,\) with E=3, got int32\[2\]"),
        (lambda: group((1, 2, 2)), r"experts_token_count must add up to at most the 4 rows, got 5"),
        (lambda: group((1, -1, 0)), r"experts_token_count must be in \[0, 4\].*got -1 at \(1,\)"),
        (lambda: bijax.group_matmul(X, COLUMN, [1]), r"w must have the shape \(G, K, N\) with K=6, got float32\[3,5\]"),
        (lambda: bijax.group_matmul(X, W * 1.0, [9, 0, 0]), r"group_sizes must be in \[0, 4\]"),
        (lambda: bijax.group_matmul(X, W * 1.0, [1, 1, 1], precision="none"), r"precision must be one that"),
        (lambda: bijax.swiglu(jnp.ones((2, 3))), r"x must have rows of even length .*got float32\[2,3\]"),
        (lambda: bijax.moe_swiglu_dynamic_quant(X[:, :3], None, [1]), r"scatter_tokens must have rows of even length"),
        (lambda: bijax.moe_swiglu_dynamic_quant(X, X, [1]), r"smooth_scale must have the shape \(1, 3\)"),
        (
            lambda: bijax.moe_swiglu_dynamic_quant(X, None, [1], num_shared_experts_per_rank=2, num_tokens_per_rank=3),
            r"at least num_shared_experts_per_rank \* num_tokens_per_rank = 6 rows, got float32\[4,6\]",
        ),
        (lambda: bijax.moe_gather(X, OFFSET + 1, WEIGHTS), r"token_offset must be in \[-1, 3\].*got 4 at \(3,\)"),
        (lambda: bijax.moe_gather(X, OFFSET // 2, WEIGHTS), r"each place to one row, got 0 for 2 rows"),
        (lambda: bijax.moe_gather(X, OFFSET[:3], WEIGHTS), r"0 rows of shared experts and one for each token_offset"),
        (lambda: bijax.moe_gather(X[0], OFFSET, WEIGHTS), r"scatter_tokens must have the shape \(rows, C\)"),
        (lambda: bijax.moe_gather(X, OFFSET, ROW), r"expert_weights must have the shape \(T, topk\), got float32\[4\]"),
    ],
)
def test_wrong_values(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scatter(X, X), r"selected_experts must hold integers, got float32\[4,6\]"),
        (lambda: scatter(S, S), r"hidden_states must have one of the dtypes"),
        (lambda: scatter(expert_end_idx=2.0), r"expert_end_idx must be an integer"),
        (lambda: quantised(X, S, Q), r"smooth_scale must have one of the dtypes"),
        (lambda: group(x=X), r"scatter_tokens must have the dtype int8 or float8_e4m3fn, got float32\[4,6\]"),
        (lambda: group((1.0, 2.0, 3.0)), r"experts_token_count must hold integers"),
        (lambda: bijax.group_matmul(X, W, [1, 1, 1]), r"w must have one of the dtypes"),
        (lambda: bijax.moe_gather(X, OFFSET * 1.0, WEIGHTS), r"token_offset must hold integers"),
        (lambda: bijax.swiglu(S), r"x must have one of the dtypes"),
    ],
)
def test_wrong_types(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_quantised_operations_have_no_gradient() -> None:
    for name, loss in {
        "moe_scatter_dynamic_quant": lambda x: quantised(x, S)[1].sum(),
        "moe_quant_group_gemm": lambda x: group(row=x[:, 0]).sum().astype(jnp.float32),
        "moe_swiglu_dynamic_quant": lambda x: bijax.moe_swiglu_dynamic_quant(x, None, [4])[1].sum(),
    }.items():
        with pytest.raises(bijax.UnsupportedError, match=rf"bijax\.{name} has no gradient"):
            jax.grad(loss)(X)

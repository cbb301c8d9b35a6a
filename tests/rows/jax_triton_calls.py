"""Calls of the row kernels through jax-triton, of shapes alone."""

import importlib.util
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import PTX_FUNCTIONS, QuantizeContract, chunk_contract, row_contract
from pallas_kernels.target import Target

if importlib.util.find_spec("triton"):
    from pallas_kernels.cross_entropy.jax_triton import launch as cross_entropy
    from pallas_kernels.norm.jax_triton import launch as norm
    from pallas_kernels.quantize.jax_triton import launch as quantize
    from pallas_kernels.rows.jax_triton import launch as rows
    from pallas_kernels.softmax.jax_triton import launch as softmax

CONTRACT: Final = row_contract()

Calls = dict[str, tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]]


def calls(target: Target, columns: int, dtype: str, m: int = 300) -> Calls:
    """Returns a function and its arrays, (m, columns) and what goes with them, for each kernel by its name."""
    x, w = jax.ShapeDtypeStruct((m, columns), dtype), jax.ShapeDtypeStruct((columns,), dtype)
    n, label = jax.ShapeDtypeStruct((m, 1), "float32"), jax.ShapeDtypeStruct((m, 1), "int32")
    total = jax.ShapeDtypeStruct((columns,), "float32")
    both: dict[str, Any] = {"contract": CONTRACT, "target": target}
    chunks: dict[str, Any] = {"contract": chunk_contract(), "target": target}
    int8, eight = QuantizeContract(), QuantizeContract("float8_e4m3fn")
    swiglu: dict[str, Any] = {"contract": int8, "functions": PTX_FUNCTIONS, "target": target}
    return {
        "rms_norm": (lambda x, w: norm.rms_norm(x, w, x, eps=1e-6, **both), (x, w)),
        "rms_norm_gradient": (lambda x, n, w: norm.rms_norm_gradient(x, n, x, w, x, **both), (x, n, w)),
        "layer_norm": (lambda x, w: norm.layer_norm(x, w, w, eps=1e-6, **both), (x, w)),
        "layer_norm_gradient": (lambda x, n, w: norm.layer_norm_gradient(x, n, n, x, w, **both), (x, n, w)),
        "norm_weight_gradient": (lambda x, n: norm.weight_gradient(x, n, x, n, **chunks), (x, n)),
        "sum_axis": (lambda x: rows.sum_axis(x[:, :, None], mean=True, **both), (x,)),
        "variance": (lambda x: rows.variance(x[:, :, None], ddof=0, **both), (x,)),
        "sum_rows": (lambda x, total: rows.sum_rows(x, accumulate=total, **chunks), (x, total)),
        "softmax": (lambda x: softmax.softmax(x, **both), (x,)),
        "softmax_gradient": (lambda x: softmax.softmax_gradient(x, x, **both), (x,)),
        "log_softmax": (lambda x: softmax.log_softmax(x, **both), (x,)),
        "log_softmax_gradient": (lambda x, n: softmax.log_softmax_gradient(x, n, n, x, **both), (x, n)),
        "logsumexp": (lambda x: softmax.logsumexp(x, **both), (x,)),
        "logsumexp_gradient": (lambda x, n: softmax.logsumexp_gradient(x, n, n, n, target=target), (x, n)),
        "cross_entropy": (lambda x, i: cross_entropy.cross_entropy(x, i, z_loss=0.01, **both), (x, label)),
        "cross_entropy_gradient": (
            lambda x, i, n: cross_entropy.cross_entropy_gradient(x, i, n, n, n, z_loss=0.01, target=target),
            (x, label, n),
        ),
        "quantize": (
            lambda x, w, i: quantize.quantize(x, jnp.stack([w, w]), i, i, contract=eight, target=target),
            (x, w, label),
        ),
        "quantize_swiglu": (lambda x, w: quantize.quantize_swiglu(jnp.concatenate([x, x], 1), w, **swiglu), (x, w)),
        "quantize_norm": (
            lambda x, w: quantize.quantize_norm(x, w, w, x, eps=1e-6, quantize=int8, **both),
            (x, w),
        ),
    }

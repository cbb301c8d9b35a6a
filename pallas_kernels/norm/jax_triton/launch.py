"""Norms of rows and their gradients on NVIDIA GPUs from Ampere on, by Triton kernels with the bits of `portable`."""

from typing import Any

import jax

from pallas_kernels.contract import ChunkContract, RowContract, honour, row_contract
from pallas_kernels.norm.jax_triton.kernels import (
    layer_norm_gradient_kernel,
    layer_norm_kernel,
    rms_norm_gradient_kernel,
    rms_norm_kernel,
    weight_gradient_kernel,
)
from pallas_kernels.norm.jax_triton.parts import (
    deviations_kernel,
    layer_norm_of_sums_kernel,
    rms_norm_gradient_of_sum_kernel,
    rms_norm_of_sum_kernel,
    rms_norm_products_kernel,
    squares_kernel,
    sums_kernel,
)
from pallas_kernels.parts.jax_triton.chunk_launch import chunks_served, sum_chunks
from pallas_kernels.parts.jax_triton.row_launch import (
    NEEDS,
    groups_of_each,
    launch_parts,
    launch_rows,
    like,
    number_of_each,
    rows_served,
    schedule_if_parts,
)
from pallas_kernels.parts.served import served_if
from pallas_kernels.schedule.jax_triton.batch_sum import ChunkSchedule
from pallas_kernels.schedule.jax_triton.rows import RowSchedule
from pallas_kernels.target import Target

Arrays = tuple[jax.Array, ...]


@served_if(lambda x, weight=None, residual=None, **_: rows_served(x, weight, residual), NEEDS)
def rms_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    residual: jax.Array | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    dtype: str | None = None,
    contract: RowContract,
    target: Target,
    schedule: RowSchedule | None = None,
) -> Arrays:
    """Bit-identical to `portable.rms_norm`.

    Guarantee: row-invariant.
    """
    honour("rms_norm", contract, row_contract())
    row, number = like(x), number_of_each(x)
    total = number if residual is None else row  # not written without a residual
    options: dict[str, Any] = {
        "EPS": float(eps),
        "OFFSET": float(offset),
        "HAS_WEIGHT": weight is not None,
        "HAS_RESIDUAL": residual is not None,
    }
    result = row if dtype is None else jax.ShapeDtypeStruct(x.shape, dtype)
    out = [result, number, total]
    if (parts := schedule_if_parts(x, schedule)) is not None:
        has_residual, groups = residual is not None, [groups_of_each(x)]
        (sums,) = launch_parts(squares_kernel, x, [residual], groups, target, parts, HAS_RESIDUAL=has_residual)
        found = launch_parts(rms_norm_of_sum_kernel, x, [weight, residual, sums], out, target, parts, **options)
    else:
        found = launch_rows(rms_norm_kernel, x, [weight, residual], out, target, schedule, **options)
    return found[:2] if residual is None else found


@served_if(lambda h, factor, g, weight=None, g_sum=None, **_: rows_served(h, g, weight, g_sum), NEEDS)
def rms_norm_gradient(
    h: jax.Array,
    factor: jax.Array,
    g: jax.Array,
    weight: jax.Array | None = None,
    g_sum: jax.Array | None = None,
    *,
    offset: float = 0.0,
    contract: RowContract,
    target: Target,
    schedule: RowSchedule | None = None,
) -> Arrays:
    """Bit-identical to `portable.rms_norm_gradient`.

    Guarantee: row-invariant.
    """
    honour("rms_norm_gradient", contract, row_contract())
    out = [like(h)]
    of_weight: dict[str, Any] = {"OFFSET": float(offset), "HAS_WEIGHT": weight is not None}
    options, others = of_weight | {"HAS_SUM": g_sum is not None}, [factor, g, weight, g_sum]
    if (parts := schedule_if_parts(h, schedule)) is not None:
        groups = [groups_of_each(h)]
        (sums,) = launch_parts(rms_norm_products_kernel, h, others[:3], groups, target, parts, **of_weight)
        return launch_parts(rms_norm_gradient_of_sum_kernel, h, [*others, sums], out, target, parts, **options)
    return launch_rows(rms_norm_gradient_kernel, h, others, out, target, schedule, **options)


@served_if(lambda x, weight=None, bias=None, **_: rows_served(x, weight, bias), NEEDS)
def layer_norm(
    x: jax.Array,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float,
    contract: RowContract,
    target: Target,
    schedule: RowSchedule | None = None,
) -> Arrays:
    """Bit-identical to `portable.layer_norm`.

    Guarantee: row-invariant.
    """
    honour("layer_norm", contract, row_contract())
    out = [like(x), number_of_each(x), number_of_each(x)]
    options: dict[str, Any] = {"EPS": float(eps), "HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
    if (parts := schedule_if_parts(x, schedule)) is not None:
        groups = [groups_of_each(x)]
        (sums,) = launch_parts(sums_kernel, x, [], groups, target, parts)
        (squares,) = launch_parts(deviations_kernel, x, [sums], groups, target, parts)
        others = [weight, bias, sums, squares]
        return launch_parts(layer_norm_of_sums_kernel, x, others, out, target, parts, **options)
    return launch_rows(layer_norm_kernel, x, [weight, bias], out, target, schedule, sums=2, **options)


@served_if(lambda x, mean, factor, g, weight=None, **_: rows_served(x, g, weight), NEEDS)
def layer_norm_gradient(
    x: jax.Array,
    mean: jax.Array,
    factor: jax.Array,
    g: jax.Array,
    weight: jax.Array | None = None,
    *,
    contract: RowContract,
    target: Target,
    schedule: RowSchedule | None = None,
) -> Arrays:
    """Bit-identical to `portable.layer_norm_gradient`.

    Guarantee: row-invariant.
    """
    honour("layer_norm_gradient", contract, row_contract())
    out = [like(x)]
    options: dict[str, Any] = {"HAS_WEIGHT": weight is not None}
    return launch_rows(layer_norm_gradient_kernel, x, [mean, factor, g, weight], out, target, schedule, **options)


@served_if(
    lambda h, factor, g, *_, contract, **__: rows_served(h, g) and chunks_served(contract),
    f"{NEEDS}, in chunks of 128 rows",
)
def weight_gradient(
    h: jax.Array,
    factor: jax.Array,
    g: jax.Array,
    mean: jax.Array | None = None,
    *,
    contract: ChunkContract,
    dtype: str = "float32",
    target: Target,
    schedule: ChunkSchedule | None = None,
) -> jax.Array:
    """Bit-identical to `portable.weight_gradient`.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows.
    """
    honour("norm_weight_gradient", contract, ChunkContract())
    others = [factor, g, mean]
    options = {"HAS_MEAN": mean is not None}
    return sum_chunks(weight_gradient_kernel, h, others, None, target, schedule, **options).astype(dtype)

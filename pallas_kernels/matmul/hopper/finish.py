"""The end of a split-K matmul as a separate kernel: the tree over the partial sums, then the epilogue.

It uses the same element-wise code as `hopper.epilogue` inside the product's kernel, so the bits are the same whether a
partial sum goes through memory or stays in registers.
"""

from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import add_as_tree
from pallas_kernels.matmul.hopper.epilogue import Epilogue
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.in_32_bits import in_32_bits

_THREADS: Final = 128
_PARTS: Final = (512, 256, 128)  # columns of a block, a multiple of its threads


@in_32_bits
def finish(partials: jax.Array, epilogue: Epilogue, *, out_dtype: Any, interpret: Any) -> jax.Array:
    """Adds the partial sums as a tree and applies the epilogue.

    Args:
        partials: (S, M, N) float32, no size 0. Copied if N is not a multiple of 128.
        epilogue: Bias of at most N elements, activation, and residual (M, N) of `out_dtype`; `up` is not used here.
        out_dtype: Dtype of the result.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.

    Returns:
        (M, N) of `out_dtype`.
    """
    splits, m, n = partials.shape
    if n % _PARTS[-1]:
        wide = n + -n % _PARTS[-1]
        epilogue = epilogue.map(lambda a: _pad(a, wide))
        return finish(_pad(partials, wide), epilogue, out_dtype=out_dtype, interpret=interpret)[:, :n]
    epilogue = epilogue.padded(n)
    columns = next(c for c in _PARTS if n % c == 0)
    parts = n // columns
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=columns // _THREADS)

    def kernel(partials_ref: Any, end: Epilogue, out_ref: Any) -> None:
        index = lax.axis_index("part")
        row, part = lax.div(index, parts), pl.ds(lax.rem(index, parts) * columns, columns)

        def load(ref: Any) -> Any:
            return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

        total = add_as_tree(lambda k_split: load(partials_ref.at[k_split, row, part]), splits)
        bias = None if end.bias is None else load(end.bias.at[part])
        total = end.before_residual((total,), bias, layout, interpret)
        if end.residual is not None:
            total += load(end.residual.at[row, part])
        out_ref[row, part] = total.astype(out_dtype)

    out = jax.ShapeDtypeStruct((m, n), out_dtype)
    return launch("matmul_finish", kernel, out, {"part": m * parts}, interpret=interpret)(partials, epilogue)


def _pad(a: jax.Array, columns: int) -> jax.Array:
    """Returns `a` with its columns zero-padded to `columns`."""
    return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, columns - a.shape[-1])])

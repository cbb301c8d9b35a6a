"""Rotates queries and keys and stores keys and values on NVIDIA GPUs, in one pass over the QKV projection."""

from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.contract import XLA_FUNCTIONS, ElementwiseContract, honour
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.parts.served import served_if
from pallas_kernels.parts.xla.tiles import next_power_of_two
from pallas_kernels.rotary.jax_triton.kernels import rotate_and_store_kernel
from pallas_kernels.rotary.schedule.jax_triton import token_warps
from pallas_kernels.target import Target

_DTYPES: Final = ("float32", "bfloat16", "float16")
_WIDEST: Final = 256
_MOST_COLUMNS: Final = 1 << 14  # query columns of a token that 16 warps can hold


def _serves(heads: Any, cos: Any, sin: Any, rows: Any, keys: Any, values: Any, *to_rotate: Any, **_: Any) -> bool:
    tokens, number, width = heads.shape
    same = {x.dtype.name for x in (heads, keys, values, *to_rotate)}
    tables = cos.dtype == sin.dtype == jnp.float32
    queries = (number - 2 * keys.shape[1]) * width
    wide = width % 16 == 0 and 0 < width <= _WIDEST and 0 < queries <= _MOST_COLUMNS
    there = tokens > 0 and keys.size > 0
    return bool(len(same) == 1 and same < set(_DTYPES) and tables and wide and there)


@served_if(
    _serves,
    f"heads and caches of one dtype of {', '.join(_DTYPES)}, float32 tables, and heads whose width is a multiple of 16"
    f" up to {_WIDEST}",
)
@in_32_bits
def rotate_and_store(
    heads: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    rows: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    to_rotate: jax.Array | None = None,
    *,
    target: Target,
    groups: int = 1,
    functions: ElementwiseContract = XLA_FUNCTIONS,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Bit-identical to `portable.rotate_and_store`. The caches are updated in place where XLA allows it.

    Guarantee: row-invariant.
    """
    honour("rotate_and_store", functions, XLA_FUNCTIONS)
    tokens, number, width = heads.shape
    key_heads = keys.shape[1]
    query_heads = number - 2 * key_heads
    source = heads if to_rotate is None else to_rotate
    query, keys, values = launch(
        rotate_and_store_kernel,
        *(heads, cos, sin, rows, source, keys, values),
        keys.shape[0],
        target=target,
        out=[jax.ShapeDtypeStruct(x, heads.dtype) for x in ((tokens, query_heads, width), keys.shape, values.shape)],
        aliases={5: 1, 6: 2},
        grid=(tokens,),
        warps=token_warps(next_power_of_two(query_heads * width // 2)),
        stages=1,
        fuses=False,
        constants={
            "QUERY_HEADS": query_heads,
            "KEY_HEADS": key_heads,
            "GROUPS": groups,
            "OF_SOURCE": groups if to_rotate is None else 1,
            "WIDTH": width,
            "OF_QUERIES": next_power_of_two(query_heads * width // 2),
            "OF_KEYS": next_power_of_two(key_heads * width // 2),
            "OF_VALUES": next_power_of_two(key_heads * width),
            "SOURCE_COLUMNS": source.shape[1] * width,
        },
    )
    return query, keys, values

"""Rotates queries and keys and stores keys and values on an NVIDIA GPU, in one pass over the QKV projection."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.contract import XLA_FUNCTIONS, ElementwiseContract, honour
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.pallas_triton.arithmetic import product
from pallas_kernels.parts.pallas_triton.launch import launch
from pallas_kernels.parts.served import served_if
from pallas_kernels.rotary.schedule.pallas_triton import token_warps

_DTYPES: Final = ("float32", "bfloat16", "float16")
_WIDEST: Final = 256
_MOST_COLUMNS: Final = 1 << 14  # query columns of a token that 16 warps can hold


def _serves(heads: Any, cos: Any, sin: Any, rows: Any, keys: Any, values: Any, *to_rotate: Any, **_: Any) -> bool:
    tokens, number, width = heads.shape
    same = {x.dtype.name for x in (heads, keys, values, *to_rotate)}
    tables = cos.dtype == sin.dtype == jnp.float32
    queries = (number - 2 * keys.shape[1]) * width
    wide = width % 16 == 0 and 0 < width <= _WIDEST and 0 < queries <= _MOST_COLUMNS
    small = max(heads.size, keys.size) < 1 << 31
    there = tokens > 0 and keys.size > 0
    return bool(len(same) == 1 and same < set(_DTYPES) and tables and wide and small and there)


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
    functions: ElementwiseContract = XLA_FUNCTIONS,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Bit-identical to `portable.rotate_and_store`; `interpret` runs the kernel on a CPU.

    Each thread block handles one token. The caches are updated in place where XLA allows it.

    Guarantee: row-invariant.

    Example:
        >>> heads, tables = jnp.ones((1, 3, 16)), (jnp.zeros((1, 8)), jnp.ones((1, 8)))
        >>> caches = (jnp.zeros((2, 1, 16)), jnp.zeros((2, 1, 16)))
        >>> query, keys, _ = rotate_and_store(heads, *tables, jnp.array([1]), *caches, interpret=True)
        >>> query[0, 0, ::8].tolist(), keys[:, 0, 8].tolist()
        ([-1.0, 1.0], [0.0, 1.0])
    """
    honour("rotate_and_store", functions, XLA_FUNCTIONS)
    tokens, number, width = heads.shape
    stored, key_heads, _ = keys.shape
    query_heads, half = number - 2 * key_heads, width // 2
    flat = [x.reshape(x.shape[0], x.shape[1] * width) for x in (heads, keys, values)]
    source = flat[0] if to_rotate is None else to_rotate.reshape(tokens, (query_heads + key_heads) * width)

    def rotate_and_store_kernel(heads: Any, cos: Any, sin: Any, rows: Any, *rest: Any) -> None:
        *given, _, _, query, keys, values = rest
        source, token = [*given, heads][0], pl.program_id(0)
        row = rows[token]
        inside = (row >= 0) & (row < stored)
        row = jnp.where(inside, row, 0)

        def rotated(first: int, number: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            """Returns both rotated halves of some heads, their offsets within these heads, and the valid offsets."""
            pair = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(number * half),), 0)
            there = pair < number * half
            # Unlike // and %, truncating division lets Triton see that the accesses are contiguous.
            head, angle = lax.div(pair, half), lax.rem(pair, half)
            place = head * width + angle
            low, high = (
                plt.load(source.at[token, first * width + place + at], mask=there).astype(jnp.float32)
                for at in (0, half)
            )
            c, s = (plt.load(table.at[token, angle], mask=there) for table in (cos, sin))
            return (
                product(low, c, interpret) - product(high, s, interpret),
                product(high, c, interpret) + product(low, s, interpret),
                place,
                there,
            )

        # Issue all loads of a token before the first store.
        column = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(key_heads * width),), 0)
        copied = plt.load(heads.at[token, (query_heads + key_heads) * width + column], mask=column < key_heads * width)
        of_queries, of_keys = rotated(0, query_heads), rotated(query_heads, key_heads)
        for out, to, (*halves, place, there) in ((query, token, of_queries), (keys, row, of_keys)):
            mask = there if out is query else there & inside
            for half_of, at in zip(halves, (0, half), strict=True):
                plt.store(out.at[to, place + at], half_of.astype(out.dtype), mask=mask)
        plt.store(values.at[row, column], copied, mask=(column < key_heads * width) & inside)

    given = [] if to_rotate is None else [source]
    query, *caches = launch(
        rotate_and_store_kernel,
        flat[0],
        cos,
        sin,
        rows,
        *given,
        *flat[1:],
        blocks=tokens,
        out=[jax.ShapeDtypeStruct((tokens, query_heads * width), heads.dtype)]
        + [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat[1:]],
        aliases={4 + len(given): 1, 5 + len(given): 2},
        warps=token_warps(pl.next_power_of_2(query_heads * half)),
        stages=1,
        interpret=interpret,
    )
    keys, values = (x.reshape(keys.shape) for x in caches)
    return query.reshape(tokens, query_heads, width), keys, values

"""Products of float8_e4m3fn matrices in float32, by the bfloat16 kernels."""

from typing import Final

import jax
import jax.numpy as jnp
from jax import lax

from bijax.ops.matmul.product import matmul
from pallas_kernels.contract import Float8Contract
from pallas_kernels.parts.xla.tiles import isolate

CONTRACT: Final = Float8Contract()


def float8_product(x: jax.Array, w: jax.Array, transpose_x: bool = False, transpose_w: bool = False) -> jax.Array:
    """Multiplies (M, K) by (K, N), each possibly stored the other way round, to sums in float32.

    Blocks of `CONTRACT.block` elements of K are summed by `bijax.matmul` of bfloat16, which represents every float8
    number; the block sums are added in ascending order.
    """
    block = CONTRACT.block
    x, w = x.T if transpose_x else x, w.T if transpose_w else w
    count = -(-x.shape[1] // block)
    padding = count * block - x.shape[1]
    x, w = jnp.pad(x, ((0, 0), (0, padding))), jnp.pad(w, ((0, padding), (0, 0)))

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        columns = lax.dynamic_slice_in_dim(x, i * block, block, axis=1).astype(jnp.bfloat16)
        rows = lax.dynamic_slice_in_dim(w, i * block, block, axis=0).astype(jnp.bfloat16)
        return isolate(total + matmul(columns, rows, preferred_element_type=jnp.float32))[0]

    return lax.fori_loop(jnp.int32(0), jnp.int32(count), add, jnp.zeros((x.shape[0], w.shape[1]), jnp.float32))

"""The largest numbers of rows on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.parts.xla.tiles import isolate
from pallas_kernels.topk.order import numbers_at


def largest(x: jax.Array, *, number: int) -> tuple[jax.Array, jax.Array]:
    """Equal to `portable.largest`.

    Guarantee: row-invariant: nothing is rounded.
    """
    # XLA compares float32 in a total order, so equal numbers are mapped to the same bits; a comparison with 0 would
    # treat subnormal numbers as zeros.
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    bits = jnp.where(bits == np.int32(-(2**31)), jnp.int32(0), bits)
    one_form = lax.bitcast_convert_type(jnp.where(x != x, np.int32(0x7FC00000), bits), jnp.float32)
    (one_form,) = isolate(one_form)
    (places,) = isolate(lax.top_k(one_form, number)[1])
    return places, numbers_at(x, places)

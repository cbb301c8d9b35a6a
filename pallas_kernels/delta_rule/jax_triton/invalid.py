"""Outputs of invalid sequences become nan, in place: programs of other sequences end at once."""

from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule.jax_triton.invalid_kernel import invalid_kernel
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.parts.served import served_if
from pallas_kernels.target import Target

_DTYPES: Final = frozenset({"float32", "bfloat16", "float16"})
_PIECE: Final = 4096
_PIECES: Final = 8
_WARPS: Final = 4
_MOST_OF_GRID: Final = 65535


def _serves(y: Any, invalid: Any, **_: Any) -> bool:
    served = y.dtype.name in _DTYPES and y.size > 0 and y.shape[0] <= _MOST_OF_GRID
    return bool(served and y.size // y.shape[0] < 1 << 30)


@served_if(_serves, "sequences of float32, bfloat16 or float16")
@in_32_bits
def nan_if_invalid(y: jax.Array, invalid: jax.Array, *, target: Target) -> tuple[jax.Array]:
    """Equal to `jnp.where`; the array is changed in place.

    Guarantee: row-invariant: nothing is computed.
    """
    size = y.size // y.shape[0]
    (out,) = launch(
        invalid_kernel,
        *(y, invalid.astype(jnp.int32)),
        target=target,
        out=[jax.ShapeDtypeStruct(y.shape, y.dtype)],
        grid=(-(-size // (_PIECE * _PIECES)), y.shape[0]),
        warps=_WARPS,
        stages=1,
        fuses=False,
        constants={"SIZE": size, "PIECE": _PIECE, "PIECES": _PIECES},
        aliases={0: 0},
    )
    return (out,)

"""The arrays of a launch by their names, and what is fixed about it."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.call import AttentionCall, Limits
from pallas_kernels.attention.mask_bounds import MaskBounds, mask_bounds
from pallas_kernels.attention.pallas_triton._scores import score_arrays
from pallas_kernels.attention.pallas_triton._tile import Launch, Refs
from pallas_kernels.contract import MmaAttentionContract, eight_bit_contract
from pallas_kernels.errors import UnsupportedError

_WIDTH: Final = 16  # the narrowest piece of a head
_WIDEST: Final = 576  # for more, neither the shared memory nor the registers of a block suffice


def check(call: AttentionCall, contract: MmaAttentionContract) -> None:
    """Checks what the kernels are given.

    Raises:
        UnsupportedError: If the contract is of another kind, or the head too wide.
    """
    if not isinstance(contract, MmaAttentionContract) or contract.version != 1:
        raise UnsupportedError(f"attention by Triton: expected an MmaAttentionContract of version 1, got {contract!r}.")
    if (size := widest(call)) > _WIDEST:
        raise UnsupportedError(f"attention by Triton: expected heads of at most {_WIDEST} elements, got {size}.")


def widest(call: AttentionCall) -> int:
    """Returns the width of a head, or that of the values if it is larger."""
    return max(call.query.shape[3], call.value_size)


def what_is_seen(call: AttentionCall, limits: Limits) -> MaskBounds:
    """Returns what each query sees, before any mask."""
    (offsets, queries, keys), length = limits, call.query.shape[1]
    indices = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (offsets.shape[0], length))
    within = jnp.minimum(queries, length), jnp.minimum(keys, call.capacity)
    return mask_bounds(offsets, *within, indices, causal=call.options.causal, window=call.options.window)


def arrays_of(call: AttentionCall, seen: MaskBounds, offsets: jax.Array) -> dict[str, jax.Array]:
    """Returns the arrays of a launch by their names in `Refs`, without those that the forward pass alone takes."""
    given = {"query": padded(call.query), "key": padded(call.key), "first": seen.first, "last": seen.last}
    if call.value is not None:
        given["value"] = padded(call.value)
    return given | score_arrays(call, offsets)


def quantised(given: dict[str, jax.Array], value_scale: jax.Array | None, value_size: int) -> dict[str, jax.Array]:
    """Returns 8-bit keys and values, and the factors of results, as kernels read them."""
    if value_scale is None:
        return {}
    factors = value_scale.astype(jnp.float32) * jnp.float32(1 / eight_bit_contract(given["key"].dtype.name).unit)
    whole = padded(factors) if value_scale.shape[2] > 1 else factors
    found = {"value_scale": jnp.broadcast_to(whole, (*whole.shape[:2], whole_pieces(value_size)))}
    return found | {n: lax.bitcast_convert_type(given[n], jnp.int8) for n in ("key", "value") if n in given}


def padded(x: jax.Array) -> jax.Array:
    """Returns heads (..., H) zero-padded, as wide as whole pieces."""
    missing = whole_pieces(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def whole_pieces(size: int) -> int:
    """Returns the width of a head of whole pieces."""
    return -(-size // _WIDTH) * _WIDTH


def launch_of(
    call: AttentionCall, given: dict[str, jax.Array], key_block: int, row_block: int, *, interpret: bool
) -> Launch:
    """Returns what is fixed about a launch with the given arrays."""
    query, key = given["query"], given["key"]
    heads = key.shape[2]
    return Launch(
        dtype=query.dtype.name,
        options=call.options,
        key_block=key_block,
        row_block=row_block,
        queries=query.shape[1],
        heads=heads,
        group=query.shape[2] // heads,
        size=query.shape[3],
        value_size=whole_pieces(call.value_size),
        capacity=call.capacity,
        page=None if call.page_table is None else key.shape[1],
        stored=None if call.value_scale is None else call.key.dtype.name,
        interpret=interpret,
    )


def refs_of(launch: Launch, given: dict[str, jax.Array], refs: list[Any]) -> Refs:
    """Returns the references that a kernel is given, by the names of their arrays."""
    named: dict[str, Any] = {"value": None, **dict(zip(given, refs, strict=True))}
    return Refs(limits=None, options=launch.options, **named)  # type: ignore[arg-type]

"""The arrays of a launch by their names, and what is fixed about it."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import MmaAttentionContract, eight_bit_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.ops.attention.sight import Sight, sight
from pallas_kernels.ops.attention.triton._tile import Call, Refs

_WIDTH: Final = 16  # the narrowest piece of a head
_WIDEST: Final = 512  # for more, neither the shared memory nor the registers of a block suffice


def check(contract: MmaAttentionContract, size: int) -> None:
    """Checks what the kernels are given.

    Raises:
        UnsupportedError: If the contract is of another kind, or the head too wide.
    """
    if not isinstance(contract, MmaAttentionContract):
        raise UnsupportedError(f"attention by Triton: expected an MmaAttentionContract, got {contract!r}.")
    if size > _WIDEST:
        raise UnsupportedError(f"attention by Triton: expected heads of at most {_WIDEST} elements, got {size}.")


def what_is_seen(
    length: int,
    capacity: int,
    offsets: jax.Array,
    query_lengths: jax.Array,
    key_lengths: jax.Array,
    causal: bool,
    window: tuple[int, int] | None,
) -> Sight:
    """Returns what each query sees, before any mask."""
    indices = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (offsets.shape[0], length))
    limits = jnp.minimum(query_lengths, length), jnp.minimum(key_lengths, capacity)
    return sight(offsets, *limits, indices, causal=causal, window=window)


def arrays_of(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seen: Sight,
    bias: jax.Array | None,
    mask: jax.Array | None,
    slopes: jax.Array | None,
    offsets: jax.Array,
) -> dict[str, jax.Array]:
    """Returns the arrays of a launch by their names in `Refs`."""
    query, key, value = (padded(x) for x in (query, key, value))
    given = {"query": query, "key": key, "value": value, "first": seen.first, "last": seen.last}
    if bias is not None:
        given["bias"] = bias
    if mask is not None:
        given["mask"] = mask.astype(jnp.int8)
    if slopes is not None:
        given |= {"slopes": slopes.astype(jnp.float32), "offsets": offsets}
    return given


def quantised(given: dict[str, jax.Array], value_scale: jax.Array | None) -> dict[str, jax.Array]:
    """Returns keys and values of 8 bits, and the factors of results, as kernels read them."""
    if value_scale is None:
        return {}
    factors = value_scale.astype(jnp.float32) * jnp.float32(1 / eight_bit_contract(given["value"].dtype.name).unit)
    whole = padded(factors) if value_scale.shape[2] > 1 else factors
    found = {"value_scale": jnp.broadcast_to(whole, (*whole.shape[:2], given["value"].shape[3]))}
    return found | {name: lax.bitcast_convert_type(given[name], jnp.int8) for name in ("key", "value")}


def padded(x: jax.Array) -> jax.Array:
    """Returns heads (..., H) with zeros behind, as wide as whole pieces."""
    missing = -x.shape[-1] % _WIDTH
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def call_of(
    given: dict[str, jax.Array],
    key_block: int,
    row_block: int,
    scale: float,
    soft_cap: float | None,
    capacity: int,
    interpret: bool,
    stored: str | None = None,
) -> Call:
    """Returns what is fixed about a launch with the given arrays."""
    query, key = given["query"], given["key"]
    heads = key.shape[2]
    return Call(
        dtype=query.dtype.name,
        scale=scale,
        key_block=key_block,
        row_block=row_block,
        queries=query.shape[1],
        heads=heads,
        group=query.shape[2] // heads,
        size=query.shape[3],
        value_size=given["value"].shape[3],
        capacity=capacity,
        page=key.shape[1] if "table" in given else None,
        bias=given["bias"].shape if "bias" in given else None,
        mask=given["mask"].shape if "mask" in given else None,
        soft_cap=soft_cap,
        stored=stored,
        interpret=interpret,
    )


def refs_of(given: dict[str, jax.Array], refs: list[Any]) -> Refs:
    """Returns the references that a kernel is given, by the names of their arrays."""
    return Refs(**dict(zip(given, refs, strict=True)))

"""From the arrays of a forward pass to its kernel."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.call import AttentionCall
from pallas_kernels.attention.eight_bits import scaled_queries
from pallas_kernels.attention.jax_triton._form import Form, Loop, form_of, whole_pieces
from pallas_kernels.attention.limits import marked, within
from pallas_kernels.attention.schedule.jax_triton import Tile, attention_tile, merge_tile
from pallas_kernels.contract import MmaAttentionContract, eight_bit_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.target import Target

_VERSION: Final = 3  # of the contract
_WIDEST: Final = 576  # for more, the shared memory and the registers of a program do not suffice
_WARPS_OF_SCORES: Final = 4
_SUMS_OF_BLOCK: Final = 8  # of the weights of a block, by columns


@in_32_bits
def attention(
    call: AttentionCall, *, contract: MmaAttentionContract, target: Target, tile: Tile | None = None
) -> tuple[jax.Array, ...]:
    """Attends to keys in a contiguous or a paged cache.

    Args:
        call: The call.
        contract: Order of all sums.
        target: The GPU.
        tile: The schedule; chosen by the width of a head and the number of rows by default.

    Returns:
        The outputs (B, T, N, V) of the query's dtype and the log-sum-exp (B, T, N) of the scores, float32. A query
        that sees no key gives zeros and -inf.

    Raises:
        UnsupportedError: If the contract is of another kind or version, or the head is wider than 576.

    Guarantee: row-invariant; a row is a query with the keys that it sees.
    """
    check(call, contract)
    rows, value_size = call.query.shape[:3], call.value_size
    if call.is_empty:
        return jnp.zeros((*rows, value_size), call.query.dtype), jnp.full(rows, -jnp.inf, jnp.float32)
    from pallas_kernels.attention.jax_triton.forward import forward_kernel

    call = prepared(call)
    form = form_of(call, contract)
    total = rows[1] * form.group
    if tile is None:
        tile = attention_tile(
            widest(call),
            call.query.dtype.itemsize,
            total,
            target.features,
            heads=rows[0] * form.heads,
            splits=-(-call.capacity // form.split),
            blocks=-(-call.capacity // form.key_block),
            stored_in_8_bits=form.stored is not None,
            latent=form.latent,
            plain=form.cap is None and form.bias is None and form.mask is None and form.slopes is None,
        )
    tiles = -(-total // tile.rows)
    results = [
        jax.ShapeDtypeStruct((*rows, form.value_size), call.query.dtype),
        jax.ShapeDtypeStruct(rows, jnp.float32),
    ]
    if tile.apart:
        out, lse = _of_splits(call, form, tile, target, tuple(results))
    else:
        grid = (rows[0] * form.heads * tiles,)
        several = call.capacity > form.split
        constants: dict[str, Any] = {
            "loop": Loop(tile.rows, tile.stages, splits=several, by_splits=tile.loops, together=tile.together),
        }
        if tile.held and several:
            results.append(_float32(*grid, tile.rows * form.value_size))
        else:
            constants["held"] = None
        out, lse, *_ = _launch(
            forward_kernel,
            call,
            tiles,
            tile=tile,
            form=form,
            target=target,
            out=results,
            grid=grid,
            constants=constants,
        )
    return out[..., :value_size], lse


def _of_splits(
    call: AttentionCall, form: Form, tile: Tile, target: Target, results: tuple[jax.ShapeDtypeStruct, ...]
) -> tuple[jax.Array, ...]:
    """Returns the results of a prepared call, whose splits have programs of their own."""
    from pallas_kernels.attention.jax_triton.splits import merge_kernel, split_kernel

    sequences, total = call.query.shape[0], call.query.shape[1] * form.group
    splits, rows = -(-call.capacity // form.split), (sequences, form.heads, total)
    parts = form.value_size // math.gcd(form.value_size, tile.columns) if tile.columns else 1
    if tile.columns:
        states = _by_columns(call, form, tile, target, parts)
    else:
        tiles = -(-total // tile.rows)
        out = [_float32(splits, *rows), _float32(splits, *rows), _float32(splits, *rows, form.value_size)]
        grid = (sequences * form.heads * tiles * splits,)
        states = _launch(split_kernel, call, tiles, splits, tile=tile, form=form, target=target, out=out, grid=grid)
    merging = merge_tile(total, form.value_size)
    tiles, slices = -(-total // merging.rows), form.value_size // merging.columns
    return _launch(
        merge_kernel,
        call,
        tiles,
        *states,
        tile=merging,
        form=replace(form, value_size=merging.columns),
        target=target,
        out=results,
        grid=(sequences * form.heads * tiles, slices),
        constants={"PARTS": parts, "SLICES": slices},
    )


def _by_columns(call: AttentionCall, form: Form, tile: Tile, target: Target, parts: int) -> tuple[jax.Array, ...]:
    """Returns the states after each split of a prepared call, by programs for columns of the values."""
    from pallas_kernels.attention.jax_triton.splits import column_kernel, score_kernel

    sequences, total = call.query.shape[0], call.query.shape[1] * form.group
    splits, blocks = (-(-call.capacity // size) for size in (form.split, form.key_block))
    tiles, rows = -(-total // tile.rows), (sequences, form.heads, total)
    programs, blocks_of_split = sequences * form.heads * tiles, form.span // form.key_block
    options: dict[str, Any] = {"target": target}
    (scored,) = _launch(
        score_kernel,
        call,
        tiles,
        blocks,
        tile=replace(tile, warps=_WARPS_OF_SCORES, stages=1),
        form=form,
        out=[_float32(*rows, blocks * form.key_block)],
        grid=(programs * blocks,),
        **options,
    )
    out = [
        _float32(splits, *rows),
        _float32(splits * parts, *rows),
        _float32(splits, *rows, form.value_size),
        jax.ShapeDtypeStruct((splits * parts, *rows, form.span), call.query.dtype),
        _float32(splits * parts, *rows, blocks_of_split),
        _float32(splits * parts, *rows, blocks_of_split * _SUMS_OF_BLOCK),
    ]
    states = _launch(
        column_kernel,
        call,
        tiles,
        splits,
        blocks,
        scored,
        tile=replace(tile, rows=min(tile.rows, 1 << (total - 1).bit_length())),
        form=replace(form, value_size=form.value_size // parts),
        out=out,
        grid=(programs * splits, parts),
        constants={"PARTS": parts},
        **options,
    )
    return states[:3]


def _launch(
    kernel: Any,
    call: AttentionCall,
    *arguments: jax.Array | int,
    tile: Tile,
    form: Form,
    target: Target,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    constants: dict[str, Any] | None = None,
) -> tuple[jax.Array, ...]:
    constants = {"loop": Loop(tile.rows, tile.stages), "form": form} | (constants or {})
    schedule: dict[str, Any] = {"warps": tile.warps, "stages": tile.stages, "fuses": False, "constants": constants}
    return launch(kernel, *operands(call), *arguments, target=target, out=out, grid=grid, **schedule)


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def check(call: AttentionCall, contract: MmaAttentionContract) -> None:
    """Checks what the kernels are given.

    Raises:
        UnsupportedError: If the contract is of another kind or version, or the head too wide.
    """
    if not isinstance(contract, MmaAttentionContract) or contract.version != _VERSION:
        raise UnsupportedError(
            f"attention by jax-triton: expected an MmaAttentionContract of version {_VERSION}, got {contract!r}."
        )
    if (size := widest(call)) > _WIDEST:
        raise UnsupportedError(f"attention by jax-triton: expected heads of at most {_WIDEST} elements, got {size}.")


def widest(call: AttentionCall) -> int:
    """Returns the width of a head, or that of the values if it is larger."""
    return max(call.query.shape[3], call.value_size)


def prepared(call: AttentionCall) -> AttentionCall:
    """Returns the call with arrays as kernels read them.

    Heads are as wide as whole pieces, queries have the scales of their keys, `value_scale` is in units of the contract
    and as wide as the values, and sequences with pages outside of the cache are marked in the limits.
    """
    limits = jnp.asarray(call.limits)
    if call.page_table is not None:
        call, valid = within(call)
        limits = jnp.asarray(marked(limits, valid))
    found: dict[str, Any] = {"limits": limits.astype(jnp.int32), "query": call.query}
    if call.page_table is not None:
        found["page_table"] = call.page_table.astype(jnp.int32)
    if call.key_scale is not None:
        found["query"] = scaled_queries(call.query, call.key_scale, call.key.dtype)
    if call.alibi_slopes is not None:
        found["alibi_slopes"] = call.alibi_slopes.astype(jnp.float32)
    if call.value_scale is not None:
        scale = call.value_scale.astype(jnp.float32) * jnp.float32(1 / eight_bit_contract(call.key.dtype.name).unit)
        scale = padded(scale) if scale.shape[2] > 1 else scale
        found["value_scale"] = jnp.broadcast_to(scale, (*scale.shape[:2], whole_pieces(call.value_size)))
    found["query"] = padded(found["query"])
    if call.value is not None:
        found["value"] = padded(call.value)
    return replace(call, key=padded(call.key), **found)


def operands(call: AttentionCall) -> tuple[jax.Array | int, ...]:
    """Returns the arrays and sizes of a launch in the order of `Arrays`; the keys again if they hold the values."""
    absent, value = call.limits, call.key if call.value is None else call.value
    optional = (call.page_table, call.alibi_slopes, call.sinks, call.value_scale, call.bias, call.mask)
    arrays = (call.query, *(as_stored(x) for x in (call.key, value)), call.limits, *optional)
    entries = 1 if call.page_table is None else call.page_table.shape[1]
    sizes = (call.query.shape[0], call.query.shape[1], call.capacity, entries)
    return (*(jnp.asarray(absent if x is None else x) for x in arrays), *sizes)


def as_stored(x: jax.Array) -> jax.Array:
    """Returns keys or values with 8-bit numbers as int8: not every GPU has instructions for 8-bit floats."""
    return lax.bitcast_convert_type(x, jnp.int8) if x.dtype.itemsize == 1 else x


def padded(x: jax.Array) -> jax.Array:
    """Returns heads (..., H) zero-padded, as wide as whole pieces."""
    missing = whole_pieces(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x

"""The launch of the kernels of attention's gradients."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper._gradient_steps import PARTS, Operands, Results
from pallas_kernels.attention.hopper._gradient_tiles import Tiles
from pallas_kernels.attention.hopper._setup import Lengths
from pallas_kernels.attention.hopper.gradients import Body
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.tile import ROWS


def gradients(
    given: Operands, lengths: Lengths, *, body: Body, scratch_types: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel.

    Args:
        given: Arrays (B, T, N, H) and (B, S, K, H), T and S multiples of 8; stats (B, N, 3, T') and marks
            (B, K, S') float32, T' and S' being T and S rounded up to whole tiles and blocks.
        lengths: Limits of each sequence.
        body: The kernel's program.
        scratch_types: The types of what it takes as `Scratch` or `WideScratch`.

    Returns:
        The gradient of queries (B, T', N, H), float32, before the factor `scale`, defined for query tiles that see any
        key; the gradients of keys and values (B, S, K, H).
    """
    call, schedule, tiles, dtype = body.call, body.schedule, body.tiles, given.query.dtype
    batch, _, heads, size = given.query.shape
    sums: tuple[int, ...] = (batch, tiles.across * tiles.rows, heads, size)
    if call.interpret:
        sums = (tiles.blocks, *sums)

    def kernel(operands: Operands, numbers: Lengths, query: Any, key: Any, value: Any, *others: Any) -> None:
        scratch = others[-1]
        warpgroup = lax.axis_index("warpgroup")
        turns = None
        if not call.interpret:
            turns = pl.get_global(plgpu.SemaphoreType.REGULAR(((tiles.turns + call.carried) * PARTS,)))
        results = Results(query, key, value, others[0] if call.carried else None, turns)

        @pl.when(warpgroup < PARTS)
        def _() -> None:
            plgpu.set_max_registers(schedule.registers[0], action="increase")
            body.compute(operands.slopes, numbers, results, scratch, operands.order)

        @pl.when(warpgroup == PARTS)
        def _() -> None:
            plgpu.set_max_registers(schedule.registers[1], action="decrease")
            body.produce(operands, numbers, scratch)

        if not call.interpret:

            @pl.when(warpgroup == PARTS + 1)
            def _() -> None:
                plgpu.set_max_registers(schedule.registers[1], action="decrease")
                body.add(numbers, turns, results.query, scratch, operands.order)

    run = launch(
        "attention_gradients",
        kernel,
        [
            jax.ShapeDtypeStruct(sums, jnp.float32),
            *(jax.ShapeDtypeStruct(x.shape, dtype) for x in (given.key, given.value)),
            *([jax.ShapeDtypeStruct((call.carried * PARTS, 2, ROWS, size), jnp.float32)] if call.carried else []),
        ],
        {"block": tiles.size},
        [scratch_types],
        warpgroups={"warpgroup": PARTS + (1 if call.interpret else 2)},
        parameters=plgpu.CompilerParams(approx_math=True),
        interpret=call.interpret,
    )
    dq, dk, dv, *_ = run(given, lengths)
    if call.interpret:
        dq = _in_order(dq, lengths, tiles)
    return dq, dk, dv


def _in_order(parts: jax.Array, lengths: Lengths, tiles: Tiles) -> jax.Array:
    """Returns the sum over the key blocks seen by each query tile, in descending order, of (blocks, B, T', N, H)."""
    first, last = tiles.blocks_of_tiles(lengths)
    total = jnp.zeros(parts.shape[1:], jnp.float32)
    for block in range(tiles.blocks - 1, -1, -1):
        inside = jnp.repeat((block >= first) & (block <= last), tiles.rows, axis=1)[..., None, None]
        total = jnp.where(inside, total + parts[block], total)
    return total

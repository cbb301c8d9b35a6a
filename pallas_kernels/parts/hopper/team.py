"""How the warpgroups that share a row combine their lanes, on a Hopper GPU and under Mosaic's interpreter.

Each thread holds some neighbouring lanes of `RowContract`, and each group of 128 lanes is held by a warp or half a warp
(or, with one lane per thread, is the only group). The tree of a group uses shuffles; the group totals are then
exchanged through shared memory with one barrier of the block or cluster, and every warp adds them redundantly.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref

from pallas_kernels.parts.hopper.arithmetic import LARGER, WARPGROUP, strided
from pallas_kernels.parts.hopper.inline import held, inline
from pallas_kernels.parts.hopper.registers import element
from pallas_kernels.parts.hopper.strip import threads_of_group
from pallas_kernels.parts.hopper.tile import WARP
from pallas_kernels.parts.hopper.tree import Combine, Fold


@dataclass(frozen=True)
class Team:
    """The warpgroups that share a row.

    Attributes:
        lanes: Lanes of the row, over all warpgroups.
        cluster: Number of blocks that share the row.
        scratch: Shared memory for the exchange, (exchanges, 128 or more) float32; device memory of the cluster under
            the interpreter, which cannot access another block's shared memory.
        barrier: Barrier under the interpreter; the GPU uses its built-in barriers.
        interpret: Whether the interpreter runs the kernel.
        threads: Threads that have a row: those of all warpgroups, or a warp or fewer for a row of at most 128 lanes, in
            strips at the greatest distances; not under the interpreter.
        spread: Strips of each warpgroup if they are spread, see `Strip`; not under the interpreter.
    """

    lanes: int
    cluster: int
    scratch: Any
    barrier: Any
    interpret: Any
    threads: int = WARPGROUP
    spread: int = 0

    @property
    def alone(self) -> bool:
        """Whether a warp or a part of one has a row of its own."""
        return self.threads < WARPGROUP

    @property
    def groups(self) -> int:
        """Groups of 128 lanes."""
        return self.lanes // WARPGROUP

    def meet(self) -> None:
        """Waits until every thread of the team has arrived."""
        if self.interpret:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)
            return

        inline()(lambda: _meet_threads(self.cluster))()

    def release(self) -> None:
        """Lets TMA overwrite shared memory that this thread has read, after the team's next barrier."""
        if self.interpret:
            plgpu.commit_smem()
            return

        @inline()
        def fence() -> None:
            mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

        fence()


def combine_team(
    kinds: Sequence[Fold], strips: Sequence[Sequence[jax.Array]], lane: Any, team: Team, places: Sequence[Any]
) -> tuple[jax.Array, ...]:
    """Reduces the lanes of a row by the trees of `RowContract`, once for each kind.

    Args:
        kinds: "add", "max" (the larger, the second if neither is larger), or, alone, "greatest" or "largest", which
            are exact in any order.
        strips: For each kind this warpgroup's lanes, neighbouring strips of float32, `team.lanes` over the whole team.
        lane: First of this warpgroup's lanes.
        team: The warpgroups that share the row.
        places: For each kind a row of `team.scratch`, which may be reused only after another call has ended.

    Returns:
        Float32 scalars, held by every thread of the team, or of the warp that has the row.
    """
    vector = strips[0][0].shape[0] // WARPGROUP
    if team.interpret:
        for kind, own, place in zip(kinds, strips, places, strict=True):
            lanes = jnp.concatenate(own)
            size = min(WARPGROUP, lanes.shape[0])
            groups = _halve(kind, lanes.reshape(-1, size))[:, 0]
            team.scratch[place, pl.ds(lax.div(jnp.int32(lane), WARPGROUP), groups.shape[0])] = groups
        team.meet()
        return tuple(
            _halve(kind, team.scratch[place, pl.ds(0, team.groups)])[0]
            for kind, place in zip(kinds, places, strict=True)
        )
    if kinds[0] in ("greatest", "largest"):
        if team.threads < WARP:
            raise ValueError(f"a part of a warp takes sums and plain maxima, got {kinds[0]}.")
        return (_largest(strips[0], lane, team, places[0], signed=kinds[0] == "greatest"),)
    if team.spread and set(kinds) != {"add"}:
        raise ValueError(f"strips are spread for sums only, got {', '.join(kinds)}.")
    orders: list[Combine] = ["add" if kind == "add" else "max" for kind in kinds]
    number, layout = plgpu.Layout.WG_SPLAT(()), strided(strips[0][0].shape[0])
    arrays = tuple(x for own in strips for x in own)
    each = len(strips[0])

    @inline(
        plgpu.RefType(),
        number,
        (number,) * len(kinds),
        (layout,) * len(arrays),
        result=(held((), number),) * len(kinds),
    )
    def trees(scratch: Any, lane: Any, places: Any, arrays: Any) -> Any:
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(WARPGROUP, i32))

        def at(place: Any, position: Any) -> list[Any]:
            return [arith.index_cast(index, p) for p in (place.registers.item(), position)]

        def of_kind(number: int) -> list[Any]:
            return [x.registers.item() for x in arrays[number * each : (number + 1) * each]]

        if team.alone:
            totals = [_group_tree(kind, of_kind(i), vector, thread, team.threads) for i, kind in enumerate(orders)]
            return tuple(mgpu.FragmentedArray.splat(total, ()) for total in totals)
        if vector == 1:
            # One group, distributed over the four warps.
            for place, own in zip(places, arrays, strict=True):
                memref.store(element(own.registers.item(), 0), scratch, at(place, thread))
        elif team.spread:
            together = threads_of_group(team.spread, vector)
            first = arith.divui(lane.registers.item(), mgpu.c(WARPGROUP, i32))
            group = arith.addi(first, arith.divui(thread, mgpu.c(together, i32)))
            for i, (kind, place) in enumerate(zip(orders, places, strict=True)):
                memref.store(_group_tree(kind, of_kind(i), vector, thread, together), scratch, at(place, group))
        else:
            first = arith.divui(lane.registers.item(), mgpu.c(WARPGROUP, i32))
            first = arith.addi(first, arith.divui(thread, mgpu.c(WARPGROUP // vector, i32)))
            for i, own in enumerate(arrays):
                kind, place = orders[i // each], places[i // each]
                group = arith.addi(first, mgpu.c(i % each * vector, i32))
                total = _group_tree(kind, [own.registers.item()], vector, thread, WARPGROUP // vector)
                if team.cluster == 1:
                    memref.store(total, scratch, at(place, group))
                else:
                    _store_everywhere(total, scratch, place.registers.item(), group, thread, vector, team.cluster)
        _meet_threads(team.cluster)
        size = WARPGROUP if vector == 1 else team.groups
        near = arith.remui(thread, mgpu.c(min(size, WARP), i32))
        totals = []
        for kind, place in zip(orders, places, strict=True):
            held = [memref.load(scratch, at(place, arith.addi(near, mgpu.c(i, i32)))) for i in range(0, size, WARP)]
            while len(held) > 1:
                half = len(held) // 2
                held = [_join(kind, a, b) for a, b in zip(held[:half], held[half:], strict=True)]
            distance = min(size, WARP) // 2
            while distance:
                held = [_meet(kind, held[0], distance, thread)]
                distance //= 2
            totals.append(mgpu.FragmentedArray.splat(held[0], ()))
        return tuple(totals)

    return trees(team.scratch, jnp.asarray(lane, jnp.int32), tuple(jnp.asarray(p, jnp.int32) for p in places), arrays)


def _largest(strips: Sequence[jax.Array], lane: Any, team: Team, place: Any, *, signed: bool) -> jax.Array:
    """Returns the maximum of all lanes, propagating nan."""
    number, layout = plgpu.Layout.WG_SPLAT(()), strided(strips[0].shape[0])
    kind = held((), number)
    share = len(strips) * strips[0].shape[0]
    warps = team.lanes // share * (WARPGROUP // WARP)

    @inline(plgpu.RefType(), number, number, (layout,) * len(strips), result=kind)
    def largest(scratch: Any, lane: Any, place: Any, strips: Any) -> Any:
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        thread = arith.remui(mgpu.utils.thread_idx(), mgpu.c(WARPGROUP, i32))
        held = [element(x.registers.item(), j) for x in strips for j in range(x.shape[0] // WARPGROUP)]
        total = _largest_of_warp(held, signed)
        if team.alone:
            return mgpu.FragmentedArray.splat(total, ())
        member = arith.divui(lane.registers.item(), mgpu.c(share, i32))
        slot = arith.addi(arith.muli(member, mgpu.c(4, i32)), arith.divui(thread, mgpu.c(WARP, i32)))
        row = arith.index_cast(index, place.registers.item())
        if team.cluster == 1:
            memref.store(total, scratch, [row, arith.index_cast(index, slot)])
        else:
            each = WARPGROUP // WARP  # so that the threads of a warp correspond to the blocks
            _store_everywhere(total, scratch, place.registers.item(), slot, thread, each, team.cluster)
        _meet_threads(team.cluster)
        near = arith.remui(thread, mgpu.c(min(warps, WARP), i32))
        found = [
            memref.load(scratch, [row, arith.index_cast(index, arith.addi(near, mgpu.c(i, i32)))])
            for i in range(0, warps, WARP)
        ]
        return mgpu.FragmentedArray.splat(_largest_of_warp(found, signed), ())

    return largest(team.scratch, jnp.asarray(lane, jnp.int32), jnp.asarray(place, jnp.int32), tuple(strips))


def _largest_of_warp(held: Sequence[Any], signed: bool) -> Any:
    """Returns the largest number held by any thread of the warp."""
    f32 = ir.F32Type.get()

    def larger(a: Any, b: Any) -> Any:
        return mgpu.utils.inline_ptx(LARGER, a, b, result_types=f32)

    own = functools.reduce(larger, held)
    if signed:
        for distance in (16, 8, 4, 2, 1):
            own = larger(own, mgpu.utils.shfl_bfly(own, distance))
        return own
    # The bits of non-negative numbers sort like the numbers, nan last.
    redux = "{ .reg .b32 b; mov.b32 b, $1; redux.sync.max.u32 b, b, 0xFFFFFFFF; mov.b32 $0, b; }"
    return mgpu.utils.inline_ptx(redux, own, result_types=f32, convergent=True)


def _meet_threads(cluster: int) -> None:
    """Waits for all threads of the block or cluster; their writes to shared memory become visible to all."""
    if cluster == 1:
        gpu.barrier()
        return
    for ptx in ("barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"):
        mgpu.utils.inline_ptx(ptx, has_side_effects=True)


def _store_everywhere(total: Any, scratch: Any, place: Any, group: Any, thread: Any, vector: int, cluster: int) -> None:
    """Writes a group's total to the shared memory of every block; the group's first threads write one block each."""
    i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    block = arith.remui(thread, mgpu.c(WARPGROUP // vector, i32))
    width = ir.MemRefType(scratch.type).shape[-1]
    offset = arith.extui(i64, arith.addi(arith.muli(place, mgpu.c(width, i32)), group))
    address = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(scratch), [offset], total.type)
    with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, block, mgpu.c(cluster, i32))):
        mgpu.utils.inline_ptx(
            """
            {
            .reg .b32 there;
            mapa.shared::cluster.u32 there, $0, $1;
            st.shared::cluster.f32 [there], $2;
            }
            """,
            llvm.ptrtoint(i32, address),
            block,
            total,
            has_side_effects=True,
        )


def _group_tree(kind: Combine, strips: list[Any], vector: int, thread: Any, threads: int) -> Any:
    """Reduces the lanes that some threads hold, in strips at the greatest distances, by the halving tree."""
    i32 = ir.IntegerType.get_signless(32)
    held = [[element(strip, j) for j in range(vector)] for strip in strips]
    while len(held) > 1:
        half = len(held) // 2
        held = [
            [_join(kind, a, b) for a, b in zip(low, high, strict=True)]
            for low, high in zip(held[:half], held[half:], strict=True)
        ]
    (values,) = held
    distance, split = threads // 2, []
    while distance:
        if len(values) > 1:
            # Each thread of a pair continues with every other of its neighbours, of which it has those at a distance.
            even, odd, upper = values[::2], values[1::2], _upper(thread, distance)
            kept = [arith.select(upper, b, a) for a, b in zip(even, odd, strict=True)]
            sent = [arith.select(upper, a, b) for a, b in zip(even, odd, strict=True)]
            values = [
                _ordered(kind, a, mgpu.utils.shfl_bfly(b, mgpu.c(distance, i32)), upper)
                for a, b in zip(kept, sent, strict=True)
            ]
            split.append(distance)
        else:
            values = [_meet(kind, values[0], distance, thread)]
        distance //= 2
    while len(values) > 1:
        half = len(values) // 2
        values = [_join(kind, a, b) for a, b in zip(values[:half], values[half:], strict=True)]
    for distance in reversed(split):
        values = [_meet(kind, values[0], distance, thread)]
    return values[0]


def _meet(kind: Combine, own: Any, distance: int, thread: Any) -> Any:
    return _ordered(kind, own, mgpu.utils.shfl_bfly(own, distance), _upper(thread, distance))


def _upper(thread: Any, distance: int) -> Any:
    """Whether a thread is the upper one of a pair at this distance."""
    i32 = ir.IntegerType.get_signless(32)
    bit = arith.andi(thread, mgpu.c(distance, i32))
    return arith.cmpi(arith.CmpIPredicate.ne, bit, mgpu.c(0, i32))


def _ordered(kind: Combine, own: Any, other: Any, upper: Any) -> Any:
    if kind == "add":
        return arith.addf(own, other)
    # Of +0 and -0 the second operand is returned, so both threads must use the same operand order.
    return _join(kind, arith.select(upper, other, own), arith.select(upper, own, other))


def _join(kind: Combine, a: Any, b: Any) -> Any:
    if kind == "add":
        return arith.addf(a, b)
    return arith.select(arith.cmpf(arith.CmpFPredicate.OGT, a, b), a, b)


def _halve(kind: Fold, x: jax.Array) -> jax.Array:
    if kind in ("greatest", "largest"):
        return jnp.max(x, axis=-1, keepdims=True)
    while x.shape[-1] > 1:
        low, high = jnp.split(x, 2, axis=-1)
        x = low + high if kind == "add" else jnp.where(low > high, low, high)
    return x

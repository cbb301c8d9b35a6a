"""What the rows of a chunk have between them, T and P, in the order of `MmaDeltaRuleContract`.

A block of one warpgroup has a chunk of a value head. Keys times keys and queries times keys are products of wgmma, from
keys and queries that TMA has read; the forward substitution is one of mma.sync. Where sequences are continued, rows
stand from the edge of the state on: first those that are kept, then the tokens.
"""

from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, memref, scf

from pallas_kernels.contract import MmaDeltaRuleContract
from pallas_kernels.delta_rule.hopper.plain_rows import (
    clear_infinite,
    clear_rows,
    fetch_rows,
    put_rows,
    rows_before,
    send_rows,
    with_front,
)
from pallas_kernels.delta_rule.hopper.scan import COLUMN
from pallas_kernels.delta_rule.hopper.substitution import Known, substitute
from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.products import finish, share, start
from pallas_kernels.parts.hopper.registers import number_of, with_number
from pallas_kernels.parts.hopper.tile import (
    PLAIN,
    ROW,
    ROWS,
    TILE,
    Arithmetic,
    across,
    add_lanes,
    add_to_lanes,
    filled,
    i32,
    thread_of_warpgroup,
    tiled,
)

_LOG2E: Final = 1.4426950408889634


class KeptRows(NamedTuple):
    """What is kept of the chunk in which sequences are continued: arrays in GPU memory.

    Attributes:
        key: (B, J, 64, D).
        inverse: (B, H, 64, 64) float32.
        decay: (B, H, 64) float32.
        edge: (B,) int32, the position of the chunk's first row.
        start: (B,) int32, that of the first token; the rows before it are kept.
        slots: (B,) int32, where in `key`, `inverse` and `decay` sequences are, which have S instead of B sequences then
            and T as `slots.packed`, (S, H, 32, 65). None if sequence b is at b.
    """

    key: Any
    inverse: Any
    decay: Any
    edge: Any
    start: Any
    slots: Any = None

    def slot(self, batch: Any) -> Any:
        """Returns where a sequence is."""
        return batch if self.slots is None else self.slots[batch]

    def known(self, batch: Any, head: Any, count: Any) -> Known:
        """Returns the first `count` rows of a head."""
        slot = self.slot(batch)
        return Known(count, self.inverse.at[slot, head], self.decay.at[slot, head])


class Tokens(NamedTuple):
    """What a block reads: arrays in GPU memory.

    Attributes:
        query: (B, T, J, D) bfloat16 or float16.
        key: (B, T, J, D).
        g: (B, T, H) float32.
        beta: (B, T, H) float32.
        lengths: (B,) int32.
        kept: Where sequences are continued, what is kept of them. None for whole sequences.
    """

    query: Any
    key: Any
    g: Any
    beta: Any
    lengths: Any
    kept: Any = None


class Memory(NamedTuple):
    """Shared memory, each with an axis before its own for the warpgroups where there are several.

    Attributes:
        query: (D / 64, 64, 64).
        key: (D / 64, 64, 64).
        coefficients: (64, 64), then T.
        seen: (64, 64), then P.
        logs: (64,) float32.
        betas: (64,) float32.
        grown: (64,) float32, E(G).
        later: (64,) float32, E(G of the last row - G).
        squares: (64,) float32, of the lengths of the keys.
        full: A barrier.
    """

    query: Any
    key: Any
    coefficients: Any
    seen: Any
    logs: Any
    betas: Any
    grown: Any
    later: Any
    squares: Any
    full: Any

    @classmethod
    def types(cls, size: int, dtype: Any, warpgroups: tuple[int, ...] = ()) -> "Memory":
        """Returns the types."""
        pieces = size // ROWS
        rows = plgpu.SMEM((*warpgroups, pieces, ROWS, ROWS), dtype, transforms=PLAIN)
        tile = plgpu.SMEM((*warpgroups, ROWS, ROWS), dtype, transforms=tiled(dtype, ROWS))
        line = plgpu.SMEM((*warpgroups, ROWS), jnp.float32)
        full = plgpu.Barrier(num_arrivals=2 * pieces, num_barriers=max(1, *warpgroups, 1))
        lines = dict.fromkeys(("logs", "betas", "grown", "later", "squares"), line)
        return cls(rows, rows, tile, tile, full=full, **lines)


def rows(x: Tokens, *, interpret: Any = False) -> list[jax.Array]:
    """Runs the kernel.

    Args:
        x: The sequences.
        interpret: False, or parameters of Mosaic's interpreter.

    Returns:
        T and P of all chunks, (B, H, N, 64, 64) with the columns first, and (B, H, N, 64) float32 each: G, beta (nan
        for a row that makes its head nan), E(G), and E(G of the last row - G). They have no meaning for chunks after a
        sequence's length. Where sequences are continued, also the keys of their first chunk and those to keep of their
        last one, (B, J, 64, D) each; the former have no meaning where no row is kept before the tokens, both none for
        sequences without tokens.
    """
    (b, tokens, key_heads, size), h, kept = x.key.shape, x.g.shape[2], x.kept
    chunks = -(-tokens // ROWS) + (kept is not None)
    square = jax.ShapeDtypeStruct((b, h, chunks, ROWS, ROWS), x.key.dtype)
    line = jax.ShapeDtypeStruct((b, h, chunks, ROWS), jnp.float32)
    keys = [] if kept is None else [jax.ShapeDtypeStruct((b, key_heads, ROWS, size), x.key.dtype)] * 2
    emulated = bool(interpret)
    front = ROWS if emulated and kept is not None else 0
    if front:
        query, key = with_front(front, x.query, x.key)
        x = x._replace(query=query, key=key)

    def kernel(x: Tokens, inverse: Any, weights: Any, *rest: Any) -> None:
        *lines, m = rest
        lines, keys = lines[:4], lines[4:]
        batch, of_chunk = lax.axis_index("sequence"), lax.axis_index("slice")
        chunk, head = lax.div(of_chunk, h), lax.rem(of_chunk, h)
        key_head, first_of_group = lax.div(head, h // key_heads), lax.rem(head, h // key_heads) == 0
        count = x.lengths[batch]
        before = rows_before(x.kept, batch, count)
        left = before + count - chunk * ROWS
        here: Any = None if x.kept is None else jnp.where(chunk == 0, before, 0)

        @pl.when((left > 0) & (count > 0))
        def _() -> None:
            place = pl.ds(chunk * ROWS - before + front, ROWS)
            fetch_rows(x.key.at[batch, place, key_head], m.key, m.full)
            fetch_rows(x.query.at[batch, place, key_head], m.query, m.full)
            kept = None if x.kept is None else x.kept.known(batch, head, here)
            of_head = x.g.at[batch, :, head], x.beta.at[batch, :, head]
            gates(*of_head, chunk * ROWS - before, left, kept, m, emulated)
            plgpu.barrier_wait(m.full)
            clear_rows(left, m.key, m.query, interpret=emulated)
            if x.kept is not None:
                put_rows(here, (x.kept.key.at[x.kept.slot(batch), key_head], m.key), interpret=emulated)
                pl.when((here > 0) & first_of_group)(lambda: send_rows(m.key, keys[0].at[batch, key_head]))
            coefficients(m, emulated)
            t, p = substitute(m.coefficients, m.seen, m.betas, kept, emulated)
            plgpu.commit_smem()  # every warp has read the coefficients
            share(t, m.coefficients, emulated)
            share(p, m.seen, emulated)
            if x.kept is not None:

                @pl.when((left <= ROWS) & first_of_group)
                def _() -> None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    clear_infinite(m.squares, m.key, emulated)

            plgpu.commit_smem()
            sources = (m.coefficients, m.seen, m.logs, m.betas, m.grown, m.later)
            for source, target in zip(sources, (inverse, weights, *lines), strict=True):
                plgpu.copy_smem_to_gmem(source, target.at[batch, head, chunk])
            if x.kept is not None:
                pl.when((left <= ROWS) & first_of_group)(lambda: send_rows(m.key, keys[1].at[batch, key_head]))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return list(
        launch(
            "delta_rule_rows",
            kernel,
            [square, square, *[line] * 4, *keys],
            {"sequence": b, "slice": chunks * h},
            [Memory.types(size, x.key.dtype)],
            by_lanes=True,
            interpret=interpret,
        )(x)
    )


def coefficients(m: Memory, interpret: bool) -> None:
    """Writes the coefficients of T and P, squares of keys, and nan to the betas of rows that make their head nan."""
    math, dtype, shape = Arithmetic(interpret=interpret), m.key.dtype, (ROWS, ROWS)
    row, column = (plgpu.broadcasted_iota(jnp.int32, shape, i, layout=TILE) for i in range(2))
    near = start(None, (m.key,), (m.key,), interpret=interpret)
    logs, of_column = plgpu.load(m.logs, layout=ROW), plgpu.load(m.logs, layout=COLUMN)
    age = across(logs, ROWS) - lax.broadcast_in_dim(of_column, shape, [1])
    age = math.exp2(jnp.where(row >= column, age, 0.0))
    (near,) = finish(0, near, interpret=interpret)
    none = filled((ROWS,), 0.0)
    squares = jnp.where(row == column, near, 0.0)
    squares = add_lanes(add_to_lanes(none, none, squares, 8, interpret), interpret)
    factor = _settled(squares, m.betas, m.squares, interpret)
    far = start(None, (m.query,), (m.key,), interpret=interpret)
    a = math.product(across(factor, ROWS), math.product(near, age))
    a = jnp.where((row > column) & (jnp.abs(near) < jnp.inf), a, 0.0)
    share((-a).astype(dtype), m.coefficients, interpret)
    (far,) = finish(0, far, interpret=interpret)
    share(jnp.where(row >= column, math.product(far, age), 0.0).astype(dtype), m.seen, interpret)
    plgpu.commit_smem()


def gates(g: Any, beta: Any, first: Any, left: Any, kept: Known | None, m: Memory, interpret: bool) -> None:
    """Writes G of a chunk and its exponentials, and beta, nan for a row whose gate or beta is not finite.

    Kept rows have 0 for beta.

    Args:
        g: GPU memory (T,) float32.
        beta: GPU memory (T,) float32.
        first: The token in the chunk's first row; negative where kept rows come before the tokens.
        left: How many rows there are from that row on.
        kept: What is known of the first rows.
        m: Shared memory.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    least = MmaDeltaRuleContract().least
    if interpret:
        row = jnp.arange(ROWS)
        there, place = (row < left) & (first + row >= 0), jnp.clip(first + row, 0, g.shape[0] - 1)
        step, factor = (jnp.where(there, x[...][place], 0.0) for x in (g, beta))
        gates = jnp.where(step < jnp.inf, jnp.maximum(step, least) * jnp.float32(_LOG2E), 0.0)
        sums = jnp.cumsum(gates)
        if kept is not None:
            stored = kept.decay[...]
            sums = jnp.cumsum(jnp.where(row == kept.count - 1, stored, jnp.where(row < kept.count, 0.0, gates)))
            sums = jnp.where(row < kept.count, stored, sums)
        m.logs[...], m.grown[...], m.later[...] = sums, jnp.exp2(sums), jnp.exp2(sums[-1] - sums)
        m.betas[...] = jnp.where((step < jnp.inf) & jnp.isfinite(factor), factor, jnp.nan)
        plgpu.commit_smem()
        return
    number = plgpu.Layout.WG_SPLAT(())

    known = () if kept is None else (kept.count, kept.decay)
    types = () if kept is None else (number, plgpu.RefType())

    @inline(plgpu.RefType(), plgpu.RefType(), number, number, *[plgpu.RefType()] * 4, *types)
    def write(
        g: Any, beta: Any, first: Any, left: Any, logs: Any, betas: Any, grown: Any, later: Any, *known: Any
    ) -> None:
        thread, index, f32 = thread_of_warpgroup(), ir.IndexType.get(), ir.F32Type.get()
        first, left = first.registers.item(), left.registers.item()
        less, infinite = arith.CmpFPredicate.OLT, mgpu.c(float("inf"), f32)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, thread, i32(ROWS))):
            there = arith.cmpi(arith.CmpIPredicate.slt, thread, left)
            row = arith.addi(first, arith.minsi(thread, arith.subi(left, i32(1))))
            if known:
                there = arith.andi(there, arith.cmpi(arith.CmpIPredicate.sge, row, i32(0)))
                row = arith.maxsi(row, i32(0))
            zero, at = mgpu.c(0.0, f32), arith.index_cast(index, thread)
            step, factor = (
                arith.select(there, memref.load(x, [arith.index_cast(index, row)]), zero) for x in (g, beta)
            )
            fine = arith.cmpf(less, step, infinite)
            bounded = arith.select(arith.cmpf(less, step, mgpu.c(least, f32)), mgpu.c(least, f32), step)
            gate = arith.select(fine, _rounded_product(bounded, mgpu.c(_LOG2E, f32)), zero)
            if known:
                is_kept = arith.cmpi(arith.CmpIPredicate.slt, thread, known[0].registers.item())
                gate = arith.select(is_kept, memref.load(known[1], [at]), gate)
            memref.store(gate, logs, [at])
            fine = arith.andi(fine, arith.cmpf(less, math.absf(factor), infinite))
            memref.store(arith.select(fine, factor, mgpu.c(float("nan"), f32)), betas, [at])
        mgpu.utils.warpgroup_barrier()
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, thread, i32(0))):
            address = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(logs))
            if known:
                count = known[0].registers.item()
                branches: Any = scf.IfOp
                branch = branches(arith.cmpi(arith.CmpIPredicate.sgt, count, i32(0)), [], has_else=True)
                with ir.InsertionPoint(branch.then_block):
                    _add_up(address, count)
                    scf.yield_([])
                with ir.InsertionPoint(branch.else_block):
                    _add_up(address)
                    scf.yield_([])
            else:
                _add_up(address)
        mgpu.utils.warpgroup_barrier()
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, thread, i32(ROWS))):
            at = arith.index_cast(index, thread)
            own, newest = memref.load(logs, [at]), memref.load(logs, [mgpu.c(ROWS - 1, index)])
            memref.store(_power_of_two(own), grown, [at])
            memref.store(_power_of_two(arith.subf(newest, own)), later, [at])

    write(g, beta, jnp.int32(first), jnp.int32(left), m.logs, m.betas, m.grown, m.later, *known)


def _add_up(address: Any, count: Any = None) -> None:
    """Replaces 64 float32 numbers in shared memory by their sums from the first one on, upwards.

    The first `count` numbers, if given, are such sums already.
    """
    f32 = ir.F32Type.get()
    sums = mgpu.c(0.0, f32)
    pieces = []
    for at in range(0, ROWS, 4):
        text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {4 * at}];"
        pieces.append(mgpu.utils.inline_ptx(text, address, result_types=[f32] * 4, has_side_effects=True))
    for at, piece in enumerate(pieces):
        found = []
        for i, gate in enumerate(piece):
            total = arith.addf(sums, gate)
            if count is not None:
                is_sum = arith.cmpi(arith.CmpIPredicate.sgt, count, i32(4 * at + i))
                total = arith.select(is_sum, gate, total)
            sums = total
            found.append(sums)
        text = f"st.shared.v4.f32 [$4 + {16 * at}], {{$0, $1, $2, $3}};"
        mgpu.utils.inline_ptx(text, *found, address, has_side_effects=True)


def _rounded_product(a: Any, b: Any) -> Any:
    return mgpu.utils.inline_ptx("mul.rn.f32 $0, $1, $2;", a, b, result_types=ir.F32Type.get())


def _power_of_two(x: Any) -> Any:
    return mgpu.utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", x, result_types=ir.F32Type.get())


def _settled(squares: jax.Array, betas: Any, kept: Any, interpret: bool) -> jax.Array:
    """Returns beta of each row, 0 where it is nan, and makes it nan for rows whose key has no finite length.

    Args:
        squares: (64,) the lengths' squares.
        betas: Shared memory (64,) float32.
        kept: The same, to which the squares are written.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    if interpret:
        kept[...] = squares
        betas[...] = jnp.where(squares < jnp.inf, betas[...], jnp.nan)
        plgpu.commit_smem()
        return jnp.nan_to_num(betas[...])
    layout = mgpu.WGMMA_LAYOUT.reduce((1,))

    @inline(ROW, plgpu.RefType(), plgpu.RefType(), result=held((ROWS,), ROW))
    def settle(square: Any, betas: Any, kept: Any) -> Any:
        f32, registers = ir.F32Type.get(), square.registers.copy()
        for at, (place,) in enumerate(layout.thread_idxs((ROWS,))):
            index = place if place.type == ir.IndexType.get() else arith.index_cast(ir.IndexType.get(), place)
            register = registers.flat[at]
            memref.store(number_of(register), kept, [index])
            finite = arith.cmpf(arith.CmpFPredicate.OLT, number_of(register), mgpu.c(float("inf"), f32))
            factor = arith.select(finite, memref.load(betas, [index]), mgpu.c(float("nan"), f32))
            memref.store(factor, betas, [index])
            known = arith.cmpf(arith.CmpFPredicate.ORD, factor, factor)
            factor = arith.select(known, factor, mgpu.c(0.0, f32))
            registers.flat[at] = with_number(register, factor)
        return fragmented(registers, square.layout)

    return settle(squares, betas, kept)

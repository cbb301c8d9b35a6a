"""What the rows of a chunk have between them, T and P, in the order of `MmaDeltaRuleContract`.

A block of one warpgroup has a chunk of a value head. Keys times keys and queries times keys are products of wgmma, from
keys and queries that TMA has read; the forward substitution is one of mma.sync.
"""

from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, memref

from pallas_kernels.contract import MmaDeltaRuleContract
from pallas_kernels.delta_rule.hopper.scan import COLUMN, clear_rows
from pallas_kernels.delta_rule.hopper.substitution import substitute
from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.products import finish, share, start
from pallas_kernels.parts.hopper.registers import number_of, with_number
from pallas_kernels.parts.hopper.tile import (
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


class Tokens(NamedTuple):
    """What a block reads: arrays in GPU memory.

    Attributes:
        query: (B, T, J, D) bfloat16 or float16, T a multiple of 8.
        key: (B, T, J, D).
        g: (B, T, H) float32.
        beta: (B, T, H) float32.
        lengths: (B,) int32.
    """

    query: Any
    key: Any
    g: Any
    beta: Any
    lengths: Any


class _Memory(NamedTuple):
    """Shared memory.

    Attributes:
        query: (64, D).
        key: (64, D).
        coefficients: (64, 64), then T.
        seen: (64, 64), then P.
        logs: (64,) float32.
        betas: (64,) float32.
        grown: (64,) float32, E(G).
        later: (64,) float32, E(G of the last row - G).
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
    full: Any

    @classmethod
    def types(cls, size: int, dtype: Any) -> "_Memory":
        """Returns the types."""

        def tile(columns: int) -> Any:
            return plgpu.SMEM((ROWS, columns), dtype, transforms=tiled(dtype, columns))

        line, full = plgpu.SMEM((ROWS,), jnp.float32), plgpu.Barrier(num_arrivals=2)
        return cls(tile(size), tile(size), tile(ROWS), tile(ROWS), line, line, line, line, full=full)


def rows(x: Tokens, *, interpret: Any = False) -> list[jax.Array]:
    """Runs the kernel.

    Args:
        x: The sequences.
        interpret: False, or parameters of Mosaic's interpreter.

    Returns:
        T and P of all chunks, (B, H, N, 64, 64) with the columns first, and (B, H, N, 64) float32 each: G, beta (nan
        for a row that makes its head nan), E(G), and E(G of the last row - G). They have no meaning for chunks after a
        sequence's length.
    """
    (b, tokens, key_heads, size), h = x.key.shape, x.g.shape[2]
    chunks = -(-tokens // ROWS)
    square = jax.ShapeDtypeStruct((b, h, chunks, ROWS, ROWS), x.key.dtype)
    line = jax.ShapeDtypeStruct((b, h, chunks, ROWS), jnp.float32)
    emulated = bool(interpret)

    def kernel(x: Tokens, inverse: Any, weights: Any, *rest: Any) -> None:
        *lines, m = rest
        batch, of_chunk = lax.axis_index("sequence"), lax.axis_index("slice")
        chunk, head = lax.div(of_chunk, h), lax.rem(of_chunk, h)
        left = x.lengths[batch] - chunk * ROWS

        @pl.when(left > 0)
        def _() -> None:
            place, key_head = pl.ds(chunk * ROWS, ROWS), lax.div(head, h // key_heads)
            plgpu.copy_gmem_to_smem(x.key.at[batch, place, key_head], m.key, m.full)
            plgpu.copy_gmem_to_smem(x.query.at[batch, place, key_head], m.query, m.full)
            _gates(x.g.at[batch, :, head], x.beta.at[batch, :, head], chunk * ROWS, left, m, emulated)
            plgpu.barrier_wait(m.full)
            clear_rows(left, m.key, m.query)
            _coefficients(m, emulated)
            t, p = substitute(m.coefficients, m.seen, m.betas, emulated)
            plgpu.commit_smem()  # every warp has read the coefficients
            share(t, m.coefficients, emulated)
            share(p, m.seen, emulated)
            plgpu.commit_smem()
            sources = (m.coefficients, m.seen, m.logs, m.betas, m.grown, m.later)
            for source, target in zip(sources, (inverse, weights, *lines), strict=True):
                plgpu.copy_smem_to_gmem(source, target.at[batch, head, chunk])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return list(
        launch(
            "delta_rule_rows",
            kernel,
            [square, square, *[line] * 4],
            {"sequence": b, "slice": chunks * h},
            [_Memory.types(size, x.key.dtype)],
            by_lanes=True,
            interpret=interpret,
        )(x)
    )


def _coefficients(m: _Memory, interpret: bool) -> None:
    """Writes the coefficients of T and P, and nan to the betas of rows that make their head nan."""
    math, dtype, shape = Arithmetic(interpret=interpret), m.key.dtype, (ROWS, ROWS)
    row, column = (plgpu.broadcasted_iota(jnp.int32, shape, i, layout=TILE) for i in range(2))
    near = start(None, (m.key,), (m.key,), interpret=interpret)
    logs, of_column = plgpu.load(m.logs, layout=ROW), plgpu.load(m.logs, layout=COLUMN)
    age = across(logs, ROWS) - lax.broadcast_in_dim(of_column, shape, [1])
    age = math.exp2(jnp.where(row >= column, age, 0.0))
    (near,) = finish(0, near, interpret=interpret)
    factor = _settled(jnp.where(row == column, near, 0.0), m.betas, interpret)
    far = start(None, (m.query,), (m.key,), interpret=interpret)
    a = math.product(across(factor, ROWS), math.product(near, age))
    a = jnp.where((row > column) & (jnp.abs(near) < jnp.inf), a, 0.0)
    share((-a).astype(dtype), m.coefficients, interpret)
    (far,) = finish(0, far, interpret=interpret)
    share(jnp.where(row >= column, math.product(far, age), 0.0).astype(dtype), m.seen, interpret)
    plgpu.commit_smem()


def _gates(g: Any, beta: Any, first: Any, left: Any, m: _Memory, interpret: bool) -> None:
    """Writes G of a chunk and its exponentials, and beta, nan for a row whose gate or beta is not finite.

    Args:
        g: GPU memory (T,) float32.
        beta: GPU memory (T,) float32.
        first: The chunk's first row.
        left: How many rows there are from it on.
        m: Shared memory.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    least = MmaDeltaRuleContract().least
    if interpret:
        row = jnp.arange(ROWS)
        there, place = row < left, jnp.minimum(first + row, g.shape[0] - 1)
        step, factor = (jnp.where(there, x[...][place], 0.0) for x in (g, beta))
        sums = jnp.cumsum(jnp.where(step < jnp.inf, jnp.maximum(step, least) * jnp.float32(_LOG2E), 0.0))
        m.logs[...], m.grown[...], m.later[...] = sums, jnp.exp2(sums), jnp.exp2(sums[-1] - sums)
        m.betas[...] = jnp.where((step < jnp.inf) & jnp.isfinite(factor), factor, jnp.nan)
        plgpu.commit_smem()
        return
    number = plgpu.Layout.WG_SPLAT(())

    @inline(plgpu.RefType(), plgpu.RefType(), number, number, *[plgpu.RefType()] * 4)
    def write(g: Any, beta: Any, first: Any, left: Any, logs: Any, betas: Any, grown: Any, later: Any) -> None:
        thread, index, f32 = thread_of_warpgroup(), ir.IndexType.get(), ir.F32Type.get()
        first, left = first.registers.item(), left.registers.item()
        less, infinite = arith.CmpFPredicate.OLT, mgpu.c(float("inf"), f32)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, thread, i32(ROWS))):
            there = arith.cmpi(arith.CmpIPredicate.slt, thread, left)
            row = arith.addi(first, arith.minsi(thread, arith.subi(left, i32(1))))
            zero, at = mgpu.c(0.0, f32), arith.index_cast(index, thread)
            step, factor = (
                arith.select(there, memref.load(x, [arith.index_cast(index, row)]), zero) for x in (g, beta)
            )
            fine = arith.cmpf(less, step, infinite)
            bounded = arith.select(arith.cmpf(less, step, mgpu.c(least, f32)), mgpu.c(least, f32), step)
            gate = arith.select(fine, _rounded_product(bounded, mgpu.c(_LOG2E, f32)), zero)
            memref.store(gate, logs, [at])
            fine = arith.andi(fine, arith.cmpf(less, math.absf(factor), infinite))
            memref.store(arith.select(fine, factor, mgpu.c(float("nan"), f32)), betas, [at])
        mgpu.utils.warpgroup_barrier()
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, thread, i32(0))):
            _add_up(llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(logs)))
        mgpu.utils.warpgroup_barrier()
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, thread, i32(ROWS))):
            at = arith.index_cast(index, thread)
            own, newest = memref.load(logs, [at]), memref.load(logs, [mgpu.c(ROWS - 1, index)])
            memref.store(_power_of_two(own), grown, [at])
            memref.store(_power_of_two(arith.subf(newest, own)), later, [at])

    write(g, beta, jnp.int32(first), jnp.int32(left), m.logs, m.betas, m.grown, m.later)


def _add_up(address: Any) -> None:
    """Replaces 64 float32 numbers in shared memory by their sums from the first one on, upwards."""
    f32 = ir.F32Type.get()
    sums = mgpu.c(0.0, f32)
    pieces = []
    for at in range(0, ROWS, 4):
        text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {4 * at}];"
        pieces.append(mgpu.utils.inline_ptx(text, address, result_types=[f32] * 4, has_side_effects=True))
    for at, piece in enumerate(pieces):
        found = []
        for gate in piece:
            sums = arith.addf(sums, gate)
            found.append(sums)
        text = f"st.shared.v4.f32 [$4 + {16 * at}], {{$0, $1, $2, $3}};"
        mgpu.utils.inline_ptx(text, *found, address, has_side_effects=True)


def _rounded_product(a: Any, b: Any) -> Any:
    return mgpu.utils.inline_ptx("mul.rn.f32 $0, $1, $2;", a, b, result_types=ir.F32Type.get())


def _power_of_two(x: Any) -> Any:
    return mgpu.utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", x, result_types=ir.F32Type.get())


def _settled(squares: jax.Array, betas: Any, interpret: bool) -> jax.Array:
    """Returns beta of each row, 0 where it is nan, and makes it nan for rows whose key has no finite length.

    Args:
        squares: (64, 64) the lengths' squares, zeros beside the diagonal.
        betas: Shared memory (64,) float32.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    none = filled((ROWS,), 0.0)
    square = add_lanes(add_to_lanes(none, none, squares, 8, interpret), interpret)
    if interpret:
        betas[...] = jnp.where(square < jnp.inf, betas[...], jnp.nan)
        plgpu.commit_smem()
        return jnp.nan_to_num(betas[...])
    layout = mgpu.WGMMA_LAYOUT.reduce((1,))

    @inline(ROW, plgpu.RefType(), result=held((ROWS,), ROW))
    def settle(square: Any, betas: Any) -> Any:
        f32, registers = ir.F32Type.get(), square.registers.copy()
        for at, (place,) in enumerate(layout.thread_idxs((ROWS,))):
            index = place if place.type == ir.IndexType.get() else arith.index_cast(ir.IndexType.get(), place)
            register = registers.flat[at]
            finite = arith.cmpf(arith.CmpFPredicate.OLT, number_of(register), mgpu.c(float("inf"), f32))
            factor = arith.select(finite, memref.load(betas, [index]), mgpu.c(float("nan"), f32))
            memref.store(factor, betas, [index])
            known = arith.cmpf(arith.CmpFPredicate.ORD, factor, factor)
            factor = arith.select(known, factor, mgpu.c(0.0, f32))
            registers.flat[at] = with_number(register, factor)
        return fragmented(registers, square.layout)

    return settle(square, betas)

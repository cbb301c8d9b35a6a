"""Rows of tokens in shared memory, stored as `tile.PLAIN` says: in pieces of 64 columns, each row of 128 bytes.

TMA reads tokens from any one on, with zeros for those before the first and after the last. It writes them from any one
on, but not from one before the first. A swizzle moves the 16 bytes of a row, and stays in the row.
"""

from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels.parts.hopper.inline import inline
from pallas_kernels.parts.hopper.tile import PLAIN, ROWS, i32, thread_of_warpgroup

_WORDS: Final = 8  # numbers in 16 bytes
_SHARES: Final = 2  # threads of a row
_NUMBER: Final = plgpu.Layout.WG_SPLAT(())


def rows_before(kept: Any, batch: Any, count: Any) -> Any:
    """Returns how many rows of a chunk come before the first token of a sequence: 0 for whole sequences.

    A sequence without tokens may be anywhere; it has none. No window of a chunk after the first may begin before the
    tokens, whatever the positions are.

    Args:
        kept: What is kept of sequences, with `edge` and `start`; None for whole sequences.
        batch: Index of the sequence.
        count: Its tokens.
    """
    if kept is None:
        return 0
    return jnp.where(count > 0, jnp.clip(kept.start[batch] - kept.edge[batch], 0, ROWS), 0)


def fetch_rows(source: Any, target: Any, barrier: Any) -> None:
    """Starts to read rows (64, columns) of GPU memory, which may begin anywhere, into (pieces, 64, 64)."""
    for piece in range(target.shape[0]):
        plgpu.copy_gmem_to_smem(source.at[:, pl.ds(piece * ROWS, ROWS)], target.at[piece], barrier)


def send_rows(source: Any, target: Any) -> None:
    """Starts to write shared memory (pieces, 64, 64) to GPU memory (64, columns)."""
    for piece in range(source.shape[0]):
        plgpu.copy_smem_to_gmem(source.at[piece], target.at[:, pl.ds(piece * ROWS, ROWS)])


def with_front(front: int, *arrays: jax.Array) -> list[jax.Array]:
    """Returns tokens (B, T, ...) with zeros before the first ones.

    Mosaic's interpreter, unlike TMA, has no windows that begin before an array. There all of them are moved on.
    """
    return [jnp.pad(a, [(0, 0), (front, 0)] + [(0, 0)] * (a.ndim - 2)) for a in arrays]


def clear_rows(left: Any, *refs: Any, interpret: bool) -> None:
    """Replaces the rows of a chunk after the end of its sequence, which may hold anything, by zeros.

    Args:
        left: Rows of the sequence from the chunk's first on; nothing is done for a whole chunk.
        *refs: Shared memory (pieces, 64, 64).
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """

    @pl.when(left < ROWS)
    def _() -> None:
        for ref in refs:
            if interpret:
                _where(jnp.arange(ROWS) < left, None, ref)
                continue

            @inline(plgpu.RefType(PLAIN), _NUMBER)
            def clear(ref: Any, left: Any) -> None:
                row = _row()
                after = arith.cmpi(arith.CmpIPredicate.sge, row, left.registers.item())
                with mgpu.when(after):
                    _zero(ref, row)

            clear(ref, jnp.int32(left))
        plgpu.commit_smem()


def clear_infinite(squares: Any, ref: Any, interpret: bool) -> None:
    """Replaces rows whose square is not finite by zeros; `commit_smem` must follow.

    Args:
        squares: Shared memory (64,) float32.
        ref: Shared memory (pieces, 64, 64).
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    if interpret:
        _where(squares[...] < jnp.inf, None, ref)
        return

    @inline(plgpu.RefType(), plgpu.RefType(PLAIN))
    def clear(squares: Any, ref: Any) -> None:
        row = _row()
        square = memref.load(squares, [_index(row)])
        fine = arith.cmpf(arith.CmpFPredicate.OLT, square, mgpu.c(float("inf"), ir.F32Type.get()))
        with mgpu.when(arith.xori(fine, mgpu.c(1, fine.type))):
            _zero(ref, row)

    clear(squares, ref)


def put_rows(before: Any, *pairs: tuple[Any, Any], interpret: bool) -> None:
    """Writes rows that are kept over the first rows of a chunk.

    Args:
        before: How many rows there are; nothing is done for none.
        *pairs: Rows in GPU memory (64, columns), and the shared memory (pieces, 64, 64).
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """

    @pl.when(before > 0)
    def _() -> None:
        for kept, ref in pairs:
            if interpret:
                _where(jnp.arange(ROWS) >= before, kept[...], ref)
                continue

            @inline(plgpu.RefType(), plgpu.RefType(PLAIN), _NUMBER)
            def put(kept: Any, ref: Any, before: Any) -> None:
                row = _row()
                pieces, kind = ir.MemRefType(ref.type).shape[0], _kind(ref)
                with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, row, before.registers.item())):
                    for piece in range(pieces):
                        for column, place in _shares(row):
                            at = arith.addi(column, i32(piece * ROWS))
                            numbers = vector.load(kind, kept, [_index(row), _index(at)])
                            vector.store(numbers, ref, _places(piece, row, place))

            put(kept, ref, jnp.int32(before))
        plgpu.commit_smem()


def take_rows(ref: Any, out: Any, before: Any) -> None:
    """Writes the rows of a chunk after its first ones to the first rows of GPU memory; every thread has then read them.

    Args:
        ref: Shared memory (1, 64, 64), which threads have written.
        out: GPU memory (T, 64).
        before: How many rows of the chunk come before, int32.
    """
    rows = out.shape[0]

    @inline(plgpu.RefType(PLAIN), plgpu.RefType(), _NUMBER)
    def take(ref: Any, out: Any, before: Any) -> None:
        row = _row()
        token = arith.subi(row, before.registers.item())
        there = arith.cmpi(arith.CmpIPredicate.sge, token, i32(0))
        there = arith.andi(there, arith.cmpi(arith.CmpIPredicate.slt, token, i32(rows)))
        with mgpu.when(there):
            for column, place in _shares(row):
                numbers = vector.load(_kind(ref), ref, _places(0, row, place))
                vector.store(numbers, out, [_index(token), _index(column)])
        mgpu.utils.warpgroup_barrier()

    take(ref, out, jnp.int32(before))


def _where(kept: jax.Array, other: Any, ref: Any) -> None:
    """Replaces rows that are not kept, in the interpreter."""
    for piece in range(ref.shape[0]):
        columns = slice(piece * ROWS, (piece + 1) * ROWS)
        ref[piece] = jnp.where(kept[:, None], ref[piece], 0 if other is None else other[:, columns]).astype(ref.dtype)


def _row() -> Any:
    """Returns the row of a thread."""
    return arith.divui(thread_of_warpgroup(), i32(_SHARES))


def _shares(row: Any) -> list[tuple[Any, Any]]:
    """Returns the first columns of a thread's 16 bytes of a row, as they are numbered and as they are stored."""
    first = arith.muli(arith.remui(thread_of_warpgroup(), i32(_SHARES)), i32(ROWS // _WORDS // _SHARES))
    line = arith.remui(row, i32(_WORDS))
    found = []
    for i in range(ROWS // _WORDS // _SHARES):
        share = arith.addi(first, i32(i))
        found.append((arith.muli(share, i32(_WORDS)), arith.muli(arith.xori(share, line), i32(_WORDS))))
    return found


def _zero(ref: Any, row: Any) -> None:
    kind = _kind(ref)
    nothing = vector.broadcast(kind, mgpu.c(0.0, kind.element_type))
    for piece in range(ir.MemRefType(ref.type).shape[0]):
        for column, _ in _shares(row):
            vector.store(nothing, ref, _places(piece, row, column))


def _places(piece: int, row: Any, column: Any) -> list[Any]:
    return [mgpu.c(piece, ir.IndexType.get()), _index(row), _index(column)]


def _index(number: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), number)


def _kind(ref: Any) -> Any:
    """Returns the type of 16 bytes of numbers."""
    return ir.VectorType.get((_WORDS,), ir.MemRefType(ref.type).element_type)

"""Forward substitution for the chunk of a warpgroup by mma.sync, in the order of `MmaDeltaRuleContract`.

A warp has 16 columns of T, which do not depend on other columns: it multiplies its columns of the rows so far by the
coefficients of 16 more rows. Rows of the same 16 depend on one another. Eight of them are computed at once several
times, each time from the rows of the time before: a row is right as soon as all rows before it are, and then stays.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector

from pallas_kernels.delta_rule.slots import unpacked
from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.tile import ROWS, TILE, WARP, i32, thread_of_warp, thread_of_warpgroup, tiled

_BLOCK: Final = 16
_BLOCKS: Final = ROWS // _BLOCK
_HALF: Final = 8  # rows of one instruction

_Words = list[Any]  # four words of 32 bits: the columns of a warp (16) of 16 rows
_Numbers = list[Any]  # the same as sums: two times four float32 numbers


class Known(NamedTuple):
    """Rows of a chunk that were computed before.

    Attributes:
        count: How many, int32; the first ones.
        inverse: GPU memory (64, 64) float32, T with the rows first, or as `slots.packed`, (32, 65). Other rows may hold
            anything.
        decay: GPU memory (64,) float32, G.
    """

    count: Any
    inverse: Any
    decay: Any


def substitute(
    coefficients: Any, seen: Any, betas: Any, known: Known | None, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns T and P of a chunk, both (64, 64) with the columns first, of the dtype of the operands.

    Elements of T that are not finite are replaced by zeros, and `betas` of their rows by nan.

    Args:
        coefficients: Shared memory (64, 64) of 16-bit numbers, stored as `tile.tiled` says: -a of the contract for
            columns before the row, zeros elsewhere.
        seen: Shared memory of the same form: the coefficients of P, zeros for columns after the row.
        betas: Shared memory (64,) float32.
        known: The rows of T that were computed before, whose coefficients are zeros.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    dtype = coefficients.dtype
    if interpret:
        return _in_jax(coefficients, seen, betas, known)
    given = () if known is None else (jnp.int32(known.count), known.inverse)
    types = () if known is None else (plgpu.Layout.WG_SPLAT(()), plgpu.RefType())
    tile = held((ROWS, ROWS), TILE, dtype)

    operand = plgpu.RefType(tiled(dtype, ROWS))

    @inline(operand, operand, plgpu.RefType(), *types, result=(tile, tile))
    def run(coefficients: Any, seen: Any, betas: Any, *known: Any) -> Any:
        kind = ir.MemRefType(coefficients.type).element_type
        stored = (known[0].registers.item(), known[1]) if known else None
        chunk = _Chunk(kind, _tiles(coefficients), _tiles(seen), stored)
        rows = chunk.solved(_same)
        word = ir.IntegerType.get_signless(32)
        broken: Any = _any_of_warp(chunk.not_finite(rows))
        branches: Any = scf.IfOp  # the generated class, whose arguments are others, to mypy
        repair = branches(broken, [word] * (4 * _BLOCKS), has_else=True)
        with ir.InsertionPoint(repair.then_block):
            found = chunk.solved(chunk.replaced)
            chunk.mark(found, betas)
            scf.yield_([chunk.replaced(w) for words in found for w in words])
        with ir.InsertionPoint(repair.else_block):
            scf.yield_([w for words in rows for w in words])
        rows = [list(repair.results[4 * b : 4 * b + 4]) for b in range(_BLOCKS)]
        return _tile(chunk, rows), _tile(chunk, chunk.weighted(rows))

    return run(coefficients, seen, betas, *given)


def _in_jax(coefficients: Any, seen: Any, betas: Any, known: Known | None) -> tuple[jax.Array, jax.Array]:
    dtype, row = coefficients.dtype, jnp.arange(ROWS)
    a, b, factors = (x[...].astype(jnp.float32) for x in (coefficients, seen, betas))
    first = jnp.eye(ROWS)
    if known is not None:
        stored = known.inverse[...]
        stored = jnp.tril(stored) if stored.shape == first.shape else unpacked(stored)
        first = jnp.where((row < known.count)[:, None], stored, first)

    def next_row(t: Any, rows: jax.Array) -> jax.Array:
        one = jnp.dot(a[t], rows, precision=lax.Precision.HIGHEST) + first[t]
        found: jax.Array = rows.at[t].set(one.astype(dtype).astype(jnp.float32))
        return jnp.where(jnp.isfinite(found), found, 0)

    rows = lax.fori_loop(0, ROWS, next_row, jnp.zeros((ROWS, ROWS), jnp.float32))
    raw = jnp.dot(a, rows, precision=lax.Precision.HIGHEST) + first
    betas[...] = jnp.where(jnp.isfinite(raw.astype(dtype)).all(1), factors, jnp.nan)
    weights = jnp.dot(b, rows, precision=lax.Precision.HIGHEST)
    plgpu.commit_smem()
    return rows.T.astype(dtype), weights.T.astype(dtype)


class _Chunk:
    """The instructions on the columns of a warp.

    Attributes:
        kind: Type of the elements.
        coefficients: Returns the operand of a block of 16 rows and one of 16 columns: two words for each 8 rows.
        seen: The same for P.
        known: How many rows of T were computed before, and GPU memory (64, 64) float32 with them.
    """

    def __init__(
        self, kind: Any, coefficients: Callable[..., Any], seen: Callable[..., Any], known: tuple[Any, Any] | None
    ) -> None:
        self.kind, self.coefficients, self.seen, self.known = kind, coefficients, seen, known

    def solved(self, clean: Callable[[Any], Any]) -> list[_Words]:
        """Returns the rows of T; `clean` is applied to words before they are multiplied."""
        lines: list[_Words] = []
        for block in range(_BLOCKS):
            start = self._first(block)
            for j in range(block):
                operand, left = self.coefficients(block, j), [clean(w) for w in lines[j]]
                start = [self._product(left, operand[n], start[n]) for n in range(2)]
            operand = self.coefficients(block, block)
            zero = i32(0)
            first = self._packed(start[0])
            for _ in range(_HALF - 1):
                left = [*map(clean, first), zero, zero]
                first = self._packed(self._product(left, operand[0], start[0]))
            above, second = [clean(w) for w in first], [zero, zero]
            for _ in range(_HALF):
                left = [*above, *map(clean, second)]
                second = self._packed(self._product(left, operand[1], start[1]))
            lines.append([*first, *second])
        return lines

    def weighted(self, rows: list[_Words]) -> list[_Words]:
        """Returns the rows of P."""
        found, nothing = [], _float(0.0)
        for block in range(_BLOCKS):
            sums = [[nothing] * 4, [nothing] * 4]
            for j in range(block + 1):
                operand = self.seen(block, j)
                sums = [self._product(rows[j], operand[n], sums[n]) for n in range(2)]
            positive = [[arith.addf(x, nothing) for x in half] for half in sums]  # no zero is negative
            found.append([word for half in positive for word in self._packed(half)])
        return found

    def not_finite(self, rows: list[_Words]) -> Any:
        """Returns a word that has 0x80008000 & word != 0 if a number is nan or infinite."""
        found = i32(0)
        for word in (w for words in rows for w in words):
            found = arith.ori(found, arith.addi(arith.andi(word, self._exponents), self._carry))
        return arith.andi(found, _word(0x80008000))

    def replaced(self, word: Any) -> Any:
        """Returns two numbers, those that are not finite replaced by zeros."""
        raised = arith.addi(arith.andi(word, self._exponents), self._carry)
        kept = arith.andi(arith.shrui(arith.xori(raised, _word(0xFFFFFFFF)), i32(15)), _word(0x00010001))
        return arith.andi(word, arith.muli(kept, i32(0xFFFF)))

    def mark(self, rows: list[_Words], betas: Any) -> None:
        """Writes nan to `betas` for each row with a number that is not finite."""
        pair = arith.muli(arith.remui(thread_of_warp(), i32(4)), i32(2))
        for block, words in enumerate(rows):
            for n in range(2):
                for word in words[2 * n : 2 * n + 2]:
                    raised = arith.addi(arith.andi(word, self._exponents), self._carry)
                    for i in range(2):
                        bad = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(raised, _word(0x8000 << (16 * i))), i32(0))
                        row = arith.addi(pair, i32(block * _BLOCK + n * _HALF + i))
                        with mgpu.when(bad):
                            memref.store(_float(float("nan")), betas, [arith.index_cast(ir.IndexType.get(), row)])

    @property
    def _exponents(self) -> Any:
        return _word(0x7F807F80 if self._bfloat16 else 0x7C007C00)

    @property
    def _carry(self) -> Any:
        return _word(0x00800080 if self._bfloat16 else 0x04000400)

    @property
    def _bfloat16(self) -> bool:
        return bool(self.kind == ir.BF16Type.get())

    def _first(self, block: int) -> list[_Numbers]:
        """Returns the columns of the warp of 16 rows of the identity, or of T where it is known."""
        if self.known is None:
            return self._identity(block)
        count, inverse = self.known
        branches: Any = scf.IfOp
        f32 = ir.F32Type.get()
        some = arith.cmpi(arith.CmpIPredicate.sgt, count, i32(block * _BLOCK))
        branch = branches(some, [f32] * 8, has_else=True)
        with ir.InsertionPoint(branch.then_block):
            numbers = []
            for (row, column), one in zip(self._places(block), _joined(self._identity(block)), strict=True):
                place = _packed_place(row, column) if ir.MemRefType(inverse.type).shape[0] < ROWS else (row, column)
                at = [arith.index_cast(ir.IndexType.get(), i) for i in place]
                below = arith.cmpi(arith.CmpIPredicate.sle, column, row)
                stored = arith.select(below, memref.load(inverse, at), _float(0.0))
                numbers.append(arith.select(arith.cmpi(arith.CmpIPredicate.slt, row, count), stored, one))
            scf.yield_(numbers)
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(_joined(self._identity(block)))
        return [list(branch.results[:4]), list(branch.results[4:])]

    def _places(self, block: int) -> list[tuple[Any, Any]]:
        """Returns row and column of each number of a thread in 16 rows."""
        lane, warp = thread_of_warp(), arith.divui(thread_of_warpgroup(), i32(WARP))
        column = arith.addi(arith.muli(warp, i32(_BLOCK)), arith.divui(lane, i32(4)))
        row = arith.addi(arith.muli(arith.remui(lane, i32(4)), i32(2)), i32(block * _BLOCK))
        return [
            (arith.addi(row, i32(_HALF * n + i)), arith.addi(column, i32(8 * half)))
            for n in range(2)
            for half in range(2)
            for i in range(2)
        ]

    def _identity(self, block: int) -> list[_Numbers]:
        """Returns the columns of the warp of 16 rows of the identity."""
        equal = [arith.cmpi(arith.CmpIPredicate.eq, column, row) for row, column in self._places(block)]
        found = [arith.select(e, _float(1.0), _float(0.0)) for e in equal]
        return [found[:4], found[4:]]

    def _product(self, left: Sequence[Any], right: Sequence[Any], sums: Sequence[Any]) -> _Numbers:
        """Returns sums + left @ right for 16 columns, 16 rows that are summed over, and 8 rows."""
        f32 = ir.F32Type.get()
        struct = llvm.inline_asm(
            llvm.StructType.get_literal([f32] * 4),
            [*left, *right, *sums],
            f"mma.sync.aligned.m16n8k16.row.col.f32.{self.kind}.{self.kind}.f32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4),
            asm_dialect=0,
            has_side_effects=True,
        )
        return [llvm.extractvalue(f32, struct, [i]) for i in range(4)]

    def _packed(self, numbers: Sequence[Any]) -> list[Any]:
        """Returns rounded numbers, two in a word."""
        word = ir.IntegerType.get_signless(32)
        return [
            mgpu.utils.inline_ptx(f"cvt.rn.{self.kind}x2.f32 $0, $2, $1;", low, high, result_types=word)
            for low, high in zip(numbers[::2], numbers[1::2], strict=True)
        ]


def _packed_place(row: Any, column: Any) -> tuple[Any, Any]:
    """Returns where `slots.packed` has an element on the diagonal or below it; others give some place."""
    upper = arith.cmpi(arith.CmpIPredicate.slt, row, i32(ROWS // 2))
    of_row = arith.select(upper, arith.subi(i32(ROWS // 2 - 1), row), arith.subi(row, i32(ROWS // 2)))
    return of_row, arith.select(upper, arith.subi(i32(ROWS), column), column)


def _joined(halves: list[_Numbers]) -> _Numbers:
    return [number for half in halves for number in half]


def _same(word: Any) -> Any:
    return word


def _tiles(ref: Any) -> Callable[[int, int], list[list[Any]]]:
    """Returns a function that loads 16 x 16 numbers of a tile as an operand: two words for each 8 rows.

    Lane i gives the address of row i % 8 of square i / 8; the squares are two of 8 columns for each 8 rows.
    """
    lane = thread_of_warp()
    line, square = arith.remui(lane, i32(8)), arith.divui(lane, i32(8))
    row = arith.addi(arith.muli(arith.divui(square, i32(2)), i32(8)), line)
    base = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(ref))
    base = arith.addi(base, arith.muli(row, i32(2 * ROWS)))
    piece = arith.xori(arith.remui(square, i32(2)), line)

    def load(rows: int, columns: int) -> list[list[Any]]:
        word = ir.IntegerType.get_signless(32)
        place = arith.addi(base, arith.muli(arith.xori(piece, i32(2 * columns)), i32(16)))
        struct = llvm.inline_asm(
            llvm.StructType.get_literal([word] * 4),
            [arith.addi(place, i32(rows * _BLOCK * 2 * ROWS))],
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,r,~{memory}",
            asm_dialect=0,
            has_side_effects=True,
        )
        words = [llvm.extractvalue(word, struct, [i]) for i in range(4)]
        return [words[:2], words[2:]]

    return load


def _any_of_warp(word: Any) -> Any:
    """Returns whether a word is not zero in some lane, the same for all lanes."""
    found = mgpu.utils.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }",
        word,
        result_types=ir.IntegerType.get_signless(32),
        has_side_effects=True,
    )
    return arith.cmpi(arith.CmpIPredicate.ne, found, i32(0))


def _tile(chunk: _Chunk, rows: list[_Words]) -> Any:
    """Returns words as an array (64, 64)."""
    layout, kind = mgpu.WGMMA_LAYOUT, ir.VectorType.get((2,), chunk.kind)
    words = [w for line in rows for w in line]
    registers = np.empty(len(words), dtype=object)
    for at, word in enumerate(words):
        one = vector.broadcast(ir.VectorType.get((1,), word.type), word)
        registers[at] = vector.bitcast(kind, one)
    return fragmented(registers.reshape(layout.registers_shape((ROWS, ROWS))), layout)


def _float(value: float) -> Any:
    return mgpu.c(value, ir.F32Type.get())


def _word(value: int) -> Any:
    return i32(value if value < 1 << 31 else value - (1 << 32))

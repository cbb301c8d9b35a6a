"""Asynchronous products of a warpgroup: other code overlaps between start and finish.

Code that overlaps an in-flight product must not touch its accumulator or its operands in registers, or ptxas serialises
the products; it then warns (C7513 and others), also when compiling without a GPU.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm, vector

from pallas_kernels.parts.hopper.inline import fragmented, held, inline
from pallas_kernels.parts.hopper.registers import element, joined, number_of, with_number
from pallas_kernels.parts.hopper.tile import PLAIN, ROW, ROWS, TILE, tiled

WIDEST: Final = 256
"""Most columns of one instruction."""

_K: Final = 16  # elements of K in one instruction
_A_REGISTERS: Final = 4
_TILE_ROWS: Final = 8
_NO_FLAGS: Final = llvm.IntegerOverflowFlags.none


def start(
    total: jax.Array | None,
    left: jax.Array | tuple[Any, ...],
    right: tuple[Any, ...],
    *,
    left_along: bool = True,
    right_along: bool = True,
    widest: int = WIDEST,
    interpret: bool,
) -> jax.Array:
    """Starts total + left @ right, in ascending steps of 16 along K.

    Operands in shared memory are stored as `tile.tiled` says, in pieces that follow one another along K. A piece may
    also be a stack (pieces, rows, 64) of plain rows, see `tile.PLAIN`, which stands for a matrix (rows, pieces * 64).

    Args:
        total: (64, n) float32, or None for zeros.
        left: (64, K) of 16-bit numbers in registers, or pieces (64, k) of shared memory.
        right: Pieces (n, k) of shared memory.
        left_along: Whether pieces of `left` lie along K; else they are (k, 64).
        right_along: The same for `right`; else they are (k, n).
        widest: Most columns of one instruction, a multiple of a tile's; it does not affect the bits.
        interpret: Whether the kernel runs in Mosaic's interpreter.

    Returns:
        (64, n) float32, valid only after `finish`.
    """
    if interpret:
        return _product(total, left, right, left_along, right_along)
    in_registers = not isinstance(left, tuple)
    arrays = [x for x in (total, left) if x is not None and not isinstance(x, tuple)]
    refs = right if not isinstance(left, tuple) else (*left, *right)
    columns = _shape(right[0])[0 if right_along else 1]

    @inline(*[TILE] * len(arrays), *[ref_type(ref) for ref in refs], result=tile_type(columns))
    def issue(*given: Any) -> Any:
        held, places = given[: len(arrays)], [_in_tiles(place) for place in given[len(arrays) :]]
        if len(held) == 2:
            held = tuple(mgpu.optimization_barrier(*held))
        elif held:
            held = (mgpu.optimization_barrier(*held),)
        nvvm.wgmma_fence_aligned()
        sums = [] if total is None else accumulated(held[0])
        rows = _words(held[-1]) if in_registers else steps(places[: -len(right)], left_along)
        transposed = f"{'' if in_registers else f'{int(not left_along)}, '}{int(not right_along)}"
        kind = ir.MemRefType(places[-1].type).element_type
        parts = [(at, min(widest, columns - at)) for at in range(0, columns, widest)]
        found = [sums[at // 2 : (at + count) // 2] for at, count in parts]
        for row, step in zip(rows, steps(places[-len(right) :], right_along), strict=True):
            for i, (at, count) in enumerate(parts):
                place = _moved(step[0], _offset(places[-1], at, right_along)) if at else step[0]
                found[i] = one_step(found[i], count // 2, row, place, kind, transposed)
        nvvm.wgmma_commit_group_sync_aligned()
        return accumulator([number for part in found for number in part], columns)

    return issue(*arrays, *refs)


def finish(after: int, *arrays: jax.Array, interpret: bool) -> tuple[jax.Array, ...]:
    """Waits for all started products except the last `after`.

    Args:
        after: Number of products that may stay in flight.
        *arrays: The products, and other float32 arrays of 64 rows whose consumers must come after the wait: if an
            operand in registers were overwritten earlier, ptxas would serialise the products.
        interpret: Whether the kernel runs in Mosaic's interpreter.

    Returns:
        The arrays.
    """
    if interpret:
        return arrays

    @inline(*(TILE,) * len(arrays), result=tuple(tile_type(array.shape[1]) for array in arrays))
    def wait(*arrays: Any) -> Any:
        nvvm.wgmma_wait_group_sync_aligned(after)
        return tuple(mgpu.optimization_barrier(array) for array in arrays)

    return wait(*arrays)


def share(tile: jax.Array, ref: Any, interpret: bool) -> None:
    """Writes a tile of 64 rows to shared memory, for wgmma or TMA.

    There is no barrier: readers wait on one at which all threads arrive afterwards.

    Args:
        tile: (64, n).
        ref: Shared memory of its shape and dtype, stored as `tile.tiled` says, no longer read by any thread.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """
    if interpret:
        ref[...] = tile
        plgpu.commit_smem()
        return

    @inline(TILE, ref_type(ref))
    def write(tile: Any, ref: Any) -> None:
        tile.store_tiled(ref, swizzle=ir.MemRefType(ref.type).shape[-1] * mgpu.utils.bitwidth(tile.mlir_dtype) // 8)
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    write(tile, ref)


def await_sums(sums: jax.Array, interpret: bool) -> None:
    """Keeps ptxas from moving the wait of a following `finish` before the computation of non-negative sums (64,).

    The wait has no operands, so ptxas may move it, but not before an instruction with a side effect, here a pause that
    depends on the sums and is never executed.
    """
    if interpret:
        return

    @inline(ROW)
    def hold(sums: Any) -> None:
        for register in sums.registers.flat:
            mgpu.utils.inline_ptx(
                "{ .reg .pred p; setp.lt.f32 p, $0, 0f00000000; @p nanosleep.u32 0; }",
                number_of(register),
                has_side_effects=True,
            )

    hold(sums)


def after_wait(numbers: jax.Array, interpret: bool) -> jax.Array:
    """Keeps ptxas from moving the consumers of numbers for rows (64,) before a barrier wait.

    It moves plain instructions, but not a shuffle, here of each thread with itself.
    """
    if interpret:
        return numbers

    @inline(ROW, result=held((ROWS,), ROW))
    def exchange(numbers: Any) -> Any:
        registers = numbers.registers.copy()
        for at in range(registers.size):
            register = registers.flat[at]
            registers.flat[at] = with_number(register, mgpu.utils.shfl_bfly(number_of(register), 0))
        return fragmented(registers, numbers.layout)

    return exchange(numbers)


def ref_type(ref: Any) -> Any:
    """Returns the type of shared memory that is stored as `tile.tiled` or `tile.PLAIN` says, for `inline`."""
    return plgpu.RefType(PLAIN if len(ref.shape) == 3 else tiled(ref.dtype, ref.shape[1]))


def tile_type(columns: int) -> Any:
    """Returns the type of an accumulator (64, columns), for `inline`."""
    return held((ROWS, columns), TILE)


def _product(total: Any, left: Any, right: tuple[Any, ...], left_along: bool, right_along: bool) -> jax.Array:
    def joined(pieces: tuple[Any, ...], along: bool) -> jax.Array:
        """Returns (K, n)."""
        found = [_matrix(piece[...]).astype(jnp.float32) for piece in pieces]
        return jnp.concatenate([x.T if along else x for x in found])

    rows = joined(left, left_along).T if isinstance(left, tuple) else left.astype(jnp.float32)
    columns = joined(right, right_along)
    plgpu.commit_smem()  # ordinary reads, before TMA writes again
    product = jnp.dot(rows, columns, precision=lax.Precision.HIGHEST)
    return product if total is None else total + product


def _shape(ref: Any) -> tuple[int, int]:
    """Returns the shape of the matrix that an operand stands for."""
    if len(ref.shape) == 2:
        return ref.shape[0], ref.shape[1]
    pieces, rows, width = ref.shape
    return rows, pieces * width


def _matrix(x: jax.Array) -> jax.Array:
    """Returns the matrix that an operand stands for."""
    return x if x.ndim == 2 else x.transpose(1, 0, 2).reshape(_shape(x))


def _in_tiles(ref: Any) -> Any:
    """Returns an operand's shared memory in tiles of 8 rows; those of a stack of plain rows are tiles already."""
    if ir.MemRefType(ref.type).rank == 4:
        return ref
    return mgpu.utils.memref_transpose(mgpu.utils.memref_unfold(ref, 1, (None, _TILE_ROWS)), (1, 0, 2, 3))


def steps(refs: Sequence[Any], along: bool) -> Iterator[list[Any]]:
    """Yields the descriptor of each step of K of an operand in shared memory, in a list of one."""
    for ref in refs:
        kind = ir.MemRefType(ref.type)
        groups, squares, rows, width = kind.shape
        (stride, atom, *_), _ = kind.get_strides_and_offset()  # a slice of the columns has the strides of all
        atom, stride = atom * 2, stride * 2
        base = _descriptor(ref, 16 if along else atom, stride)
        if along:
            offsets = [at // width * atom + at % width * 2 for at in range(0, squares * width, _K)]
        else:
            offsets = [at // rows * stride for at in range(0, groups * rows, _K)]
        for offset in offsets:
            yield [_moved(base, offset)]


def _offset(ref: Any, column: int, along: bool) -> int:
    """Returns the byte offset of a column of an operand."""
    kind = ir.MemRefType(ref.type)
    _, _, rows, width = kind.shape
    (stride, atom, *_), _ = kind.get_strides_and_offset()
    return column // rows * stride * 2 if along else column // width * atom * 2


def _descriptor(ref: Any, leading: int, stride: int) -> Any:
    """Returns wgmma's descriptor of swizzled shared memory.

    Args:
        ref: The memory, in tiles of 8 rows.
        leading: Bytes from one tile to the next along its rows, if the operand does not lie along K.
        stride: Bytes from 8 rows to the next 8.
    """
    mode = {128: 1, 64: 2, 32: 3}[ir.MemRefType(ref.type).shape[-1] * 2]
    address = llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(ref))
    start = llvm.lshr(llvm.and_(address, _long(0x3FFFF)), _long(4))
    return llvm.or_(start, _long(mode << 62 | stride >> 4 << 32 | leading >> 4 << 16))


def _moved(descriptor: Any, offset: int) -> Any:
    return llvm.add(descriptor, _long(offset >> 4), overflow_flags=_NO_FLAGS)


def one_step(sums: list[Any], count: int, left: list[Any], right: Any, kind: Any, transposed: str) -> list[Any]:
    """Issues one instruction; without sums it starts from zeros.

    Args:
        sums: The accumulator's registers, or nothing.
        count: Their number.
        left: The rows: registers, or a descriptor.
        right: The descriptor of the columns.
        kind: Type of the elements.
        transposed: Whether operands in shared memory do not lie along K.
    """
    in_registers = len(left) > 1
    first = count + len(sums)
    rows = [f"${first + i}" for i in range(len(left))]
    outputs = ", ".join(f"${i}" for i in range(count))
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(bool(sums))}, 0;"
        f" wgmma.mma_async.sync.aligned.m64n{2 * count}k{_K}.f32.{kind}.{kind} {{{outputs}}},"
        f" {'{' + ', '.join(rows) + '}' if in_registers else rows[0]}, ${first + len(left)}, p, 1, 1, {transposed}; }}"
    )
    constraints = ["=f"] * count + [str(i) for i in range(len(sums))] + ["r" if in_registers else "l"] * len(left)
    f32 = ir.F32Type.get()
    struct = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * count),
        [*sums, *left, right],
        text,
        ",".join([*constraints, "l"]),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(f32, struct, [i]) for i in range(count)]


def _words(array: Any) -> list[list[Any]]:
    """Returns the registers of 16-bit numbers in wgmma's order for each step of K: four words of 32 bits."""
    word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    words = [element(vector.bitcast(word, register), 0) for register in array.registers.flat]
    return [words[at : at + _A_REGISTERS] for at in range(0, len(words), _A_REGISTERS)]


def accumulated(array: Any) -> list[Any]:
    """Returns the registers of an accumulator as `one_step` takes them."""
    return [element(register, i) for register in array.registers.flat for i in range(2)]


def accumulator(numbers: list[Any], columns: int) -> Any:
    """Returns registers of an accumulator as an array (64, columns)."""
    layout = mgpu.WGMMA_LAYOUT
    registers = np.empty(len(numbers) // 2, dtype=object)
    for at in range(registers.size):
        registers[at] = joined(numbers[2 * at : 2 * at + 2])
    registers = registers.reshape(layout.registers_shape((ROWS, columns)))
    return fragmented(registers, layout)


def _long(value: int) -> Any:
    return mgpu.c(value if value < 1 << 63 else value - (1 << 64), ir.IntegerType.get_signless(64))

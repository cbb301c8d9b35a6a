"""Products of a warpgroup that are started in one place and finished in another: other work runs beside them.

What runs beside a product must not touch its accumulator or its operands in registers, or ptxas waits for each product
by itself; it says so in warnings (C7513 and others), which compiling for a GPU without one shows.
"""

from typing import Any, Final

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm, vector

from pallas_kernels.parts.hopper.tile import ROW, ROWS, TILE, tiled

_K: Final = 16  # elements of K in one instruction
_A_REGISTERS: Final = 4
_NO_FLAGS: Final = llvm.IntegerOverflowFlags.none


def start_scores(queries: Any, keys: Any, interpret: bool) -> jax.Array:
    """Starts queries @ keys^T.

    Args:
        queries: Shared memory (64, H) of 16-bit numbers, stored as `tile.tiled` says.
        keys: The same, (n, H).
        interpret: Whether Mosaic's interpreter runs the kernel.

    Returns:
        (64, n) float32, not to be touched before `finish`.
    """
    if interpret:
        return _scores(queries, keys)
    inline: Any = plgpu.inline_mgpu(arg_types=(_ref(queries), _ref(keys)), return_type=_tile(keys.shape[0]))

    @inline  # type: ignore[untyped-decorator]
    def start(_: Any, queries: Any, keys: Any) -> Any:
        nvvm.wgmma_fence_aligned()
        scores = _issue_scores(queries, keys)
        nvvm.wgmma_commit_group_sync_aligned()
        return scores

    started: jax.Array = start(queries, keys)
    return started


def start_values(weights: jax.Array, total: jax.Array, values: Any, interpret: bool) -> jax.Array:
    """Starts total + weights @ values.

    Args:
        weights: (64, n) of 16-bit numbers.
        total: (64, H) float32.
        values: Shared memory (n, H), stored as `tile.tiled` says.
        interpret: Whether Mosaic's interpreter runs the kernel.

    Returns:
        (64, H) float32, not to be touched before `finish`.
    """
    if interpret:
        return _values(weights, total, values)
    inline: Any = plgpu.inline_mgpu(arg_types=(TILE, TILE, _ref(values)), return_type=_tile(total.shape[1]))

    @inline  # type: ignore[untyped-decorator]
    def start(_: Any, weights: Any, total: Any, values: Any) -> Any:
        weights, total = mgpu.optimization_barrier(weights, total)
        nvvm.wgmma_fence_aligned()
        total = _issue_values(weights, total, values)
        nvvm.wgmma_commit_group_sync_aligned()
        return total

    started: jax.Array = start(weights, total, values)
    return started


def finish(after: int, *arrays: jax.Array, interpret: bool) -> tuple[jax.Array, ...]:
    """Waits for all products but the last `after` of those that were started.

    Args:
        after: How many.
        *arrays: The products, and other arrays of 64 rows and float32: what is made of them is made behind the wait.
            Were an operand in registers overwritten before, ptxas would wait for each product.
        interpret: Whether Mosaic's interpreter runs the kernel.

    Returns:
        The arrays.
    """
    if interpret:
        return arrays
    inline: Any = plgpu.inline_mgpu(
        arg_types=(TILE,) * len(arrays), return_type=tuple(_tile(array.shape[1]) for array in arrays)
    )

    @inline  # type: ignore[untyped-decorator]
    def wait(_: Any, *arrays: Any) -> Any:
        nvvm.wgmma_wait_group_sync_aligned(after)
        return tuple(mgpu.optimization_barrier(array) for array in arrays)

    finished: tuple[jax.Array, ...] = wait(*arrays)
    return finished


def await_sums(sums: jax.Array, interpret: bool) -> None:
    """Keeps ptxas from moving the wait of a `finish` that follows before what non-negative sums (64,) are made of.

    It would, as the wait has no operands; but not before an instruction with a side effect, here a pause that depends
    on the sums and is never taken.
    """
    if interpret:
        return
    inline: Any = plgpu.inline_mgpu(arg_types=(ROW,))

    @inline  # type: ignore[untyped-decorator]
    def hold(_: Any, sums: Any) -> None:
        for register in sums.registers.flat:
            number = _element(register, 0) if isinstance(register.type, ir.VectorType) else register
            mgpu.utils.inline_ptx(
                "{ .reg .pred p; setp.lt.f32 p, $0, 0f00000000; @p nanosleep.u32 0; }", number, has_side_effects=True
            )

    hold(sums)


def _ref(ref: Any) -> Any:
    return plgpu.RefType(tiled(ref.dtype, ref.shape[1]))


def _tile(columns: int) -> Any:
    return plgpu.ShapeDtypeStruct((ROWS, columns), jnp.dtype(jnp.float32), layout=TILE)


def _scores(queries: Any, keys: Any) -> jax.Array:
    left, right = (ref[...].astype(jnp.float32) for ref in (queries, keys))
    plgpu.commit_smem()  # ordinary reads, before the copy engine writes again
    return lax.dot_general(left, right, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)


def _values(weights: jax.Array, total: jax.Array, values: Any) -> jax.Array:
    right = values[...].astype(jnp.float32)
    plgpu.commit_smem()
    return total + jnp.dot(weights.astype(jnp.float32), right, precision=lax.Precision.HIGHEST)


def _issue_scores(queries: Any, keys: Any) -> Any:
    """Issues the instructions of a product of two operands in shared memory, both along K."""
    (groups, squares, rows, width), kind = ir.MemRefType(keys.type).shape, ir.MemRefType(keys.type).element_type
    atom = rows * width * 2
    left, right = (_descriptor(ref, 16, squares * atom) for ref in (queries, keys))
    scores: list[Any] = []
    for at in range(0, squares * width, _K):
        offset = at // width * atom + at % width * 2
        operands = [_moved(descriptor, offset) for descriptor in (left, right)]
        scores = _wgmma(scores, 4 * groups, operands[:1], operands[1], kind, "0, 0")
    return _array(scores, 8 * groups)


def _issue_values(weights: Any, total: Any, values: Any) -> Any:
    """Issues the instructions of a product of rows in registers by columns that lie one beside the other."""
    (groups, squares, rows, width), kind = ir.MemRefType(values.type).shape, ir.MemRefType(values.type).element_type
    atom = rows * width * 2
    right = _descriptor(values, atom, squares * atom)
    left, sums = _words(weights), _numbers(total)
    for step in range(8 * groups // _K):
        taken = left[_A_REGISTERS * step : _A_REGISTERS * (step + 1)]
        sums = _wgmma(sums, len(sums), taken, _moved(right, _K // rows * step * squares * atom), kind, "1")
    return _array(sums, squares * width)


def _descriptor(ref: Any, leading: int, stride: int) -> Any:
    """Returns wgmma's description of swizzled shared memory.

    Args:
        ref: The memory, in tiles of 8 rows.
        leading: Bytes from one tile to the next along its rows, if the operand does not lie along K.
        stride: Bytes from 8 rows to the next 8.
    """
    mode = {128: 1, 64: 2}[ir.MemRefType(ref.type).shape[-1] * 2]
    address = llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(ref))
    start = llvm.lshr(llvm.and_(address, _long(0x3FFFF)), _long(4))
    return llvm.or_(start, _long(mode << 62 | stride >> 4 << 32 | leading >> 4 << 16))


def _moved(descriptor: Any, offset: int) -> Any:
    return llvm.add(descriptor, _long(offset >> 4), overflow_flags=_NO_FLAGS)


def _wgmma(sums: list[Any], count: int, left: list[Any], right: Any, kind: Any, turned: str) -> list[Any]:
    """Issues one instruction; without sums it starts from zeros.

    Args:
        sums: The accumulator's registers, or nothing.
        count: Their number.
        left: The rows: registers, or a descriptor.
        right: The descriptor of the columns.
        kind: Type of the elements.
        turned: Whether operands in shared memory do not lie along K.
    """
    in_registers = len(left) > 1
    first = count + len(sums)
    rows = [f"${first + i}" for i in range(len(left))]
    outputs = ", ".join(f"${i}" for i in range(count))
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(bool(sums))}, 0;"
        f" wgmma.mma_async.sync.aligned.m64n{2 * count}k{_K}.f32.{kind}.{kind} {{{outputs}}},"
        f" {'{' + ', '.join(rows) + '}' if in_registers else rows[0]}, ${first + len(left)}, p, 1, 1, {turned}; }}"
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


def _words(array: Any) -> list[Any]:
    """Returns the registers of 16-bit numbers as wgmma takes them: 32 bits each."""
    word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    return [_element(vector.bitcast(word, register), 0) for register in array.registers.flat]


def _numbers(array: Any) -> list[Any]:
    return [_element(register, i) for register in array.registers.flat for i in range(2)]


def _array(numbers: list[Any], columns: int) -> Any:
    """Returns registers of an accumulator as an array (64, columns)."""
    pair, layout = ir.VectorType.get((2,), ir.F32Type.get()), mgpu.WGMMA_LAYOUT
    registers = np.empty(len(numbers) // 2, dtype=object)
    for at in range(registers.size):
        both = llvm.mlir_undef(pair)
        for i in range(2):
            both = vector.insert(numbers[2 * at + i], both, dynamic_position=[], static_position=_at(i))
        registers[at] = both
    registers = registers.reshape(layout.registers_shape((ROWS, columns)))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _at(index: int) -> Any:
    return ir.DenseI64ArrayAttr.get([index])


def _element(register: Any, index: int) -> Any:
    return vector.extract(register, dynamic_position=[], static_position=_at(index))


def _long(value: int) -> Any:
    return mgpu.c(value if value < 1 << 63 else value - (1 << 64), ir.IntegerType.get_signless(64))

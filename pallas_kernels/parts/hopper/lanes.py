"""Programs of the lanes of warps: every number is one of a lane, and each operation is an instruction of PTX.

A program is a function of `Lanes`, whose numbers have Python's operators for integers and truth values.
`tests/delta_rule/lanes.py` has the same operations in NumPy, which run programs on a CPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_kernels.parts.hopper.tile import i32, thread_of_warp
from pallas_kernels.parts.ptx import hexadecimal

_SLT, _SLE, _EQ = arith.CmpIPredicate.slt, arith.CmpIPredicate.sle, arith.CmpIPredicate.eq


class Number:
    """An int32, a float32, or a truth value of each lane; 16-bit floats are two in an int32."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __add__(self, other: Any) -> "Number":
        return Number(arith.addi(self.value, _value(other)))

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Number":
        return Number(arith.subi(self.value, _value(other)))

    def __rsub__(self, other: Any) -> "Number":
        return Number(arith.subi(_value(other), self.value))

    def __mul__(self, other: Any) -> "Number":
        return Number(arith.muli(self.value, _value(other)))

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> "Number":
        return Number(arith.divui(self.value, _value(other)))

    def __mod__(self, other: Any) -> "Number":
        return Number(arith.remui(self.value, _value(other)))

    def __and__(self, other: Any) -> "Number":
        return Number(arith.andi(self.value, _value(other)))

    def __or__(self, other: Any) -> "Number":
        return Number(arith.ori(self.value, _value(other)))

    def __invert__(self) -> "Number":
        one = mgpu.c(1, self.value.type)
        return Number(arith.xori(self.value, one))

    def __lt__(self, other: Any) -> "Number":
        return Number(arith.cmpi(_SLT, self.value, _value(other)))

    def __le__(self, other: Any) -> "Number":
        return Number(arith.cmpi(_SLE, self.value, _value(other)))

    def __gt__(self, other: Any) -> "Number":
        return Number(arith.cmpi(_SLT, _value(other), self.value))

    def __ge__(self, other: Any) -> "Number":
        return Number(arith.cmpi(_SLE, _value(other), self.value))


def _value(x: Any) -> Any:
    if isinstance(x, Number):
        return x.value
    return i32(int(x))


def _float(x: Any) -> Any:
    return x.value if isinstance(x, Number) else mgpu.c(float(x), ir.F32Type.get())


def _types() -> tuple[Any, Any, Any]:
    return ir.IntegerType.get_signless(32), ir.F32Type.get(), ir.IntegerType.get_signless(64)


def _asm(text: str, results: Sequence[str], operands: Sequence[Any], *, memory: bool = False) -> list[Number]:
    """Emits instructions that keep their order, if they have to do with memory or with other lanes."""
    word, f32, _ = _types()
    types = [{"r": word, "f": f32}[kind] for kind in results]
    letters = {word: "r", f32: "f", ir.IntegerType.get_signless(64): "l"}
    constraints = [*(f"={kind}" for kind in results), *(letters[o.type] for o in operands)]
    constraints += ["~{memory}"] if memory else []
    kind: Any = ir.Type.parse("!llvm.void")
    if types:
        kind = types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    found = llvm.inline_asm(kind, operands, text, ",".join(constraints), asm_dialect=0, has_side_effects=memory)
    if len(types) == 1:
        return [Number(found)]
    return [Number(llvm.extractvalue(t, found, [i])) for i, t in enumerate(types)]


def _predicate(where: Any) -> Any:
    return arith.extui(ir.IntegerType.get_signless(32), where.value)


class Address:
    """A place in GPU memory for each lane, and a constant distance in bytes from there."""

    def __init__(self, value: Any, size: int, distance: int = 0) -> None:
        self.value, self.size, self.distance = value, size, distance

    def at(self, elements: Any) -> "Address":
        """Returns the place some elements further on, fewer than 2**31 bytes; an int costs no instruction."""
        if isinstance(elements, int):
            return Address(self.value, self.size, self.distance + elements * self.size)
        wide = ir.IntegerType.get_signless(64)
        distance = arith.extsi(wide, arith.muli(_value(elements), i32(self.size)))
        return Address(arith.addi(self.value, distance), self.size, self.distance)

    def far(self, index: Any, elements: int) -> "Address":
        """Returns the place `index` times some elements further on."""
        wide = ir.IntegerType.get_signless(64)
        distance = arith.muli(arith.extsi(wide, _value(index)), mgpu.c(elements * self.size, wide))
        return Address(arith.addi(self.value, distance), self.size, self.distance)


class Lanes:
    """The operations.

    Attributes:
        lane: Number of the lane in its warp.
        warp: Number of the warp in its block.
    """

    def __init__(self, shared: Any) -> None:
        self.lane = Number(thread_of_warp())
        self.warp = Number(arith.divui(mgpu.utils.thread_idx(), i32(32)))
        self._shared = llvm.ptrtoint(ir.IntegerType.get_signless(32), mgpu.utils.memref_ptr(shared))

    def array(self, ref: Any) -> Address:
        """Returns where an array in GPU memory begins."""
        size = {"bf16": 2, "f16": 2, "f32": 4, "i32": 4}[str(ir.MemRefType(ref.type).element_type)]
        return Address(llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(ref)), size)

    def number(self, value: int) -> Number:
        """Returns an int32 constant."""
        return Number(i32(value))

    def real(self, value: float) -> Number:
        """Returns a float32 constant."""
        return Number(_float(value))

    def true(self, value: bool = True) -> Number:
        """Returns a truth value."""
        return Number(mgpu.c(int(value), ir.IntegerType.get_signless(1)))

    def equal(self, a: Any, b: Any) -> Number:
        """Returns whether integers are equal."""
        return Number(arith.cmpi(_EQ, _value(a), _value(b)))

    def select(self, condition: Number, a: Any, b: Any) -> Any:
        """Returns `a` where the condition is true, else `b`: integers, floats or addresses."""
        if isinstance(a, Address):
            return Address(arith.select(condition.value, a.value, b.value), a.size, a.distance)
        first, second = (x.value if isinstance(x, Number) else None for x in (a, b))
        like = first if first is not None else second
        make = _float if like is not None and like.type == ir.F32Type.get() else _value
        return Number(arith.select(condition.value, make(a), make(b)))

    def less(self, a: Any, b: Any) -> Number:
        """Whether a < b; false for nan."""
        return Number(arith.cmpf(arith.CmpFPredicate.OLT, _float(a), _float(b)))

    def finite(self, a: Any) -> Number:
        """Returns whether a number is neither nan nor infinite."""
        (size,) = _asm("abs.f32 $0, $1;", "f", [_float(a)])
        return self.less(size, float("inf"))

    def is_nan(self, a: Any) -> Number:
        """Returns whether a number is nan."""
        return Number(arith.cmpf(arith.CmpFPredicate.UNO, _float(a), _float(a)))

    def product(self, a: Any, b: Any) -> Number:
        """Returns a * b, rounded."""
        return _asm("mul.rn.f32 $0, $1, $2;", "f", [_float(a), _float(b)])[0]

    def sum(self, a: Any, b: Any) -> Number:
        """Returns a + b, rounded."""
        return _asm("add.rn.f32 $0, $1, $2;", "f", [_float(a), _float(b)])[0]

    def difference(self, a: Any, b: Any) -> Number:
        """Returns a - b, rounded."""
        return _asm("sub.rn.f32 $0, $1, $2;", "f", [_float(a), _float(b)])[0]

    def fused(self, a: Any, b: Any, c: Any) -> Number:
        """Returns a * b + c, rounded once."""
        return _asm("fma.rn.f32 $0, $1, $2, $3;", "f", [_float(a), _float(b), _float(c)])[0]

    def negative(self, a: Any) -> Number:
        """Returns -a."""
        return _asm("neg.f32 $0, $1;", "f", [_float(a)])[0]

    def at_least(self, a: Any, least: float) -> Number:
        """Returns the maximum of a number that is not nan and a constant."""
        return _asm(f"max.f32 $0, $1, {hexadecimal(least)};", "f", [_float(a)])[0]

    def power_of_two(self, a: Any) -> Number:
        """Returns 2 ** a; results below 2 ** -126 are 0."""
        return _asm("ex2.approx.ftz.f32 $0, $1;", "f", [_float(a)])[0]

    def pack(self, low: Any, high: Any) -> Number:
        """Returns two numbers rounded to bfloat16."""
        return _asm("cvt.rn.bf16x2.f32 $0, $2, $1;", "r", [_float(low), _float(high)])[0]

    def unpack(self, word: Number) -> tuple[Number, Number]:
        """Returns two bfloat16 numbers in float32."""
        low = _asm("shl.b32 $0, $1, 16;", "r", [word.value])[0]
        high = word & -0x10000
        f32 = ir.F32Type.get()
        return Number(arith.bitcast(f32, low.value)), Number(arith.bitcast(f32, high.value))

    def lows(self, a: Number, b: Number) -> Number:
        """Returns the lower halves of two words; the second one is the upper half."""
        return _asm("prmt.b32 $0, $1, $2, 0x5410;", "r", [a.value, b.value])[0]

    def highs(self, a: Number, b: Number) -> Number:
        """Returns the upper halves of two words; the second one is the upper half."""
        return _asm("prmt.b32 $0, $1, $2, 0x7632;", "r", [a.value, b.value])[0]

    def with_halves(self, word: Number, half: Number, low: Number, high: Number) -> Number:
        """Returns a word, one of whose halves, which is 0 before, may be replaced by the lower half of `half`.

        Args:
            word: The word.
            half: A 16-bit number; the upper half is 0.
            low: Whether it replaces the lower half.
            high: Whether it replaces the upper half.
        """
        (raised,) = _asm("shl.b32 $0, $1, 16;", "r", [half.value])
        return word | self.select(low, half, self.select(high, raised, 0))

    def half_of(self, word: Number, upper: Number) -> Number:
        """Returns the upper or the lower half of a word as a lower half; the upper half is 0."""
        return self.select(upper, _asm("shr.u32 $0, $1, 16;", "r", [word.value])[0], word & 0xFFFF)

    def shuffle(self, x: Number, source: Number) -> Number:
        """Returns the number of another lane."""
        kind = "f" if x.value.type == ir.F32Type.get() else "r"
        text = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
        return _asm(text, kind, [x.value, source.value], memory=True)[0]

    def has_nan(self, words: Sequence[Number]) -> Number:
        """Returns whether a lane of the warp has a bfloat16 number that is nan or infinite."""
        found = self.number(0)
        for word in words:
            found = found | ((word & 0x7F807F80) + 0x00800080)
        return self.any(~self.equal(found & -0x7FFF8000, 0))

    def any(self, x: Number) -> Number:
        """Returns whether a truth value is true in some lane of the warp."""
        text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.b32 $0, 1, 0, p; }"
        (found,) = _asm(text, "r", [_predicate(x)], memory=True)
        return Number(arith.cmpi(arith.CmpIPredicate.ne, found.value, i32(0)))

    def multiply(self, sums: Sequence[Any], left: Sequence[Any], right: Sequence[Any]) -> list[Number]:
        """Returns sums (16, 8) + left (16, 16) @ right (16, 8), as `mma.sync` has them in the lanes' registers."""
        operands = [*map(_value, left), *map(_value, right), *map(_float, sums)]
        text = (
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        return _asm(text, "ffff", operands)

    def pinned(self, numbers: Sequence[Sequence[Number]]) -> list[list[Number]]:
        """Returns float32 numbers that are computed here, and not where they are needed first."""
        flat = [x.value for row in numbers for x in row]
        texts = (f"mov.b32 ${i}, ${i + len(flat)};" for i in range(len(flat)))
        found = iter(_asm(" ".join(texts), "f" * len(flat), flat, memory=True))
        return [[next(found) for _ in row] for row in numbers]

    def load(self, place: Address, count: int, where: Number, *, floats: bool = False) -> list[Number]:
        """Returns words of 32 bits from GPU memory, or float32 numbers; zeros where `where` is false."""
        kind = ("f" if floats else "r") * count
        registers = [f"${i}" for i in range(count)]
        listed, vector = (f"{{{', '.join(registers)}}}", f".v{count}") if count > 1 else (registers[0], "")
        zeros = " ".join(f"mov.b32 {r}, 0;" for r in registers)
        address = f"[${count + 1} + {place.distance}]"
        text = f"{{ .reg .pred p; setp.ne.b32 p, ${count}, 0; {zeros} @p ld.global{vector}.b32 {listed}, {address}; }}"
        return _asm(text, kind, [_predicate(where), place.value], memory=True)

    def load_half(self, place: Address, where: Number) -> Number:
        """Returns a 16-bit number as a word."""
        text = (
            "{ .reg .pred p; .reg .b16 h; setp.ne.b32 p, $1, 0; mov.b16 h, 0;"
            f" @p ld.global.b16 h, [$2 + {place.distance}]; cvt.u32.u16 $0, h; }}"
        )
        return _asm(text, "r", [_predicate(where), place.value], memory=True)[0]

    def store(self, place: Address, words: Sequence[Any], where: Number) -> None:
        """Writes words or float32 numbers to GPU memory."""
        values = [w.value for w in words]
        listed = ", ".join(f"${i + 2}" for i in range(len(values)))
        listed, vector = (f"{{{listed}}}", f".v{len(values)}") if len(values) > 1 else (listed, "")
        text = f"{{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.global{vector}.b32 [$1 + {place.distance}], {listed}; }}"
        _asm(text, "", [_predicate(where), place.value, *values], memory=True)

    def prefetch(self, place: Address, size: Number, where: Number) -> None:
        """Asks for some bytes of GPU memory, a multiple of 16, to be brought into the L2 cache."""
        text = "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; }"
        _asm(text, "", [_predicate(where), place.value, size.value], memory=True)

    def copy(self, target: Number, offset: int, source: Address, where: Number) -> None:
        """Starts to copy 16 bytes from GPU memory to shared memory; zeros where `where` is false.

        Args:
            target: Word of shared memory.
            offset: Words from there.
            source: GPU memory.
            where: Whether it is read.
        """
        size = self.select(where, 16, self.number(0))
        place = arith.addi(self._shared, arith.muli(target.value, i32(4)))
        text = f"cp.async.cg.shared.global [$0 + {4 * offset}], [$1 + {source.distance}], 16, $2;"
        _asm(text, "", [place, source.value, size.value], memory=True)

    def copy_where(self, target: Number, offset: int, source: Address, where: Number) -> None:
        """Does what `copy` does, without writing where `where` is false."""
        place = arith.addi(self._shared, arith.muli(target.value, i32(4)))
        text = (
            "{ .reg .pred p; setp.ne.b32 p, $0, 0;"
            f" @p cp.async.cg.shared.global [$1 + {4 * offset}], [$2 + {source.distance}], 16; }}"
        )
        _asm(text, "", [_predicate(where), place, source.value], memory=True)

    def await_copies(self) -> None:
        """Waits for the copies of the warp's lanes."""
        _asm("cp.async.wait_all; bar.warp.sync 0xffffffff;", "", [], memory=True)

    def share(self) -> None:
        """Makes what the lanes of a warp have written to shared memory known to one another."""
        _asm("bar.warp.sync 0xffffffff;", "", [], memory=True)

    def load_shared_where(self, place: Number, count: int, where: Number) -> list[Number]:
        """Returns words from a place in shared memory, zeros where `where` is false."""
        registers = [f"${i}" for i in range(count)]
        listed, vector = (f"{{{', '.join(registers)}}}", f".v{count}") if count > 1 else (registers[0], "")
        zeros = " ".join(f"mov.b32 {r}, 0;" for r in registers)
        at = arith.addi(self._shared, arith.muli(place.value, i32(4)))
        address = f"[${count + 1}]"
        text = f"{{ .reg .pred p; setp.ne.b32 p, ${count}, 0; {zeros} @p ld.shared{vector}.b32 {listed}, {address}; }}"
        return _asm(text, "r" * count, [_predicate(where), at], memory=True)

    def load_shared(self, place: Number, count: int, offset: int = 0, *, floats: bool = False) -> list[Number]:
        """Returns words from a place in shared memory, counted in words."""
        registers = ", ".join(f"${i}" for i in range(count))
        listed, vector = (f"{{{registers}}}", f".v{count}") if count > 1 else (registers, "")
        at = arith.addi(self._shared, arith.muli(place.value, i32(4)))
        text = f"ld.shared{vector}.b32 {listed}, [${count} + {4 * offset}];"
        return _asm(text, ("f" if floats else "r") * count, [at], memory=True)

    def load_matrices(self, place: Number, offset: int) -> list[Number]:
        """Returns the lane's words of four matrices (8, 8) of 16-bit numbers in shared memory, see `ldmatrix`.

        Args:
            place: Where a row of 16 bytes begins, in words: lane i has that of row i % 8 of matrix i // 8.
            offset: Words from there.
        """
        at = arith.addi(self._shared, arith.muli(place.value, i32(4)))
        text = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4 + {4 * offset}];"
        return _asm(text, "rrrr", [at], memory=True)

    def store_shared(self, place: Number, words: Sequence[Number], where: Number) -> None:
        """Writes words to shared memory."""
        registers = ", ".join(f"${i + 2}" for i in range(len(words)))
        listed, vector = (f"{{{registers}}}", f".v{len(words)}") if len(words) > 1 else (registers, "")
        at = arith.addi(self._shared, arith.muli(place.value, i32(4)))
        text = f"{{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.shared{vector}.b32 [$1], {listed}; }}"
        _asm(text, "", [_predicate(where), at, *(w.value for w in words)], memory=True)

    def barrier(self) -> None:
        """Waits for all warps of the block."""
        _asm("bar.sync 0;", "", [], memory=True)

    def part(self) -> None:
        """Keeps what comes after it after what comes before: loads that come early take registers."""
        _asm("fence.acq_rel.cta;", "", [], memory=True)

    def raise_flag(self, place: Address, word: int) -> None:
        """Writes a word, after all that the block has done before its last barrier, and before what comes then."""
        text = f"fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [$0 + {place.distance}], $1; fence.sc.gpu;"
        _asm(text, "", [place.value, i32(word)], memory=True)

    def is_raised(self, place: Address, word: int) -> Number:
        """Returns whether a block has written a word with `raise_flag`."""
        (found,) = _asm(f"ld.relaxed.gpu.global.b32 $0, [$1 + {place.distance}];", "r", [place.value], memory=True)
        return self.equal(found, word)

    def repeat(
        self, times: int, carried: Sequence[Any], body: Callable[[Number, list[Number]], Sequence[Number]]
    ) -> list[Number]:
        """Returns float32 numbers after a loop, which stays one: copies of its body would take more registers.

        Args:
            times: How often it runs.
            carried: The numbers before it.
            body: Maps the number of the round and the numbers before it to the numbers after it.
        """
        (end,) = _asm(f"mov.b32 $0, {times};", "r", [], memory=True)  # the compiler of LLVM does not know how often
        loops: Any = scf.ForOp  # the generated class, whose arguments are others, to mypy
        loop = loops(i32(0), end.value, i32(1), [_float(x) for x in carried])
        with ir.InsertionPoint(loop.body):
            _asm('.pragma "nounroll";', "", [], memory=True)
            found = body(Number(loop.induction_variable), [Number(x) for x in loop.inner_iter_args])
            scf.yield_([x.value for x in found])
        return [Number(x) for x in loop.results]

    def when(self, condition: Number, body: Callable[[], None]) -> None:
        """Runs `body` if a condition, the same in all lanes of a warp, is true."""
        branches: Any = scf.IfOp
        branch = branches(condition.value)
        with ir.InsertionPoint(branch.then_block):
            body()
            scf.yield_([])

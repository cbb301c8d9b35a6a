"""Row programs on a Hopper GPU, bit-identical to XLA:GPU running the same operations one by one.

Sums and maxima follow `RowContract`. Additions, differences and products round to nearest; division is
`div.full.f32`, the exponential is CUDA libdevice's, and the inverse root is `rsqrt.approx.f32`, as XLA lowers them.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.contract import (
    XLA_FUNCTIONS,
    ElementwiseContract,
    PartsChunkContract,
    RowContract,
    honour,
    row_contract,
)
from pallas_kernels.parts.hopper.arithmetic import LARGER, columns_of
from pallas_kernels.parts.hopper.limbs import limbs
from pallas_kernels.parts.hopper.row import Row
from pallas_kernels.parts.hopper.row_engine import COLUMN_NUMBERS, Arrays, Parted, Picked, run_rows
from pallas_kernels.parts.ptx import xla_exponential
from pallas_kernels.row_program.program import COLUMN, REDUCTIONS, Operation, Order, RowProgram, Step
from pallas_kernels.schedule.hopper.rows import RowSchedule

_PTX: Final = {
    "add": "add.rn.f32 $0, $1, $2;",
    "sub": "sub.rn.f32 $0, $1, $2;",
    "mul": "mul.rn.f32 $0, $1, $2;",
    "div": "div.full.f32 $0, $1, $2;",
    "neg": "neg.f32 $0, $1;",
    "abs": "abs.f32 $0, $1;",
    "finite": "{ .reg .pred p; .reg .f32 a; abs.f32 a, $1; setp.lt.f32 p, a, 0f7F800000;"
    " selp.f32 $0, 0f3F800000, 0f00000000, p; }",
    "ge": "{ .reg .pred p; setp.ge.f32 p, $1, $2; selp.f32 $0, 0f3F800000, 0f00000000, p; }",
    "exp": f"{{{xla_exponential('$0')}\n}}",
    "rsqrt": "rsqrt.approx.f32 $0, $1;",
    "larger": LARGER,
    "select": "{ .reg .pred p; setp.neu.f32 p, $1, 0f00000000; selp.f32 $0, $2, $3, p; }",
    "round": "{ .reg .b16 h, z; mov.b16 z, 0; cvt.rn.bf16.f32 h, $1; mov.b32 $0, {z, h}; }",
    "clear": "{ .reg .pred p; setp.eq.f32 p, $1, 0f00000000; selp.f32 $0, 0f00000000, $1, p; }",
    "one": "{ .reg .pred p; .reg .f32 t; setp.eq.f32 p, $1, $2; add.rn.f32 t, $3, 0f00000000;"
    " selp.f32 $0, t, 0f00000000, p; }",
    "within": "{ .reg .pred p; setp.ge.f32 p, $1, 0f00000000; setp.lt.and.f32 p, $1, $2, p;"
    " selp.f32 $0, $3, 0f00000000, p; }",
}

_NAMED: Final = (*REDUCTIONS, "exp", "div", "rsqrt")
"""The operations that make up a program's name in a profile, as in "rows_max_exp_sum_div"."""


def run_program(
    program: RowProgram,
    columns: Sequence[jax.Array],
    masks: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    numbers: Sequence[jax.Array],
    *,
    rows: int,
    orders: Sequence[Order | None],
    contract: RowContract,
    functions: ElementwiseContract = XLA_FUNCTIONS,
    interpret: Any = False,
    schedule: RowSchedule | None = None,
) -> Arrays:
    """Runs a row program.

    Args:
        program: The program.
        columns: (M, C) arrays, float32 or bfloat16, that `row_engine.supports` allows.
        masks: (M', C) bfloat16, 0 or 1.
        vectors: (C,) arrays, float32 or bfloat16.
        numbers: (M, 1) float32, in the order of the results' rows.
        rows: M.
        orders: For each array of `columns`, then of `masks`, the map from a row of the results to a row of the array;
            None for the identity.
        contract: Order of the sums.
        functions: How exponentials and quotients are computed.
        interpret: False, or `pallas.mosaic_gpu.InterpretGPUParams` to run on a CPU.

        schedule: How to feed the rows; chosen from the shape by default. It does not affect the bits.

    Returns:
        The results (M, C), or (parts * M, C) if split into limbs, as `matmul.hopper.parts.matmul_of_parts` expects
        them; then the totals (M, 1) float32.

    Guarantee: row-invariant.
    """
    honour("row program", contract, row_contract())
    honour("row program", functions, XLA_FUNCTIONS)
    wide = program.wide()
    places = {order: functools.partial(_place, order) for order in {*orders} if order is not None}

    def picked(array: jax.Array, order: Order | None) -> jax.Array | Picked:
        return array if order is None else Picked(array, places[order])

    def body(row: Row) -> None:
        _Body(program, wide, row).run()

    every = [picked(a, o) for a, o in zip((*columns, *masks), orders, strict=True)]
    # A mask with one row per row of the results is read like a vector picked by the row index.
    shared = [a if isinstance(a, Picked) else Picked(a, _own) for a in every[len(columns) :]]
    return run_rows(
        body,
        every[: len(columns)],
        [*shared, *vectors],
        [_result(d, n) for d, n in zip(program.dtypes, program.parts, strict=True)],
        given=numbers,
        numbers=len(program.totals),
        count=rows,
        interpret=interpret,
        schedule=schedule,
        name="_".join(("rows", *(s.operation for s in program.steps if s.operation in _NAMED))),
    )


def _result(dtype: str, parts: int) -> Parted:
    return Parted(jnp.dtype(dtype), parts, PartsChunkContract(parts).rows if parts > 1 else 1)


def _place(order: Order, row: Row) -> Any:
    total: Any = 0
    for divisor, size, stride in order.terms:
        at = row.index if divisor == 1 else lax.div(row.index, jnp.int32(divisor))
        total += lax.rem(at, jnp.int32(size)) * stride
    return total


def _own(row: Row) -> Any:
    return row.index


class _Body:
    """A program on one row."""

    def __init__(self, program: RowProgram, wide: frozenset[int], row: Row) -> None:
        self._program = program
        self._wide = wide
        self._row = row
        self._numbers = {n: row.given(i) for i, n in enumerate(program.numbers)}
        self._live = list(program.columns)
        # While passes are being counted, nothing is in registers.
        self._interpret = getattr(row, "interpret", True)

    def run(self) -> None:
        program, waiting = self._program, list[Step]()
        for at, step in enumerate(program.steps):
            if step.operation in REDUCTIONS:
                self._reduce(step, waiting, program.steps[at + 1 :])
                waiting = []
            elif step.result in self._wide:
                waiting.append(step)
            else:
                self._numbers[step.result] = self._apply(step, {})
        if program.results:
            beside, live = self._beside(waiting), tuple(self._live)

            def results(*columns: jax.Array) -> Arrays:
                values = self._evaluate(waiting, dict(zip((*live, *beside), columns, strict=True)))
                found = (
                    limbs(values[r], n, self._interpret) for r, n in zip(program.results, program.parts, strict=True)
                )
                return tuple(itertools.chain(*found))

            self._row.emit(results, vectors=self._vectors(beside))
        largest = {s.result for s in program.steps if s.operation == "max"}
        for i, total in enumerate(program.totals):
            value = self._numbers[total]
            if total in largest:  # the canonical nan of a program's maximum, not the one that the instruction returns
                value = jnp.where(value == value, value, jnp.float32(math.nan))
            self._row.put(i, value)

    def _reduce(self, step: Step, waiting: Sequence[Step], later: Sequence[Step]) -> None:
        (source,) = step.operands
        wanted = {o for s in later for o in s.operands if isinstance(o, int)} | {*self._program.results}
        known = [*self._live, *(s.result for s in waiting)]
        keep = tuple(v for v in known if v in wanted or v == source)
        beside, live = self._beside(waiting), tuple(self._live)

        def derived(*columns: jax.Array) -> Arrays:
            values = self._evaluate(waiting, dict(zip((*live, *beside), columns, strict=True)))
            return tuple(values[v] for v in keep)

        if waiting or keep != live:
            self._row.derive(derived, vectors=self._vectors(beside))
        at = keep.index(source)
        if step.operation == "sum":
            total = self._row.fold(lambda *columns: columns[at])
            self._numbers[step.result] = jnp.where(total == 0, jnp.float32(0), total)
        else:
            largest = self._row.fold(lambda *columns: columns[at], combine="greatest", unit=-math.inf)
            self._numbers[step.result] = largest
        self._live = list(keep)

    def _beside(self, steps: Sequence[Step]) -> tuple[int, ...]:
        """Returns the operands of the steps apart from live columns: masks, vectors and column numbers."""
        used = {o for s in steps for o in s.operands if isinstance(o, int)}
        return tuple(v for v in (*self._program.masks, *self._program.vectors, COLUMN) if v in used)

    def _vectors(self, beside: Sequence[int]) -> list[int]:
        every = *self._program.masks, *self._program.vectors
        return [COLUMN_NUMBERS if v == COLUMN else every.index(v) for v in beside]

    def _evaluate(self, steps: Sequence[Step], values: dict[int, jax.Array]) -> dict[int, jax.Array]:
        for step in steps:
            values[step.result] = self._apply(step, values)
        return values

    def _apply(self, step: Step, values: dict[int, jax.Array]) -> jax.Array:
        operands = [
            np.float32(o) if isinstance(o, float) else values[o] if o in values else self._numbers[o]
            for o in step.operands
        ]
        return _computed(step.operation, operands, self._interpret)


def _computed(operation: Operation, operands: Sequence[Any], interpret: Any) -> jax.Array:
    if not interpret:
        return columns_of(_PTX[operation], operands)
    a, b, c = (*(lax.optimization_barrier(jnp.float32(o)) for o in operands), None, None)[:3]
    if operation == "select":
        return jnp.where(a != 0, b, c)
    if operation == "one":
        return jnp.where((a == b) & (c != 0), c, jnp.float32(0))
    if operation == "within":
        return jnp.where((a >= 0) & (a < b), c, jnp.float32(0))
    functions: dict[str, Any] = {
        "add": lax.add,
        "sub": lax.sub,
        "mul": lax.mul,
        "div": lax.div,
        "neg": lambda a: -a,
        "abs": jnp.abs,
        "finite": lambda a: jnp.isfinite(a).astype(jnp.float32),
        "ge": lambda a, b: (a >= b).astype(jnp.float32),
        "exp": jnp.exp,
        "rsqrt": lax.rsqrt,
        "larger": jnp.maximum,
        "round": lambda a: a.astype(jnp.bfloat16).astype(jnp.float32),
        "clear": lambda a: jnp.where(a == 0, jnp.float32(0), a),
    }
    given = [a] if b is None else jnp.broadcast_arrays(a, b)
    return lax.optimization_barrier(functions[operation](*given))

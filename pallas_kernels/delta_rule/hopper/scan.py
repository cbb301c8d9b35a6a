"""Outputs and states of sequences, from T and P of their chunks, in the order of `MmaDeltaRuleContract`.

A block has 64 columns of the values of a head and walks over its chunks, which a warpgroup reads ahead by TMA. Another
one computes residuals, states, and queries times states: products that depend on one another or have an operand in
common. It passes residuals and what is asked to a third, which computes the outputs. Tiles are transposed: wgmma's rows
are the columns of the values. So each product is an operand of the next one in the registers that it is in, and the
other operands (keys, queries, T, P) are read from shared memory as TMA wrote them.

Where sequences are continued, rows stand from the edge of the state on: first those that are kept, then the tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.delta_rule.hopper.handover import pass_registers, take_registers
from pallas_kernels.delta_rule.hopper.plain_rows import (
    clear_rows,
    fetch_rows,
    put_rows,
    rows_before,
    send_rows,
    take_rows,
    with_front,
)
from pallas_kernels.delta_rule.hopper.transposed import (
    flag_nan,
    keep_rows,
    load_matrix,
    load_transposed,
    nan_for_infinite,
    store_matrix,
    store_transposed,
    widened,
)
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.products import finish, start
from pallas_kernels.parts.hopper.stages import await_free, drain
from pallas_kernels.parts.hopper.tile import PLAIN, ROW, ROWS, TILE, Arithmetic, across, filled, tiled

COLUMN: Final = TILE.reduce(0)
"""Layout of a number for each row of a chunk, as tiles are transposed."""

type State = tuple[jax.Array, ...]
"""Pieces (64, 64) of a state, whose rows are columns of the values."""

FAST: Final = plgpu.CompilerParams(
    approx_math=True, reduction_scratch_bytes=0, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
)


class Kept(NamedTuple):
    """What is kept of the chunk in which sequences are continued: arrays in GPU memory.

    Attributes:
        key: (B, J, 64, D), of the kept rows, in the order of the sequences.
        residual: (B, H, 64, V), which is changed.
        edge: (B,) int32, the position of the chunk's first row.
        start: (B,) int32, that of the first token; the rows before it are kept.
        slots: (B,) int32, where sequences are in the residuals and states, which have S instead of B sequences then. A
            state at the edge 0 is zero, whatever is there. None if sequence b is at b.
    """

    key: Any
    residual: Any
    edge: Any
    start: Any
    slots: Any = None


class Chunks(NamedTuple):
    """What a block reads: arrays in GPU memory.

    Attributes:
        query: (B, T, J, D) bfloat16 or float16.
        key: (B, T, J, D).
        value: (B, T, H, V).
        inverse: (B, H, N, 64, 64) T of the contract, columns first.
        weights: (B, H, N, 64, 64) P, columns first.
        grown: (B, H, N, 64) float32, E(G).
        later: (B, H, N, 64) float32, E(G of the last row - G).
        betas: (B, H, N, 64) float32, nan for a row that makes its head nan.
        state: (B, H, D, V) float32.
        lengths: (B,) int32.
        kept: Where sequences are continued, what is kept of them; `state` is changed then. None for whole sequences.
    """

    query: Any
    key: Any
    value: Any
    inverse: Any
    weights: Any
    grown: Any
    later: Any
    betas: Any
    state: Any
    lengths: Any
    kept: Any = None


_COPIES: Final = 6  # of a chunk, apart from keys and queries
_REGISTERS: Final = (248, 160, 40)


class Memory(NamedTuple):
    """Shared memory: stages of what belongs to a chunk, and what one warpgroup passes to the other.

    Attributes:
        query: (stages, D / 64, 64, 64).
        key: (stages, D / 64, 64, 64).
        value: (stages, 1, 64, 64).
        inverse: (stages, 64, 64).
        weights: (stages, 64, 64).
        grown: (stages, 64) float32.
        later: (stages, 64) float32.
        betas: (stages, 64) float32.
        full: A barrier for each stage.
        free: A barrier for each stage.
        asked: (64, 64) float32, queries times the state, as `pass_registers` writes it.
        residual: (64, 64) the residuals, likewise.
        passed: A barrier.
        taken: A barrier.
        out: (1, 64, 64), outputs on their way.
    """

    query: Any
    key: Any
    value: Any
    inverse: Any
    weights: Any
    grown: Any
    later: Any
    betas: Any
    full: Any
    free: Any
    asked: Any
    residual: Any
    passed: Any
    taken: Any
    out: Any

    @classmethod
    def types(cls, stages: int, size: int, dtype: Any) -> "Memory":
        """Returns the types."""

        def tiles(columns: int) -> Any:
            return plgpu.SMEM((stages, ROWS, columns), dtype, transforms=tiled(dtype, columns))

        def rows(pieces: int) -> Any:
            return plgpu.SMEM((stages, pieces, ROWS, ROWS), dtype, transforms=PLAIN)

        return cls(
            query=rows(size // ROWS),
            key=rows(size // ROWS),
            value=rows(1),
            inverse=tiles(ROWS),
            weights=tiles(ROWS),
            grown=plgpu.SMEM((stages, ROWS), jnp.float32),
            later=plgpu.SMEM((stages, ROWS), jnp.float32),
            betas=plgpu.SMEM((stages, ROWS), jnp.float32),
            full=plgpu.Barrier(num_arrivals=_COPIES + 2 * (size // ROWS), num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            asked=plgpu.SMEM((ROWS, ROWS), jnp.float32),
            residual=plgpu.SMEM((ROWS, ROWS), dtype),
            passed=plgpu.Barrier(),
            taken=plgpu.Barrier(),
            out=plgpu.SMEM((1, ROWS, ROWS), dtype, transforms=PLAIN),
        )


@dataclass(frozen=True)
class _Walk:
    """A block's walk over the chunks of a head.

    Attributes:
        given: What it reads.
        memory: Its shared memory.
        batch: Index of the sequence.
        head: Index of the value head.
        key_head: Index of its key head.
        column: First column of the values.
        count: Tokens of the sequence.
        before: Rows before the first token in its chunk.
        front: Tokens that were put before the first ones, see `with_front`.
        stages: Number of stages.
        scale: Factor of the outputs.
        interpret: Whether the kernel runs in Mosaic's interpreter.
        await_rows: Called with a chunk before its T and P are read, where other blocks of the same launch write them.
    """

    given: Chunks
    memory: Memory
    batch: Any
    head: Any
    key_head: Any
    column: Any
    count: Any
    before: Any
    front: int
    stages: int
    scale: float
    interpret: bool
    await_rows: Callable[[Any], None] | None = None

    @property
    def slot(self) -> Any:
        """Where the sequence's state is."""
        kept = self.given.kept
        return self.batch if kept is None or kept.slots is None else kept.slots[self.batch]

    @property
    def columns(self) -> Any:
        """The block's columns of the values."""
        return pl.ds(self.column, ROWS)

    @property
    def whole(self) -> Any:
        """How many chunks there are up to the last token."""
        found = lax.div(self.before + self.count + ROWS - 1, ROWS)
        return found if self.given.kept is None else jnp.where(self.count > 0, found, 0)

    def rows(self, chunk: Any) -> Any:
        """A chunk's tokens; before the first and after the last there are none."""
        return pl.ds(chunk * ROWS - self.before + self.front, ROWS)

    @property
    def math(self) -> Arithmetic:
        """The instructions on tiles."""
        return Arithmetic(interpret=self.interpret)

    def of_rows(self, ref: Any, slot: Any) -> jax.Array:
        """Returns a number for each row of a chunk."""
        return plgpu.load(ref.at[slot], layout=COLUMN)

    def fetch(self, chunk: Any) -> None:
        """Starts to read a chunk into its stage, as soon as that is free."""
        slot = lax.rem(chunk, self.stages)
        await_free(chunk, self.stages, self.memory.free.at[slot])
        x, m, full = self.given, self.memory, self.memory.full.at[slot]
        rows = self.rows(chunk)
        fetch_rows(x.key.at[self.batch, rows, self.key_head], m.key.at[slot], full)
        fetch_rows(x.value.at[self.batch, rows, self.head, self.columns], m.value.at[slot], full)
        if self.await_rows is not None:
            fetch_rows(x.query.at[self.batch, rows, self.key_head], m.query.at[slot], full)
            self.await_rows(chunk)
        of_head = ((x.grown, m.grown), (x.later, m.later), (x.betas, m.betas), (x.inverse, m.inverse))
        for source, target in (*of_head, (x.weights, m.weights)):
            plgpu.copy_gmem_to_smem(source.at[self.batch, self.head, chunk], target.at[slot], full)
        if self.await_rows is None:
            fetch_rows(x.query.at[self.batch, rows, self.key_head], m.query.at[slot], full)

    def clear_rows(self, chunk: Any, *refs: Any) -> None:
        """Replaces rows of a chunk after the sequence's end by zeros."""
        clear_rows(self.before + self.count - chunk * ROWS, *refs, interpret=self.interpret)

    def enter(self, chunk: Any, keys: Any, values: Any, inside: bool) -> Any:
        """Waits for a chunk and puts kept rows into it, residuals among the values.

        Returns:
            How many rows are kept, or None where none can be.
        """
        slot = lax.rem(chunk, self.stages)
        plgpu.barrier_wait(self.memory.full.at[slot])
        self.clear_rows(chunk, keys, values, self.memory.query.at[slot])
        if (kept := self.given.kept) is None or inside:
            return None
        here = jnp.where(chunk == 0, self.before, 0)
        of_keys, of_head = kept.key.at[self.batch, self.key_head], kept.residual.at[self.slot, self.head]
        put_rows(here, (of_keys, keys), (of_head.at[:, self.columns], values), interpret=self.interpret)
        return here

    def residuals(self, chunk: Any, state: State, inside: bool) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """Returns the residuals of a chunk (64, 64), and what was asked so far (64, 64), which is under way.

        The rest of what is asked, a list, is still to be started: one product waits for the other.
        """
        m, interpret, math = self.memory, self.interpret, self.math
        slot, dtype = lax.rem(chunk, self.stages), m.key.dtype
        keys, values = m.key.at[slot], m.value.at[slot]
        here = self.enter(chunk, keys, values, inside)
        narrow = [piece.astype(dtype) for piece in state]
        told = self.times(None, narrow, keys)
        asked = self.times(None, narrow[:1], m.query.at[slot])
        stored = load_transposed(values, interpret)
        value = widened(stored, interpret)
        grown, factor = -self.of_rows(m.grown, slot), self.of_rows(m.betas, slot)
        (told,) = finish(1, told, interpret=interpret)
        r = math.product(_down(factor), math.fused(_down(grown), told, value))
        r = nan_for_infinite(r.astype(dtype), interpret)
        return (r if here is None else keep_rows(here, stored, r, interpret)), asked, narrow[1:]

    def times(self, total: jax.Array | None, state: Sequence[jax.Array], rows: Any, first: int = 0) -> jax.Array:
        """Starts a product of pieces of a rounded state, from the first one on, and keys or queries."""
        for i, piece in enumerate(state, first):
            total = start(total, piece, (rows.at[pl.ds(i, 1)],), interpret=self.interpret)
        return jnp.asarray(total)

    def move(self, chunk: Any, state: State, inside: bool = True) -> State:
        """Passes residuals and what was asked of a chunk on; returns the state after it.

        Only a chunk that is not `inside` may begin with kept rows: the branch for them costs the others time.
        """
        m, interpret, math, slot = self.memory, self.interpret, self.math, lax.rem(chunk, self.stages)
        keys, (r, asked, left) = m.key.at[slot], self.residuals(chunk, state, inside)
        u = start(None, r, (m.inverse.at[slot],), right_along=False, interpret=interpret)
        asked = self.times(asked, left, m.query.at[slot], 1) if left else asked
        later, newest = self.of_rows(m.later, slot), jnp.full((ROWS,), m.grown[slot, ROWS - 1], jnp.float32)
        whole = across(plgpu.layout_cast(newest, ROW), ROWS)
        state = tuple(math.product(piece, whole) for piece in state)
        (u,) = finish(1 if left else 0, u, interpret=interpret)
        u = math.product(u, _down(later)).astype(m.key.dtype)
        state = tuple(
            start(piece, u, (keys.at[pl.ds(i, 1)],), right_along=False, interpret=interpret)
            for i, piece in enumerate(state)
        )
        (asked,) = finish(len(state), asked, interpret=interpret)
        self.pass_on(chunk, asked, r)
        state = tuple(finish(0, *state, interpret=interpret))
        plgpu.barrier_arrive(m.free.at[slot])
        return state

    def stay(self, chunk: Any, state: State, place: Any, flags: Any) -> None:
        """Passes residuals and what was asked of the last chunk on, and keeps the former and the state, unless nan."""
        m, x, interpret, slot = self.memory, self.given, self.interpret, lax.rem(chunk, self.stages)
        r, asked, left = self.residuals(chunk, state, inside=False)
        (asked,) = finish(0, self.times(asked, left, m.query.at[slot], 1) if left else asked, interpret=interpret)
        self.pass_on(chunk, asked, r)
        plgpu.barrier_arrive(m.free.at[slot])
        flag_nan((*state, r.astype(jnp.float32)), flags, place, interpret)
        whole_head = self.slot, self.head, slice(None), self.columns

        @pl.when(flags[place] == 0)
        def store() -> None:
            store_matrix(r, x.kept.residual.at[whole_head], interpret)
            pl.when(chunk > 0)(lambda: store_state(state, x.state.at[self.slot, self.head], self.columns, interpret))

    def pass_on(self, chunk: Any, asked: jax.Array, r: jax.Array) -> None:
        """Passes tiles to the other warpgroup."""
        m = self.memory
        pl.when(chunk > 0)(partial(plgpu.barrier_wait, m.taken))
        pass_registers(asked, m.asked, self.interpret)
        pass_registers(r, m.residual, self.interpret)
        plgpu.barrier_arrive(m.passed)

    def answer(self, chunk: Any, out: Any) -> None:
        """Computes the outputs of a chunk."""
        m, interpret, math = self.memory, self.interpret, self.math
        slot, dtype = lax.rem(chunk, self.stages), m.key.dtype
        plgpu.barrier_wait(m.full.at[slot])
        grown = self.of_rows(m.grown, slot)
        plgpu.barrier_wait(m.passed)
        asked = take_registers(m.asked, jnp.float32, interpret)
        r = take_registers(m.residual, dtype, interpret)
        plgpu.barrier_arrive(m.taken)
        asked = math.product(_down(grown), asked)
        y = start(asked, r, (m.weights.at[slot],), right_along=False, interpret=interpret)
        (y,) = finish(0, y, interpret=interpret)
        plgpu.barrier_arrive(m.free.at[slot])
        self.store((math.scaled(y, self.scale) + 0.0).astype(dtype), chunk, out)

    def store(self, y: jax.Array, chunk: Any, out: Any) -> None:
        """Writes outputs (64 columns, 64 rows)."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store_transposed(y, self.memory.out, self.interpret)
        plgpu.commit_smem()

        def send() -> None:
            send_rows(self.memory.out, out.at[self.batch, self.rows(chunk), self.head, self.columns])

        if self.given.kept is None or self.interpret:
            send()
            return
        here = jnp.where(chunk == 0, self.before, 0)
        pl.when(here == 0)(send)
        tokens = out.at[self.batch, :, self.head, self.columns]
        pl.when(here > 0)(lambda: take_rows(self.memory.out, tokens, here))


def store_state(state: State, ref: Any, columns: Any, interpret: bool) -> None:
    """Writes the pieces of a state to columns of GPU memory (D, V)."""
    for i, piece in enumerate(state):
        store_matrix(piece, ref.at[pl.ds(i * ROWS, ROWS), columns], interpret)


def _down(x: jax.Array) -> jax.Array:
    """Returns a number for each row of a chunk, broadcast to a transposed tile."""
    return lax.broadcast_in_dim(x, (ROWS, x.shape[0]), [1])


class Results(NamedTuple):
    """What a block writes: arrays in GPU memory.

    Attributes:
        out: (B, T, H, V) outputs.
        states: The last states and those at the edges; none where sequences are continued.
        flags: (B * H * V / 64,) int32.
    """

    out: Any
    states: Any
    flags: Any


def walk_block(
    given: Chunks, results: Results, memory: Memory, batch: Any, of_head: Any, *, keep_edges: bool, front: int,
    stages: int, scale: float, interpret: bool, await_rows: Callable[[Any, Any, Any], None] | None = None,
) -> None:  # fmt: skip
    """Walks over the chunks of 64 columns of a head: the body of a block of three warpgroups.

    Args:
        given: What it reads.
        results: What it writes.
        memory: Its shared memory.
        batch: Index of the sequence.
        of_head: Index of the 64 columns among those of all heads.
        keep_edges: Whether to write the states at the edges of the chunks.
        front: Tokens that were put before the first ones, see `with_front`.
        stages: Chunks in shared memory at once.
        scale: Factor of the outputs.
        interpret: Whether the kernel runs in Mosaic's interpreter.
        await_rows: Called with sequence, head and chunk before T and P of the chunk are read.
    """
    chunks, h, (size, width) = given.betas.shape[2], given.value.shape[2], given.state.shape[2:]
    slices, group, continued = width // ROWS, h // given.key.shape[2], given.kept is not None
    head, part = lax.div(of_head, slices), lax.rem(of_head, slices)
    count = given.lengths[batch]
    walk = _Walk(
        given, memory, batch, head, lax.div(head, group), part * ROWS, count,
        before=rows_before(given.kept, batch, count), front=front, stages=stages, scale=scale, interpret=interpret,
        await_rows=None if await_rows is None else partial(await_rows, batch, head),
    )  # fmt: skip
    columns, warpgroup, flag = walk.columns, lax.axis_index("warpgroup"), batch * (h * slices) + of_head
    flags, pieces = results.flags, size // ROWS

    def whole_sequence(state: State) -> None:
        last, edges = results.states

        def keep(chunk: Any, state: State) -> None:
            if keep_edges:
                store_state(state, edges.at[batch, chunk, head], columns, interpret)

        def one(chunk: Any, state: State) -> State:
            keep(chunk, state)
            return walk.move(chunk, state)

        state = lax.fori_loop(0, walk.whole, one, state)
        store_state(state, last.at[batch, head], columns, interpret)
        flag_nan(state, flags, flag, interpret)
        if keep_edges:
            pl.loop(walk.whole, chunks)(lambda chunk: keep(chunk, (filled((ROWS, ROWS), 0),) * pieces))

    def continue_sequence(state: State) -> None:
        last = walk.whole - 1
        state = lax.fori_loop(0, jnp.minimum(last, 1), partial(walk.move, inside=False), state)
        state = lax.fori_loop(1, last, walk.move, state)
        pl.when(last >= 0)(lambda: walk.stay(last, state, flag, flags))
        pl.when(last < 0)(lambda: flag_nan((filled((ROWS, ROWS), 0),), flags, flag, interpret))

    @pl.when(warpgroup == 0)
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS[0], action="increase")
        known = given.kept.edge[batch] if continued and given.kept.slots is not None else None
        of_head = given.state.at[walk.slot, head]
        state = tuple(
            load_matrix(of_head.at[pl.ds(i * ROWS, ROWS), columns], ROWS, interpret, known) for i in range(pieces)
        )
        (continue_sequence if continued else whole_sequence)(state)

        @pl.when(walk.whole > 0)
        def _() -> None:
            plgpu.barrier_wait(memory.taken)

    @pl.when(warpgroup == 1)
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS[1], action="decrease")
        pl.loop(0, walk.whole)(lambda chunk: walk.answer(chunk, results.out))
        nothing = filled((ROWS, ROWS), 0).astype(given.value.dtype)
        pl.loop(walk.whole, chunks)(lambda chunk: walk.store(nothing, chunk, results.out))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == 2)
    def _() -> None:
        plgpu.set_max_registers(_REGISTERS[2], action="decrease")
        pl.loop(0, walk.whole)(walk.fetch)
        drain((memory.free,), stages, walk.whole)


def scan(
    given: Chunks, *, scale: float, keep_edges: bool, stages: int, interpret: Any = False
) -> tuple[jax.Array, ...]:
    """Runs the kernel.

    Args:
        given: The sequences, and T, P, G and beta of their chunks. Where they are continued, `state` and
            `kept.residual` are mutable references, which have the new ones afterwards, except for columns with a flag.
        scale: Factor of the outputs.
        keep_edges: Whether to return the states at the edges of the chunks. Not where sequences are continued.
        stages: Chunks in shared memory at once.
        interpret: False, or parameters of Mosaic's interpreter.

    Returns:
        The outputs (B, T, H, V), zeros after a sequence's length; the last states (B, H, D, V) float32; those at the
        edges (B, N, H, D, V) float32, zeros after the length, or an array without meaning; and (B * H * V / 64,) int32,
        1 for 64 columns of a head whose last state has a nan, of which nothing is to be used. Where sequences are
        continued, the outputs and the flags, for which last residuals count too.
    """
    emulated, continued = bool(interpret), given.kept is not None
    front = ROWS if emulated and continued else 0
    if front:
        query, key, value = with_front(front, given.query, given.key, given.value)
        given = given._replace(query=query, key=key, value=value)
    b, _, h, width = given.value.shape
    size, chunks, slices = given.key.shape[3], given.betas.shape[2], width // ROWS
    output = jax.ShapeDtypeStruct(given.value.shape, given.value.dtype)
    flags_type = jax.ShapeDtypeStruct((b * h * slices,), jnp.int32)
    edges_shape = (b, chunks, *given.state.shape[1:]) if keep_edges else (1,)
    states = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (given.state.shape, edges_shape)]

    def kernel(given: Chunks, out: Any, *rest: Any) -> None:
        *of_states, flags, memory = rest
        walk_block(
            given, Results(out, of_states, flags), memory, lax.axis_index("sequence"), lax.axis_index("slice"),
            keep_edges=keep_edges, front=front, stages=stages, scale=scale, interpret=emulated,
        )  # fmt: skip

    y, *found = launch(
        "delta_rule_scan",
        kernel,
        [output, *([] if continued else states), flags_type],
        {"sequence": b, "slice": h * slices},
        [Memory.types(stages, size, given.key.dtype)],
        warpgroups={"warpgroup": 3},
        parameters=FAST,
        interpret=interpret,
        changes=continued,
    )(given)
    return y[:, front:] if front else y, *found

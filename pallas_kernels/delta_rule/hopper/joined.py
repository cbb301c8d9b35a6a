"""Whole sequences by one kernel, where their heads do not use a whole GPU: `rows` and `scan` at the same time.

The walk over the chunks of a head cannot be divided, so few heads leave multiprocessors without work. Here blocks on
these compute T and P of all chunks, the first chunks of all heads first, and count the chunks that are done. Other
blocks walk, and wait for T and P of a chunk before they read them.

Blocks start in ascending order, those that compute T and P first. They wait for no other block, so every block ends,
whatever number of them is on the GPU at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.delta_rule.hopper import rows as of_chunks
from pallas_kernels.delta_rule.hopper.plain_rows import clear_rows, fetch_rows
from pallas_kernels.delta_rule.hopper.rows import Tokens
from pallas_kernels.delta_rule.hopper.scan import Chunks, Results, walk_block
from pallas_kernels.delta_rule.hopper.scan import Memory as WalkMemory
from pallas_kernels.delta_rule.hopper.substitution import substitute
from pallas_kernels.parts.hopper.inline import inline
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.parts.hopper.products import share
from pallas_kernels.parts.hopper.tile import ROWS

_WARPGROUPS: Final = 3


def rows_and_scan(
    x: Tokens, value: jax.Array, state: jax.Array, *, scale: float, keep_edges: bool, stages: int, workers: int,
    interpret: Any = False,
) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:  # fmt: skip
    """Runs the kernel on whole sequences.

    Args:
        x: The sequences.
        value: (B, T, H, V).
        state: (B, H, D, V) float32.
        scale: Factor of the outputs.
        keep_edges: Whether to return the states at the edges of the chunks.
        stages: Chunks of a walk in shared memory at once.
        workers: Blocks that compute T and P.
        interpret: False, or parameters of Mosaic's interpreter, in which nothing waits for T and P: it runs one block
            after the other.

    Returns:
        What `rows` and what `scan` return.
    """
    (b, tokens, _, size), (h, width) = x.key.shape, value.shape[2:]
    chunks, slices, emulated = -(-tokens // ROWS), width // ROWS, bool(interpret)
    heads, dtype = b * h, x.key.dtype
    square = jax.ShapeDtypeStruct((b, h, chunks, ROWS, ROWS), dtype)
    line = jax.ShapeDtypeStruct((b, h, chunks, ROWS), jnp.float32)
    edges = (b, chunks, *state.shape[1:]) if keep_edges else (1,)
    results = [
        jax.ShapeDtypeStruct(value.shape, dtype),
        *[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (state.shape, edges)],
        jax.ShapeDtypeStruct((heads * slices,), jnp.int32),
    ]

    types = [of_chunks.Memory.types(size, dtype, (_WARPGROUPS,), lines=2), WalkMemory.types(stages, size, dtype)]

    def kernel(x: Tokens, value: Any, state: Any, *rest: Any) -> None:
        t, p, logs, betas, grown, later, out, last, edges, flags, *memories = rest
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        done = None if emulated else pl.get_global(plgpu.SemaphoreType.REGULAR((heads * chunks,)))

        def work(memory: of_chunks.Memory) -> None:
            worker = _Worker(
                x, (t, p, logs, betas, grown, later), memory, warpgroup, Done(done, h, chunks), (b, h, chunks), emulated
            )
            worker.run(warpgroup * workers + block, _WARPGROUPS * workers)

        def walk(memory: WalkMemory) -> None:
            of_rows = Chunks(
                x.query,
                x.key,
                value,
                inverse=t,
                weights=p,
                grown=grown,
                later=later,
                betas=betas,
                state=state,
                lengths=x.lengths,
            )
            batch, of_head = lax.div(block - workers, h * slices), lax.rem(block - workers, h * slices)
            walk_block(
                of_rows,
                Results(out, (last, edges), flags),
                memory,
                batch,
                of_head,
                keep_edges=keep_edges,
                front=0,
                stages=stages,
                scale=scale,
                interpret=emulated,
                await_rows=Done(done, h, chunks).wait,
            )

        def run(body: Callable[[Any], None], which: int) -> None:
            # A block has memory for what it does. Mosaic's interpreter has no memory of a branch, but enough for both.
            if emulated:
                body(memories[which])
            else:
                pl.run_scoped(body, types[which], collective_axes="warpgroup")

        pl.when(block < workers)(partial(run, work, 0))
        pl.when(block >= workers)(partial(run, walk, 1))

    found = launch(
        "delta_rule",
        kernel,
        [square, square, *[line] * 4, *results],
        {"block": workers + heads * slices},
        types if emulated else (),
        warpgroups={"warpgroup": _WARPGROUPS},
        by_lanes=True,
        interpret=interpret,
    )(x, value, state)
    return list(found[:6]), tuple(found[6:])


class Done(NamedTuple):
    """Which chunks have T and P.

    Attributes:
        counts: A semaphore for each chunk of each head of each sequence; None where nothing waits.
        heads: Value heads of a sequence.
        chunks: Chunks of a sequence.
    """

    counts: Any
    heads: int
    chunks: int

    def of(self, batch: Any, head: Any, chunk: Any) -> Any:
        """Returns the semaphore of a chunk."""
        return self.counts.at[(batch * self.heads + head) * self.chunks + chunk]

    def wait(self, batch: Any, head: Any, chunk: Any) -> None:
        """Waits until T and P of a chunk are in GPU memory."""
        if self.counts is not None:
            plgpu.semaphore_wait(self.of(batch, head, chunk), 1, decrement=False, memory_scope="gpu")
            _order_copies()

    def signal(self, batch: Any, head: Any, chunk: Any) -> None:
        """Says that T and P of a chunk, for which this warpgroup has waited, are in GPU memory."""
        if self.counts is not None:
            _order_copies()
            plgpu.semaphore_signal(self.of(batch, head, chunk), 1, memory_scope="gpu")


@inline()
def _order_copies() -> None:
    """Orders what TMA writes and reads in GPU memory with the signals about it."""
    mgpu.utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)


@dataclass(frozen=True)
class _Worker:
    """A warpgroup that computes T and P of some chunks.

    Attributes:
        x: The sequences.
        targets: T, P and the numbers of rows, in GPU memory.
        memory: Shared memory of all warpgroups; what holds numbers of rows is there twice.
        warpgroup: Index of the warpgroup.
        done: Which chunks are done.
        sizes: Sequences, value heads and chunks.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """

    x: Tokens
    targets: tuple[Any, ...]
    memory: of_chunks.Memory
    warpgroup: Any
    done: Done
    sizes: tuple[int, int, int]
    interpret: bool

    def own(self, turn: Any) -> of_chunks.Memory:
        """Returns the warpgroup's memory for every other chunk."""
        own = of_chunks.Memory(*(ref.at[self.warpgroup] for ref in self.memory))
        return own._replace(**{name: getattr(own, name).at[turn] for name in of_chunks.LINES})

    def run(self, first: Any, step: int) -> None:
        """Computes chunks from the first one on, one of every `step`."""
        b, h, chunks = self.sizes
        rounds = lax.div(b * h * chunks - first + step - 1, step)
        self.fetch(first)

        @pl.loop(0, rounds)
        def _(i: Any) -> None:
            item = first + i * step
            there = self.there(item)
            pl.when(there)(lambda: self.compute(item, i, step))
            pl.when(jnp.logical_not(there))(lambda: self.fetch(item + step))

        self.tell(first + (rounds - 1) * step)

    def place(self, item: Any) -> tuple[Any, Any, Any]:
        """Returns sequence, head and chunk of an item: the first chunks of all heads come first."""
        b, h, _ = self.sizes
        pair = lax.rem(item, b * h)
        return lax.div(pair, h), lax.rem(pair, h), lax.div(item, b * h)

    def there(self, item: Any) -> Any:
        """Returns whether an item has rows."""
        b, h, chunks = self.sizes
        last = b * h * chunks - 1
        batch, _, chunk = self.place(jnp.clip(item, 0, last))
        return (item >= 0) & (item <= last) & (chunk * ROWS < self.x.lengths[batch])

    def fetch(self, item: Any) -> None:
        """Starts to read keys and queries of an item."""

        @pl.when(self.there(item))
        def _() -> None:
            batch, head, chunk = self.place(item)
            m, rows = self.own(0), pl.ds(chunk * ROWS, ROWS)
            key_head = lax.div(head, self.sizes[1] // self.x.key.shape[2])
            fetch_rows(self.x.key.at[batch, rows, key_head], m.key, m.full)
            fetch_rows(self.x.query.at[batch, rows, key_head], m.query, m.full)

    def tell(self, item: Any) -> None:
        """Waits until all that was sent is in GPU memory, and says that an item is done."""
        plgpu.wait_smem_to_gmem(0)
        pl.when(self.there(item))(lambda: self.done.signal(*self.place(item)))

    def compute(self, item: Any, index: Any, step: int) -> None:
        """Computes an item and sends it; says that the one before is done."""
        m, x, emulated = self.own(lax.rem(index, 2)), self.x, self.interpret
        batch, head, chunk = self.place(item)
        left = x.lengths[batch] - chunk * ROWS
        of_chunks.gates(x.g.at[batch, :, head], x.beta.at[batch, :, head], chunk * ROWS, left, None, m, emulated)
        plgpu.barrier_wait(m.full)
        clear_rows(left, m.key, m.query, interpret=emulated)
        pl.when(index > 0)(lambda: self.tell(item - step))
        of_chunks.coefficients(m, emulated)
        self.fetch(item + step)
        t, p = substitute(m.coefficients, m.seen, m.betas, None, emulated)
        plgpu.commit_smem()  # every warp has read the coefficients
        share(t, m.coefficients, emulated)
        share(p, m.seen, emulated)
        plgpu.commit_smem()
        sources = (m.coefficients, m.seen, m.logs, m.betas, m.grown, m.later)
        for source, target in zip(sources, self.targets, strict=True):
            plgpu.copy_smem_to_gmem(source, target.at[batch, head, chunk])

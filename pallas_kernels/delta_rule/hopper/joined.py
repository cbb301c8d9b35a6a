"""Whole sequences by one kernel, where their heads do not use a whole GPU: `rows` and `scan` at the same time.

The walk over the chunks of a head cannot be divided, so few heads leave multiprocessors without work. Here blocks on
these compute T and P of all chunks, the first chunks of all heads first, and count the chunks that are done. Other
blocks walk, and wait for T and P of a chunk before they read them.

Blocks start in ascending order, those that compute T and P first. They wait for no other block, so every block ends,
whatever number of them is on the GPU at once.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

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
    x: Tokens,
    value: jax.Array,
    state: jax.Array,
    *,
    scale: float,
    keep_edges: bool,
    stages: int,
    workers: int,
    interpret: Any = False,
) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
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

    def kernel(x: Tokens, value: Any, state: Any, *rest: Any) -> None:
        t, p, logs, betas, grown, later, out, last, edges, flags = rest
        block = lax.axis_index("block")
        done = None if emulated else pl.get_global(plgpu.SemaphoreType.REGULAR((heads * chunks,)))

        @pl.when(block < workers)
        def _() -> None:
            def work(memory: of_chunks.Memory) -> None:
                warpgroup = lax.axis_index("warpgroup")
                worker = warpgroup * workers + block
                own = of_chunks.Memory(*(ref.at[warpgroup] for ref in memory))
                _Worker(x, (t, p, logs, betas, grown, later), own, done, (b, h, chunks), emulated).run(
                    worker, _WARPGROUPS * workers
                )

            pl.run_scoped(work, of_chunks.Memory.types(size, dtype, (_WARPGROUPS,)), collective_axes="warpgroup")

        @pl.when(block >= workers)
        def _() -> None:
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
                    await_rows=None if done is None else partial(_await, done, h, chunks),
                )

            pl.run_scoped(walk, WalkMemory.types(stages, size, dtype), collective_axes="warpgroup")

    found = launch(
        "delta_rule",
        kernel,
        [square, square, *[line] * 4, *results],
        {"block": workers + heads * slices},
        warpgroups={"warpgroup": _WARPGROUPS},
        parameters=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True),
        interpret=interpret,
    )(x, value, state)
    return list(found[:6]), tuple(found[6:])


def _place(done: Any, h: int, chunks: int, batch: Any, head: Any, chunk: Any) -> Any:
    return done.at[(batch * h + head) * chunks + chunk]


def _await(done: Any, h: int, chunks: int, batch: Any, head: Any, chunk: Any) -> None:
    """Waits until T and P of a chunk are written."""
    plgpu.semaphore_wait(_place(done, h, chunks, batch, head, chunk), 1, decrement=False, memory_scope="gpu")
    _order_copies()


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
        memory: Its shared memory.
        done: What counts the chunks that are done, or None.
        sizes: Sequences, value heads and chunks.
        interpret: Whether the kernel runs in Mosaic's interpreter.
    """

    x: Tokens
    targets: tuple[Any, ...]
    memory: Any
    done: Any
    sizes: tuple[int, int, int]
    interpret: bool

    def run(self, first: Any, step: int) -> None:
        """Computes chunks from the first one on, one of every `step`."""
        b, h, chunks = self.sizes
        total = b * h * chunks
        rounds = lax.div(total - first + step - 1, step)
        self.fetch(first)

        @pl.loop(0, rounds)
        def _(i: Any) -> None:
            self.compute(first + i * step, i, first + (i + 1) * step, step)

        self.signal(first + (rounds - 1) * step)

    def place(self, item: Any) -> tuple[Any, Any, Any, Any]:
        """Returns sequence, head and chunk of an item, and how many rows of the sequence are there or later."""
        b, h, _ = self.sizes
        chunk, pair = lax.div(item, b * h), lax.rem(item, b * h)
        batch = lax.div(pair, h)
        return batch, lax.rem(pair, h), chunk, self.x.lengths[batch] - chunk * ROWS

    def there(self, item: Any) -> Any:
        """Returns whether an item has rows."""
        b, h, chunks = self.sizes
        last = b * h * chunks - 1
        return (item <= last) & (item >= 0) & (self.place(jnp.clip(item, 0, last))[3] > 0)

    def fetch(self, item: Any) -> None:
        """Starts to read keys and queries of an item."""

        @pl.when(self.there(item))
        def _() -> None:
            batch, head, chunk, _ = self.place(item)
            m, rows = self.memory, pl.ds(chunk * ROWS, ROWS)
            key_head = lax.div(head, self.sizes[1] // self.x.key.shape[2])
            fetch_rows(self.x.key.at[batch, rows, key_head], m.key, m.full)
            fetch_rows(self.x.query.at[batch, rows, key_head], m.query, m.full)

    def signal(self, item: Any) -> None:
        """Waits until all that was sent is in GPU memory, and says that an item is done."""
        plgpu.wait_smem_to_gmem(0)
        if self.done is None:
            return
        _order_copies()

        @pl.when(self.there(item))
        def _() -> None:
            _, h, chunks = self.sizes
            batch, head, chunk, _ = self.place(item)
            plgpu.semaphore_signal(_place(self.done, h, chunks, batch, head, chunk), 1, memory_scope="gpu")

    def compute(self, item: Any, index: Any, following: Any, step: int) -> None:
        """Computes an item and sends it; says that the one before is done."""
        m, x, emulated = self.memory, self.x, self.interpret
        self.signal(jnp.where(index > 0, item - step, -1))

        @pl.when(self.there(item))
        def _() -> None:
            batch, head, chunk, left = self.place(item)
            of_head = x.g.at[batch, :, head], x.beta.at[batch, :, head]
            of_chunks.gates(*of_head, chunk * ROWS, left, None, m, emulated)
            plgpu.barrier_wait(m.full)
            clear_rows(left, m.key, m.query, interpret=emulated)
            of_chunks.coefficients(m, emulated)
            self.fetch(following)
            t, p = substitute(m.coefficients, m.seen, m.betas, None, emulated)
            plgpu.commit_smem()  # every warp has read the coefficients
            share(t, m.coefficients, emulated)
            share(p, m.seen, emulated)
            plgpu.commit_smem()
            sources = (m.coefficients, m.seen, m.logs, m.betas, m.grown, m.later)
            for source, target in zip(sources, self.targets, strict=True):
                plgpu.copy_smem_to_gmem(source, target.at[batch, head, chunk])

        pl.when(jnp.logical_not(self.there(item)))(lambda: self.fetch(following))

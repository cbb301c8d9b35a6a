"""What the kernels of products on a Hopper GPU share: the plan of a launch, and a block's shared memory.

In each of them one warpgroup copies tiles of both operands into a ring of stages (TMA), others multiply them (wgmma)
into float32 accumulators and finish what they have summed. A kernel says what is copied into a stage, and how a tile
is summed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.matmul.hopper.epilogue import Ending, Epilogue, Store
from pallas_kernels.matmul.hopper.group_tiles import Table
from pallas_kernels.matmul.hopper.operand import Operand
from pallas_kernels.matmul.hopper.pipeline import Ring, Roles
from pallas_kernels.parts.hopper.launch import launch
from pallas_kernels.schedule.hopper.tiles import MatmulSchedule


class Scratch(NamedTuple):
    """Shared memory and barriers of a block.

    Attributes:
        rows: Stages of wgmma's rows; two views of them, as they are read and as they are copied, where these differ.
        columns: The same of wgmma's columns.
        store: Blocks of the result on their way to memory.
        full: Barriers of the stages that have arrived.
        empty: Barriers of the stages that have been read.
        fetched: Barriers of the residual.
        apart: What shares the bytes of something else, under the interpreter, which knows no two views of them.
        transposed: Barriers of the stages whose weights have been transposed.
        table: Where groups begin.
        ready: The barrier of the table.
    """

    rows: Any
    columns: Any
    store: Any
    full: Any
    empty: Any
    fetched: Any = None
    apart: Any = None
    transposed: Any = None
    table: Any = None
    ready: Any = None


@dataclass(frozen=True, kw_only=True)
class Product:
    """The static parameters of a launch.

    Attributes:
        name: What profiles call the kernel.
        schedule: Tiles and stages.
        rows: wgmma's rows.
        columns: wgmma's columns.
        walk: How blocks walk the tiles.
        ring: The stages.
        roles: What the warpgroups of a block do.
        shape: Rows and columns of an accumulator.
        store: How a tile leaves.
        interpret: Whether the kernel runs in the interpreter.
    """

    name: str
    schedule: MatmulSchedule
    rows: Operand
    columns: Operand
    walk: Any
    ring: Ring
    roles: Roles
    shape: tuple[int, int]
    store: Store
    interpret: Any

    def plain(self, part: Operand | Store) -> bool:
        """Whether the shared memory of an operand, or of the store, is used as plain rows too."""
        return part.ragged and not self.interpret

    def stages(self, operand: Operand, dtype: Any) -> Any:
        """Returns the shared memory of an operand's stages."""
        return operand.scratch(self.ring.stages, dtype, self.plain(operand))

    def views(self, operand: Operand, stages: Any) -> tuple[Any, Any]:
        """Returns an operand's stages as they are read and as they are copied."""
        return tuple(stages) if self.plain(operand) else (stages, stages)

    def blocks(self, dtype: Any) -> Any:
        """Returns the shared memory of the store, for a result of a dtype."""
        return self.store.scratch(self.schedule.warpgroups, dtype, self.plain(self.store))

    def launch(self, kernel: Callable[..., None], shape: tuple[int, ...], dtype: Any, scratch: Any) -> Any:
        """Returns the launch of a kernel with a result, which gets the scratch as its last argument."""
        return launch(
            self.name,
            kernel,
            jax.ShapeDtypeStruct(shape, dtype),
            {"block": self.walk.blocks},
            [scratch],
            warpgroups={"warpgroup": self.roles.warpgroups},
            interpret=self.interpret,
        )

    def offset(self, warpgroup: Any) -> Any:
        """Returns the first row of a warpgroup in a tile."""
        return warpgroup * self.shape[0] if self.schedule.split == "rows" else 0

    def part(self, offset: Any) -> Any:
        """Returns the rows of a warpgroup in a tile."""
        return pl.ds(offset, self.shape[0]) if self.rows.tile > self.shape[0] else slice(None)

    def ending(self, epilogue: Epilogue, out: Any, scratch: Any, warpgroup: Any) -> Ending:
        """Returns the end of a warpgroup's tiles."""
        tiled, plain = scratch.store if self.plain(self.store) else (scratch.store, None)
        return Ending(
            epilogue,
            self.store,
            swap=self.schedule.swap,
            out=out,
            tiled=tiled.at[warpgroup],
            plain=None if plain is None else plain.at[warpgroup],
            fetched=None if epilogue.residual is None else scratch.fetched.at[warpgroup],
            interpret=self.interpret,
        )


def fill_table(table: Table, sizes: jax.Array, scratch: Scratch, warpgroup: Any, interpret: Any) -> None:
    """Makes the table of where groups begin, in one warpgroup while the others wait."""

    @pl.when(warpgroup == 0)
    def _() -> None:
        table.fill(sizes, scratch.table, interpret)
        plgpu.barrier_arrive(scratch.ready)

    plgpu.barrier_wait(scratch.ready)

"""Shared parts of the Hopper product kernels: the plan of a launch, and a block's shared memory.

In each kernel one warpgroup copies tiles of both operands into a circular buffer of stages (TMA), others multiply them
(wgmma) into float32 accumulators and apply the epilogue. A kernel defines the copies of a stage and the sum of a tile.
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
        rows: Stages of wgmma's rows; two views of them if they are read and copied in different layouts.
        columns: The same for wgmma's columns.
        store: Blocks of the result to be stored.
        full: Barriers of the stages that have arrived.
        empty: Barriers of the stages that have been read.
        fetched: Barriers of the residual.
        apart: Separate memory for an aliased view in the interpreter, which does not support aliasing.
        transposed: Barriers of the stages whose weights have been transposed.
        table: The group offsets.
        ready: The barrier of the table.
        waiting: Memory for sums of the tree over K splits.
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
    waiting: Any = None


@dataclass(frozen=True, kw_only=True)
class Product:
    """The static parameters of a launch.

    Attributes:
        name: Name of the kernel in profiles.
        schedule: Tiles and stages.
        rows: wgmma's rows.
        columns: wgmma's columns.
        scheduler: The tile scheduler.
        ring: The stages.
        roles: Roles of the warpgroups.
        shape: Rows and columns of an accumulator.
        store: How a tile is stored.
        interpret: Whether the kernel runs in the interpreter.
    """

    name: str
    schedule: MatmulSchedule
    rows: Operand
    columns: Operand
    scheduler: Any
    ring: Ring
    roles: Roles
    shape: tuple[int, int]
    store: Store
    interpret: Any

    def plain(self, part: Operand | Store) -> bool:
        """Whether the shared memory of an operand, or of the store, is also viewed as plain rows."""
        return part.ragged and not self.interpret

    def stages(self, operand: Operand, dtype: Any) -> Any:
        """Returns the shared memory of an operand's stages."""
        return operand.scratch(self.ring.stages, dtype, self.plain(operand))

    def views(self, operand: Operand, stages: Any) -> tuple[Any, Any]:
        """Returns the views of an operand's stages for reading and for copying."""
        return tuple(stages) if self.plain(operand) else (stages, stages)

    def blocks(self, dtype: Any, sums: Any = None) -> Any:
        """Returns the shared memory of the store, for a result dtype, also viewed as that of `sums`."""
        return self.store.scratch(self.schedule.warpgroups, dtype, self.plain(self.store), sums)

    def launch(
        self, kernel: Callable[..., None], shape: tuple[int, ...], dtype: Any, scratch: Any, workspace: Any = None
    ) -> Any:
        """Returns the launch of a kernel with one result; the kernel's last argument is the scratch.

        With the type of a `workspace`, which the kernel receives after the result, there are two results.
        """
        out = jax.ShapeDtypeStruct(shape, dtype)
        return launch(
            self.name,
            kernel,
            out if workspace is None else [out, workspace],
            {"block": self.scheduler.blocks},
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
            fetched=scratch.fetched.at[warpgroup] if self.store.fetches else None,
            interpret=self.interpret,
        )


def fill_table(table: Table, sizes: jax.Array, scratch: Scratch, warpgroup: Any, interpret: Any) -> None:
    """Builds the table of group offsets in one warpgroup while the others wait."""

    @pl.when(warpgroup == 0)
    def _() -> None:
        table.fill(sizes, scratch.table, interpret)
        plgpu.barrier_arrive(scratch.ready)

    plgpu.barrier_wait(scratch.ready)

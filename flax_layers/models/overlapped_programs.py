"""All blocks of a partitioned model as one program, in which halves of a batch, or parts of it, overlap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec as P

from bijax.core.hashed_once import HashedOnce
from bijax.parallel import (
    BatchSplit,
    Overlap,
    OverlapStrategy,
    overlap_strategy,
    run_operations,
    run_overlapped,
)

from ._layered import Stored
from .batch_children import child_places, child_rows, join_rows
from .block import Block, Rotary, added
from .overlap_operations import OPERATIONS, Places, Values
from .parallel_experts import ParallelMoE
from .partitioned_programs import OnMesh, ServedBlock

type Stage = Callable[[Values, list[Stored]], tuple[Values, list[Stored]]]


class OverlappedBlocks(HashedOnce):
    """The blocks of a model on a mesh, without their arrays, and how they overlap.

    Args:
        blocks: For each block its modules, and which rotary embedding it has.
        overlap: How they overlap.
    """

    def __init__(self, blocks: tuple[tuple[OnMesh, int], ...], overlap: Overlap) -> None:
        super().__init__(blocks, overlap)
        self.blocks, self.overlap = blocks, overlap


@functools.partial(jax.jit, static_argnames=("structure", "split"), donate_argnames="stored")
def extend_overlapped(
    structure: OverlappedBlocks,
    arrays: tuple[tuple[jax.Array, ...], ...],
    x: jax.Array,
    angles: tuple[Rotary, ...],
    stored: Sequence[Stored],
    places: Places,
    *,
    split: BatchSplit | None,
) -> tuple[jax.Array, list[Stored]]:
    """Runs all blocks.

    Args:
        structure: The blocks.
        arrays: Of each block.
        x: (B, T, hidden_size), before the first block.
        angles: By each rotary embedding.
        stored: What each layer keeps. It is used up.
        places: Where the tokens belong.
        split: How the batch is split, with two batch overlap.

    Returns:
        The residual stream (B, T, hidden_size) after the last block, and what the layers keep.
    """
    mode: Literal["prefill", "decode"] = "decode" if x.shape[1] == 1 else "prefill"
    kept = [block.kept for block, _ in structure.blocks]
    specs = tuple(block.specs for block, _ in structure.blocks)

    def run(arrays: Any, x: jax.Array, angles: Any, stored: list[Stored], places: Places) -> Any:
        batches = _batches(x, angles, places, split)
        stages: list[Stage] = []
        for index, ((block, rotary), own) in enumerate(zip(structure.blocks, arrays, strict=True)):
            strategy = _strategy(block, own, mode, len(batches))
            stages += [_in_turn(block, names, own, index, rotary) for names in strategy.stages]
        ahead, ordered = strategy.delta_stages, strategy.ordered  # the same for all blocks
        done, written = run_overlapped(stages, batches, shared=stored, delta_stages=ahead, ordered=ordered)
        streams = [added(batch["stream"]) for batch in done]
        return streams[0] if split is None else join_rows(streams[0], streams[1], split, length=x.shape[1]), written

    in_specs, mesh = (specs, P(), P(), kept, P()), structure.blocks[0][0].mesh
    mapped = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=(P(), kept))
    return mapped(arrays, x, tuple(angles), list(stored), places)


def _batches(x: jax.Array, angles: Any, places: Places, split: BatchSplit | None) -> list[Values]:
    """Returns what is known of each batch before the first block."""
    if split is None:
        return [{"stream": (x, None), "angles": angles, "places": places}]
    rows, positions = child_rows(x, split), child_places(places, split)
    turned = [jax.tree.map(lambda angle, half=half: child_rows(angle, split)[half], angles) for half in (0, 1)]
    return [{"stream": (rows[half], None), "angles": turned[half], "places": positions[half]} for half in (0, 1)]


def _strategy(
    structure: OnMesh, arrays: tuple[jax.Array, ...], mode: Literal["prefill", "decode"], batches: int
) -> OverlapStrategy:
    """Returns the strategy of a block: that of DeepSeek with shared experts, and of Qwen3-MoE without."""
    block: Block = jax.tree.unflatten(structure.tree, arrays).block
    has_experts = isinstance(block.mlp, ParallelMoE)
    family = "deepseek" if getattr(block.mlp, "shared", None) is not None else "qwen3_moe"
    return overlap_strategy(family, mode, has_experts=has_experts, batches=batches)


def _in_turn(
    structure: OnMesh, names: tuple[str, ...], arrays: tuple[jax.Array, ...], index: int, rotary: int
) -> Stage:
    """Returns a stage of a block; what all layers keep is shared by the batches."""

    def stage(values: Values, stored: list[Stored]) -> tuple[Values, list[Stored]]:
        given = {name: value for name, value in values.items() if name != "angles"}
        given |= {"rotary": values["angles"][rotary], "kept": stored[index]}
        new = _stage(structure, names, arrays, given)
        kept = new.pop("kept", stored[index])
        return new, [*stored[:index], kept, *stored[index + 1 :]]

    return stage


@functools.partial(jax.jit, static_argnames=("structure", "names"))
def _stage(structure: OnMesh, names: tuple[str, ...], arrays: tuple[jax.Array, ...], values: Values) -> Values:
    """Runs the operations of a stage: one function for all blocks of a kind and for halves of the same shape."""
    served: ServedBlock = jax.tree.unflatten(structure.tree, arrays)
    known = {**values, "cache_scales": served.cache_scales}
    found = run_operations([functools.partial(OPERATIONS[name], served.block) for name in names], known)
    return {name: value for name, value in found.items() if name != "cache_scales"}

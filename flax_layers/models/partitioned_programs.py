"""The programs of a partitioned model in an engine: before, in and after the blocks, each under `jax.shard_map`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from bijax.core.hashed_once import HashedOnce

from ._layered import Stored, extend_block
from .adapters import Group, Stacks, attach
from .block import Block, Rotary, Stream, added, project, start_positions, start_tokens


class OnMesh(HashedOnce):
    """Modules of a model on a mesh, without their arrays.

    Args:
        tree: Structure of the modules.
        specs: How each of their arrays is sharded.
        mesh: The mesh.
        axis: The axis that heads and the vocabulary are cut over.
        kept: How the arrays that a block keeps of sequences are sharded: a spec of all, or one for each.
    """

    def __init__(self, tree: Any, specs: tuple[P, ...], mesh: Mesh, axis: str, kept: Any) -> None:
        super().__init__(tree, specs, mesh, axis, kept)
        self.tree, self.specs, self.mesh, self.axis, self.kept = tree, specs, mesh, axis, kept


class ServedBlock(NamedTuple):
    """A block of a model that is served.

    Attributes:
        block: Its modules.
        cache_scales: Those of keys and values in a cache of 8 bits, (K,) or (K, H); None for other caches.
        stacks: The adapters of its linear layers, or None.
    """

    block: Block
    cache_scales: tuple[jax.Array, jax.Array] | None
    stacks: Stacks | None = None


def heads_cut(axis: str) -> P:
    """Returns how pages (pages, page_size, heads, width) are sharded."""
    return P(None, None, axis, None)


@functools.partial(jax.jit, static_argnames=("structure", "capacity"))
def start_on(
    structure: OnMesh,
    arrays: tuple[jax.Array, ...],
    tokens: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    capacity: int,
) -> tuple[jax.Array, tuple[Rotary, ...]]:
    """Runs what is before the blocks; see `start_tokens`."""

    def run(arrays: Any, tokens: jax.Array, start: jax.Array, lengths: jax.Array) -> Any:
        embed, rotaries = jax.tree.unflatten(structure.tree, arrays)
        return start_tokens(embed, rotaries, tokens, start=start, lengths=lengths, capacity=capacity)

    mapped = jax.shard_map(run, mesh=structure.mesh, in_specs=(structure.specs, P(), P(), P()), out_specs=P())
    return mapped(arrays, tokens, start, lengths)


@functools.partial(jax.jit, static_argnames=("structure", "alone"), donate_argnames="stored")
def extend_on(
    structure: OnMesh,
    arrays: tuple[jax.Array, ...],
    stream: Stream,
    rotary: Rotary,
    stored: Stored,
    page_table: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    common_prefix: jax.Array | None,
    slots: jax.Array | None,
    groups: tuple[Group, ...] | None = None,
    *,
    alone: bool,
) -> tuple[Stream, Stored]:
    """Runs a block; with `alone` the addition at its end too, which is else left to the norm of the next one.

    `groups` says which tokens have which adapter; None for none.
    """

    def run(arrays: Any, stream: Stream, rotary: Rotary, stored: Stored, groups: Any, *places: Any) -> Any:
        served: ServedBlock = jax.tree.unflatten(structure.tree, arrays)
        if groups is not None and served.stacks is not None:
            attach(served.block, served.stacks, groups)
        given = (*places, served.cache_scales)
        stream, kept = extend_block(served.block, stream, rotary, stored, *given)
        return (added(stream), None) if alone else stream, kept

    in_specs = (structure.specs, P(), P(), structure.kept, P(), P(), P(), P(), P(), P())
    mapped = jax.shard_map(run, mesh=structure.mesh, in_specs=in_specs, out_specs=(P(), structure.kept))
    places = (page_table, start, lengths, common_prefix, slots)
    return mapped(arrays, stream, rotary, stored, groups, *places)


@functools.partial(jax.jit, static_argnames=("structure", "capacity"))
def join_on(
    structure: OnMesh,
    arrays: tuple[jax.Array, ...],
    hidden: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    *,
    capacity: int,
) -> tuple[jax.Array, Rotary]:
    """Runs what is before the block of a head for multi-token prediction; see `MTPHead.join`."""

    def run(arrays: Any, hidden: jax.Array, tokens: jax.Array, start: jax.Array, lengths: jax.Array) -> Any:
        head, embed, norm, rotary = jax.tree.unflatten(structure.tree, arrays)
        positions = start_positions(rotary, tokens.shape[1], start=start, lengths=lengths, capacity=capacity)
        return head.join(embed, norm, hidden, tokens), rotary(positions)

    mapped = jax.shard_map(run, mesh=structure.mesh, in_specs=(structure.specs, P(), P(), P(), P()), out_specs=P())
    return mapped(arrays, hidden, tokens, start, lengths)


@functools.partial(jax.jit, static_argnames=("structure", "soft_cap"))
def project_on(
    structure: OnMesh, arrays: tuple[jax.Array, ...], hidden: jax.Array, *, soft_cap: float | None
) -> jax.Array:
    """Returns the logits of rows of the residual stream, gathered from the devices that have their columns."""

    def run(arrays: Any, hidden: jax.Array) -> jax.Array:
        norm, projection = jax.tree.unflatten(structure.tree, arrays)
        columns = project(norm, projection, (hidden, None), soft_cap)
        return jax.lax.all_gather(columns, structure.axis, axis=1, tiled=True, to="invarying")

    mapped = jax.shard_map(run, mesh=structure.mesh, in_specs=(structure.specs, P()), out_specs=P())
    return mapped(arrays, hidden)


@functools.partial(jax.jit, static_argnames="structure")
def norm_on(structure: OnMesh, arrays: tuple[jax.Array, ...], hidden: jax.Array) -> jax.Array:
    """Returns the last norm of rows of the residual stream, float32."""

    def run(arrays: Any, hidden: jax.Array) -> jax.Array:
        norm, _ = jax.tree.unflatten(structure.tree, arrays)
        return norm(hidden).astype(jnp.float32)

    mapped = jax.shard_map(run, mesh=structure.mesh, in_specs=(structure.specs, P()), out_specs=P())
    return mapped(arrays, hidden)

"""The compiled functions of a served model."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bijax.core.hashed_once import HashedOnce

from ._layered import Additions, Stored, _start, run_blocks
from .adapters import sort_tokens
from .block import project


def flattened(part: Any) -> tuple[Any, tuple[jax.Array, ...]]:
    """Returns the structure of modules and their arrays: flattening a module takes longer than a call."""
    leaves, structure = jax.tree.flatten(part)
    return structure, tuple(leaves)


@functools.partial(jax.jit, static_argnames=("structure", "capacity"), donate_argnames="stored")
def extend_all(
    structure: HashedOnce,
    given: tuple[tuple[jax.Array, ...], tuple[tuple[jax.Array, ...], ...]],
    tokens: jax.Array,
    stored: list[Stored],
    page_table: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    common_prefix: jax.Array | None,
    slots: jax.Array | None,
    additions: Additions,
    capacity: int,
) -> tuple[jax.Array, list[Stored]]:
    """Runs all blocks on new tokens; see `ServedLlama.extend`."""
    (first, kinds), (arrays, parameters) = structure.parts, given
    embed, rotaries = jax.tree.unflatten(first, arrays)
    x, angles = _start(embed, rotaries, tokens, start, lengths, capacity)
    blocks = [(kind, arrays, rotary) for (kind, rotary), arrays in zip(kinds, parameters, strict=True)]
    places = (page_table, start, lengths, common_prefix, slots, additions)
    return run_blocks(blocks, x, angles, stored, *places, one_program=True)


sort = jax.jit(sort_tokens, static_argnames=("members", "length"))


@functools.partial(jax.jit, static_argnames=("structure", "soft_cap"))
def project_rows(
    structure: HashedOnce, given: tuple[jax.Array, ...], hidden: jax.Array, soft_cap: float | None
) -> jax.Array:
    """Returns the logits of rows of the residual stream."""
    norm, projection = jax.tree.unflatten(structure.parts[0], given)
    return project(norm, projection, (hidden, None), soft_cap)


@functools.partial(jax.jit, static_argnames="structure")
def norm_rows(structure: HashedOnce, given: tuple[jax.Array, ...], hidden: jax.Array) -> jax.Array:
    """Returns the norms of rows of the residual stream, float32."""
    norm, _ = jax.tree.unflatten(structure.parts[0], given)
    return norm(hidden).astype(jnp.float32)

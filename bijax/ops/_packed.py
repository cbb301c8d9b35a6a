"""Packed (concatenated) sequences: conversion to the padded layout and back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.checks import describe
from bijax.core.derivative import custom_vjp
from bijax.core.partitioning import whole_array
from bijax.ops._sequences import Names, locate_tokens


class Packed(NamedTuple):
    """The places of packed tokens in the padded layout.

    Attributes:
        lengths: (B,) int32, the tokens of each sequence, -1 if traced lengths are not valid; NumPy if they are known.
        rows: (B, L) int32, the token at each place of the padded layout; T for padding.
        places: (T,) int32, the place of each token in the flattened padded layout; B * L if it has none.
        valid: bool, whether the lengths are valid.
    """

    lengths: Any
    rows: jax.Array
    places: jax.Array
    valid: jax.Array

    def pad(self, x: jax.Array) -> jax.Array:
        """Returns (T, ...) as (B, L, ...), with zeros after each sequence."""
        return _gather(x, self.rows, self.places)

    def unpad(self, x: jax.Array, fill: float = 0.0) -> jax.Array:
        """Returns (B, L, ...) as (T, ...), with `fill` for tokens of no sequence; nan if the lengths are not valid."""
        found = _gather(x.reshape(self.rows.size, *x.shape[2:]), self.places, self.rows.reshape(-1))
        outside = (self.places == self.rows.size).reshape(-1, *[1] * (found.ndim - 1))
        found = jnp.where(outside, jnp.asarray(fill, found.dtype), found)
        return jnp.where(self.valid, found, jnp.asarray(jnp.nan, found.dtype))


def check_packed(op: str, query: jax.Array, unfit: dict[str, Any]) -> None:
    """Checks the arguments that accompany packed queries.

    Args:
        op: Name of the operation.
        query: The queries.
        unfit: Arguments that go with padded sequences alone, by name.

    Raises:
        ValueError: If the queries are not (T, N, H), or an unsupported argument is passed.
    """
    if query.ndim != 3:
        raise ValueError(
            f"{op}: packed sequences (cu_query_seq_lengths) must have the dimensions (T, N, H), got query"
            f" {describe(query)}."
        )
    given = [name for name, x in unfit.items() if x is not None]
    if given:
        raise ValueError(
            f"{op}: cu_query_seq_lengths goes without {', '.join(given)}; pad the sequences and give query_seq_lengths"
            " to use it."
        )


def find_packed(op: str, name: str, tokens: int, sums: Any, longest: int | None, names: Names) -> Packed:
    """Returns the places of packed tokens.

    Args:
        op: Name of the operation.
        name: Name of the argument with the tokens.
        tokens: Number T of tokens.
        sums: (B + 1,) ints: cumulative token counts, from 0.
        longest: The largest length L allowed; the longest sequence by default, or T if the lengths are traced.
        names: Names of `sums` and `longest`.

    Raises:
        TypeError: If lengths are not integers.
        ValueError: If shapes do not fit, or known lengths do not add up.
    """
    found = locate_tokens(op, (tokens,), None, sums, longest, name=name, names=names)
    known = found.known
    length = int(found.lengths.max(initial=0)) if known else min(tokens, tokens if longest is None else longest)
    length = max(1, length)
    batch = found.valid.shape[0]
    valid = jnp.all(found.valid)
    starts = jnp.cumsum(jnp.asarray(found.lengths)) - jnp.asarray(found.lengths)
    index = jnp.arange(length, dtype=jnp.int32)[None]
    inside = (index < jnp.asarray(found.lengths)[:, None]) & valid
    rows = jnp.where(inside, starts.astype(jnp.int32)[:, None] + index, tokens)
    places = jnp.where(found.inside, found.sequence * length + found.index, batch * length)
    lengths = found.lengths if known else jnp.where(valid, found.lengths, -1)
    return Packed(np.asarray(lengths) if known else lengths, rows, places, valid)


@custom_vjp()
def _gather(x: jax.Array, take: jax.Array, back: jax.Array) -> jax.Array:
    """Returns x[take], zeros where out of range; `back` is its inverse. Each element goes to at most one place."""
    if not x.shape[0]:
        return jnp.zeros((*take.shape, *x.shape[1:]), x.dtype)
    return whole_array(x).at[take].get(mode="fill", fill_value=0)


def _gather_forward(x: jax.Array, take: jax.Array, back: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _gather(x, take, back), (take, back)


def _gather_backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None, None]:
    take, back = saved
    return _gather(g.reshape(take.size, *g.shape[take.ndim :]), back, take), None, None


_gather.defvjp(_gather_forward, _gather_backward)

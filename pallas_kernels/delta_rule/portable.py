"""The gated delta rule on any platform: chunks of fixed shape, with products that the caller provides."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import XLA_FUNCTIONS, DeltaRuleContract, ElementwiseContract, honour
from pallas_kernels.delta_rule._chunk import Chunk, Product, Rows, compute_rows, next_state, no_rows
from pallas_kernels.delta_rule._sequences import get, put
from pallas_kernels.delta_rule.slots import in_slots
from pallas_kernels.parts.xla.tiles import isolate

Arrays = tuple[jax.Array, ...]

FEW: Final = 8
"""Most tokens that are computed as rows of their own instead of in whole chunks."""


def gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    keep_edges: bool,
    product: Product,
    together: bool,
    contract: DeltaRuleContract,
    functions: ElementwiseContract = XLA_FUNCTIONS,
) -> Arrays:
    """Computes whole sequences.

    Args:
        query: (B, T, J, D) of any floating dtype.
        key: (B, T, J, D) of the same dtype.
        value: (B, T, H, V) of the same dtype; J divides H.
        g: (B, T, H) float32.
        beta: (B, T, H) float32.
        state: (B, H, D, V) float32, before the first token, which has position 0.
        lengths: (B,) int32, the tokens of each sequence.
        scale: Factor of the outputs.
        keep_edges: Whether to return the states at the edges of the chunks, for the gradients.
        product: Multiplies stacks of matrices, see `Product`.
        together: Whether all sequences are computed at once, or one after another.
        contract: The order of the computation.
        functions: How exp is computed.

    Returns:
        The outputs (B, T, H, V), the states after the last tokens (B, H, D, V) float32, and with `keep_edges` the
        states at the edges of all N chunks, (B, N, H, D, V) float32.

    Guarantee: row-invariant: an output depends on the tokens of its sequence up to its own alone. The bits are those of
    `extend`.
    """
    honour("gated_delta_rule", functions, XLA_FUNCTIONS)
    run = _Run(scale, product, contract)

    def whole(*arrays: jax.Array) -> Arrays:
        *tokens, state, lengths = arrays
        rows, zero = heads_first(*tokens), jnp.zeros_like(lengths)
        found = run(rows, Kept(state, no_rows(rows, contract.chunk), zero), zero, lengths, keep_edges=keep_edges)
        last = next_state(found.kept.state, found.kept.chunk, lengths - found.kept.edge, product=product)
        return (found.y, last, found.edges) if keep_edges else (found.y, last)

    return by_sequence(whole, (query, key, value, g, beta, state, lengths), together=together)


def gated_delta_rule_extend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    kept_key: jax.Array,
    residual: jax.Array,
    inverse: jax.Array,
    decay: jax.Array,
    edge: jax.Array,
    start: jax.Array,
    lengths: jax.Array,
    slots: jax.Array | None = None,
    *,
    scale: float,
    product: Product,
    together: bool,
    contract: DeltaRuleContract,
    functions: ElementwiseContract = XLA_FUNCTIONS,
) -> Arrays:
    """Computes tokens of sequences that have a state, at positions from `start` on.

    Args:
        query: (B, T, J, D) of any floating dtype.
        key: (B, T, J, D) of the same dtype.
        value: (B, T, H, V) of the same dtype; J divides H.
        g: (B, T, H) float32.
        beta: (B, T, H) float32.
        state: (B, H, D, V) float32, at `edge`.
        kept_key: (B, J, C, D), keys of the chunk that starts at `edge`; this and the next three as in `Chunk`.
        residual: (B, H, C, V).
        inverse: (B, H, C, C) float32.
        decay: (B, H, C) float32.
        edge: (B,) int32, a multiple of C.
        start: (B,) int32, the position of the first token, from `edge` to `edge` + C; the chunk has the rows before it.
        lengths: (B,) int32, the tokens of each sequence.
        slots: (B,) int32, where in `state` to `decay`, then (S, ...), the sequences are; `inverse` is packed then, see
            `pallas_kernels.delta_rule.slots`. None if sequence b is at b.
        scale: As for `gated_delta_rule`, like the rest.
        product: Multiplies stacks of matrices.
        together: Whether all sequences are computed at once.
        contract: The order of the computation.
        functions: How exp is computed.

    Returns:
        The outputs (B, T, H, V), zeros after a sequence's length, and new values of `state`, `kept_key`, `residual`,
        `inverse`, `decay` and `edge`.

    Guarantee: row-invariant: an output depends on the tokens of its sequence up to its own alone.
    """
    honour("gated_delta_rule_extend", functions, XLA_FUNCTIONS)
    run = _Run(scale, product, contract)

    def more(*arrays: jax.Array) -> Arrays:
        tokens, (state, *chunk), (edge, start, lengths) = arrays[:5], arrays[5:10], arrays[10:]
        found = run(heads_first(*tokens), Kept(state, Chunk(*chunk), edge), start, start + lengths)
        return found.y, found.kept.state, *found.kept.chunk, found.kept.edge

    def continued(*kept: jax.Array) -> Arrays:
        return by_sequence(more, (query, key, value, g, beta, *kept, start, lengths), together=together)

    kept = (state, kept_key, residual, inverse, decay)
    return continued(*kept, edge) if slots is None else in_slots(continued, kept, edge, lengths, slots)


class Kept(NamedTuple):
    """What is known of B sequences.

    Attributes:
        state: (B, H, D, V) float32, at `edge`.
        chunk: The rows of the chunk that starts there.
        edge: (B,) int32.
    """

    state: jax.Array
    chunk: Chunk
    edge: jax.Array


class _Found(NamedTuple):
    y: jax.Array
    kept: Kept
    edges: Any


class _Carry(NamedTuple):
    reached: jax.Array
    kept: Kept
    y: jax.Array
    edges: Any


@dataclass(frozen=True)
class _Run:
    """Computes tokens chunk by chunk."""

    scale: float
    product: Product
    contract: DeltaRuleContract

    def __call__(
        self, tokens: Rows, kept: Kept, start: jax.Array, end: jax.Array, *, keep_edges: bool = False
    ) -> _Found:
        c, (b, h, total, v) = self.contract.chunk, tokens.value.shape
        together = total if total <= FEW else c
        front = c if together == c else 0
        padded = Rows(*(jnp.pad(x, [(0, 0), (0, 0), (front, together), *[(0, 0)] * (x.ndim - 3)]) for x in tokens))

        def window(_: jax.Array, carry: _Carry) -> _Carry:
            reached, kept, y, edges = carry
            at = reached // c * c
            kept = self._cross(kept, at, reached < end)
            if edges is not None:
                old = get(edges, at // c, 1, 1)
                new = jnp.where((reached < end)[:, None, None, None, None], kept.state[:, None], old)
                edges = put(edges, new, at // c, 1)
            first = at if together == c else reached
            position = first[:, None] + jnp.arange(together, dtype=jnp.int32)
            valid = (position >= reached[:, None]) & (position < jnp.minimum(end, at + c)[:, None])
            place = first - start + front
            some = Rows(*isolate(*(get(x, place, together, 2) for x in padded)))
            new, chunk = compute_rows(
                some,
                position - at[:, None],
                valid,
                kept.state,
                kept.chunk,
                scale=self.scale,
                product=self.product,
                contract=self.contract,
            )
            reached = reached + valid.sum(1, dtype=jnp.int32)
            # A sequence that ended before others keeps its outputs.
            new = jnp.where(valid[:, None, :, None], new, get(y, place, together, 2))
            return _Carry(reached, kept._replace(chunk=chunk), put(y, new, place, 2), edges)

        y = jnp.zeros((b, h, front + total + together, v), tokens.value.dtype)
        edges = jnp.zeros((b, -(-total // c), *kept.state.shape[1:]), jnp.float32) if keep_edges else None
        windows = jnp.where(end > start, (end - 1) // c - start // c + 1, 0).max(initial=0)
        done = lax.fori_loop(jnp.int32(0), windows, window, _Carry(start, kept, y, edges))
        y = lax.slice_in_dim(done.y, front, front + total, axis=2).swapaxes(1, 2)
        meant = jnp.arange(total, dtype=jnp.int32) < (end - start)[:, None]
        return _Found(jnp.where(meant[..., None, None], y, 0), done.kept, done.edges)

    def _cross(self, kept: Kept, at: jax.Array, more: jax.Array) -> Kept:
        """Replaces the state by the one at the next edge, for the sequences whose next token is after it."""
        due = (at > kept.edge) & more

        def cross(state: jax.Array) -> jax.Array:
            full = jnp.full(due.shape, self.contract.chunk, jnp.int32)
            after = next_state(state, kept.chunk, full, product=self.product)
            return jnp.where(due[:, None, None, None], after, state)

        state = lax.cond(due.any(), cross, lambda state: state, kept.state)
        return Kept(state, kept.chunk, jnp.where(due, at, kept.edge))


def heads_first(query: jax.Array, key: jax.Array, value: jax.Array, g: jax.Array, beta: jax.Array) -> Rows:
    """Returns tokens (B, T, heads, ...) as (B, heads, T, ...)."""
    return Rows(*(x.swapaxes(1, 2) for x in (query, key, value, g, beta)))


def by_sequence(function: Callable[..., Arrays], arrays: Arrays, *, together: bool) -> Arrays:
    """Applies a function of arrays (B, ...) to all sequences at once, or to one after another."""
    if together or arrays[0].shape[0] == 1:
        return function(*isolate(*arrays))

    def one(entry: list[jax.Array]) -> Arrays:
        return tuple(y[0] for y in function(*isolate(*(x[None] for x in entry))))

    return lax.map(one, list(arrays))

"""The gradients of the gated delta rule, chunk by chunk from the last one back, on any platform.

For one head and chunk, with the rows K, Q, V, R, U = T R and the matrices A, B, T of `DeltaRuleContract`,
D_ti = exp(G_t - G_i), n the last row, E the cotangent of the outputs times the scale, S the state before the chunk and
dS' the cotangent of the state after it:

    dR    = T' (B' E + exp(G_n - G) K dS')
    dA    = -strictly lower part of dR U',  dB = lower part of E U'
    dQ    = (exp(G) E) S' + (dB D) K
    dK    = (exp(G_n - G) U) dS'' - (beta exp(G) dR) S' + (beta dA D) K + (beta dA D)' K + (dB D)' Q
    dV    = beta dR
    dbeta = sum_v dR (V - exp(G) K S) + sum_i dA (K K') D
    dG    = rows of (dA A + dB B) - its columns + sum_v exp(G) (E (Q S) - beta dR (K S)) - left,
            left = sum_v exp(G_n - G) U (K dS'), and at row n + exp(G_n) <dS', S> + sum_t left_t
    dg_t  = dG_n + ... + dG_t
    dS    = exp(G_n) dS' + Q' (exp(G) E) - K' (beta exp(G) dR)

Roundings of the forward pass count as exact. All of it is float32; sums over the columns of a row have the order of
`RowContract`, and the gradients of a key head are added over its value heads upwards.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.contract import XLA_FUNCTIONS, DeltaRuleContract, ElementwiseContract, honour, row_contract
from pallas_kernels.delta_rule._chunk import Product, Rows, compute_rows, exp, multiply, no_rows
from pallas_kernels.delta_rule.portable import by_sequence, heads_first
from pallas_kernels.parts.xla.lanes import add_lanes
from pallas_kernels.parts.xla.opaque import apart_from_sums
from pallas_kernels.parts.xla.positions import fold_positions
from pallas_kernels.parts.xla.tiles import isolate

Arrays = tuple[jax.Array, ...]

_TOGETHER: Final = 64
"""Chunks of all sequences that are computed at once. A GPU is idle with few; more take more memory."""


def gated_delta_rule_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    edges: jax.Array,
    lengths: jax.Array,
    cotangent: jax.Array,
    state_cotangent: jax.Array,
    *,
    scale: float,
    product: Product,
    together: bool,
    contract: DeltaRuleContract,
    functions: ElementwiseContract = XLA_FUNCTIONS,
) -> Arrays:
    """Returns the gradients of `pallas_kernels.delta_rule.portable.gated_delta_rule`.

    Args:
        query: As in the forward pass, like the next four.
        key: (B, T, J, D).
        value: (B, T, H, V).
        g: (B, T, H) float32.
        beta: (B, T, H) float32.
        edges: (B, N, H, D, V) float32, from the forward pass.
        lengths: (B,) int32.
        cotangent: (B, T, H, V), of the outputs.
        state_cotangent: (B, H, D, V) float32, of the last states.
        scale: Factor of the outputs.
        product: Multiplies stacks of matrices.
        together: Whether all sequences are computed at once.
        contract: The order of the forward pass.
        functions: How exp is computed.

    Returns:
        The gradients of `query`, `key`, `value`, `g`, `beta` and the initial state, of their shapes and dtypes.

    Guarantee: row-invariant: the gradients of a sequence do not depend on the others.
    """
    honour("gated_delta_rule_gradients", functions, XLA_FUNCTIONS)
    run = _Chunks(scale, product, contract, value.shape[2] // key.shape[2], together)
    arrays = (query, key, value, g, beta, edges, lengths, cotangent, state_cotangent)
    return by_sequence(run, arrays, together=together)


class _Known(NamedTuple):
    """What chunks have without the cotangents of states; heads of keys are repeated for each value head."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    beta: jax.Array
    g: jax.Array
    state: jax.Array
    inverse: jax.Array
    age: jax.Array
    grown: jax.Array
    left: jax.Array
    end: jax.Array
    near: jax.Array
    far: jax.Array
    told: jax.Array
    asked: jax.Array
    u: jax.Array
    e: jax.Array
    inner: jax.Array
    gone: jax.Array

    @property
    def of_walk(self) -> Arrays:
        """What the walk over the chunks reads."""
        lines = (self.beta, self.inverse, self.grown, self.left, self.end)
        return self.query, self.key, *lines, self.inner, self.gone


@dataclass(frozen=True)
class _Chunks:
    """Computes the gradients of the tokens of sequences."""

    scale: float
    product: Product
    contract: DeltaRuleContract
    group: int
    together: bool

    def __call__(self, *arrays: jax.Array) -> Arrays:
        *tokens, edges, lengths, cotangent, state_cotangent = arrays
        c, total, dtypes = self.contract.chunk, cotangent.shape[1], [x.dtype for x in tokens]
        chunks = -(-total // c)
        meant = jnp.arange(total, dtype=jnp.int32) < lengths[:, None]

        def padded(x: jax.Array) -> jax.Array:
            x = jnp.where(meant.reshape(*meant.shape, *[1] * (x.ndim - 2)), x, 0)
            x = jnp.pad(x, [(0, 0), (0, chunks * c - total), *[(0, 0)] * (x.ndim - 2)])
            return x.reshape(x.shape[0], chunks, c, *x.shape[2:]).swapaxes(0, 1)

        of_chunks = (*(padded(x) for x in (*tokens, cotangent)), edges.swapaxes(0, 1))
        most = max(1, _TOGETHER // cotangent.shape[0]) if self.together else 1
        size = max(1, min(most, chunks))
        whole_blocks, rest = divmod(chunks, size)

        def block(after: jax.Array, some: Arrays) -> tuple[jax.Array, Arrays]:
            return self._block(after, isolate(*some))

        parts: list[Arrays] = []
        first = state_cotangent
        if rest:
            first, last = block(first, tuple(x[chunks - rest :] for x in of_chunks))
            parts.append(last)
        if whole_blocks:
            blocks = tuple(x[: chunks - rest].reshape(whole_blocks, size, *x.shape[1:]) for x in of_chunks)
            first, others = lax.scan(block, first, blocks, reverse=True)
            parts.append(tuple(x.reshape(chunks - rest, *x.shape[2:]) for x in others))
        found = [jnp.concatenate(pieces) for pieces in zip(*parts[::-1], strict=True)]

        def whole(x: jax.Array, dtype: jnp.dtype) -> jax.Array:  # (N, B, heads, C, ...)
            x = jnp.moveaxis(x, 0, 2)
            x = x.reshape(*x.shape[:2], chunks * c, *x.shape[4:])
            x = lax.slice_in_dim(x, 0, total, axis=2).swapaxes(1, 2).astype(dtype)
            return jnp.where(meant.reshape(*meant.shape, *[1] * (x.ndim - 2)), x, 0)

        return *isolate(*(whole(x, dtype) for x, dtype in zip(found, dtypes, strict=True))), first

    def _block(self, after: jax.Array, chunks: Arrays) -> tuple[jax.Array, Arrays]:
        """Returns the cotangent of the state before some chunks (M, B, ...), and the gradients of their tokens.

        What does not depend on the cotangent of a state is computed for all of them at once, before and after the walk.
        """
        size, batch = chunks[0].shape[:2]

        def merged(x: jax.Array) -> jax.Array:
            return x.reshape(size * batch, *x.shape[2:])

        def apart(x: jax.Array) -> jax.Array:
            return x.reshape(size, batch, *x.shape[1:])

        *tokens, cotangent, state = map(merged, chunks)
        known = self._known(heads_first(*tokens), state, cotangent.swapaxes(1, 2))
        of_walk = tuple(map(apart, known.of_walk))
        after, found = lax.scan(self._walk, after, of_walk, reverse=True)
        return after, tuple(map(apart, self._gradients(known, *map(merged, found))))

    def _known(self, tokens: Rows, state: jax.Array, cotangent: jax.Array) -> "_Known":
        """Returns what chunks of C tokens have without the cotangents of states."""
        b, h, c, _ = tokens.value.shape
        rows = jnp.broadcast_to(jnp.arange(c, dtype=jnp.int32), (b, c))
        _, kept = compute_rows(
            tokens,
            rows,
            jnp.ones((b, c), bool),
            state,
            no_rows(tokens, c),
            scale=self.scale,
            product=self.product,
            contract=self.contract,
        )
        group = h // tokens.key.shape[1]
        query, key = (jnp.repeat(x.astype(jnp.float32), group, 1) for x in (tokens.query, tokens.key))
        value, beta = tokens.value.astype(jnp.float32), tokens.beta[..., None]
        residual, inverse, decay = kept.residual.astype(jnp.float32), kept.inverse, kept.decay[..., None]
        times = self._times

        lower = rows[0][:, None] >= rows[0]
        strictly = rows[0][:, None] > rows[0]
        age = exp(jnp.where(lower, decay - decay.swapaxes(2, 3), 0))
        grown, left, end = exp(decay), exp(decay[:, :, -1:] - decay), exp(decay[:, :, -1:])
        of_keys, of_query = jnp.split(times(jnp.concatenate([key, query], 2), key, True), 2, 2)
        near, far = jnp.where(strictly, of_keys * age, 0), jnp.where(lower, of_query * age, 0)
        told, asked = jnp.split(times(jnp.concatenate([key, query], 2), state), 2, 2)
        u = times(inverse, residual)

        e = jnp.float32(self.scale) * cotangent.astype(jnp.float32)
        inner = times(far.swapaxes(2, 3), e)
        (gone,) = isolate(grown * e)
        of_rows, decays = (query, key, value, beta, tokens.g, state, inverse), (age, grown, left, end)
        return _Known(*of_rows, *decays, near, far, told, asked, u, e, inner, gone)

    def _walk(self, after: jax.Array, chunk: Arrays) -> tuple[jax.Array, Arrays]:
        """Returns the cotangent of the state before a chunk; and of that after it, and of its residuals."""
        query, key, beta, inverse, grown, left, end, inner, gone = isolate(*chunk)
        later = self._times(key, after)
        inner = apart_from_sums(inner) + apart_from_sums(left * later)
        dr = self._times(inverse.swapaxes(2, 3), inner)
        (taken,) = isolate(-(beta * grown * dr))
        onto = jnp.concatenate([query, key], 2).swapaxes(2, 3)
        before = apart_from_sums(end * after) + self._times(onto, jnp.concatenate([gone, taken], 2))
        return isolate(before)[0], isolate(after, later, dr, taken)

    def _gradients(
        self, known: "_Known", after: jax.Array, later: jax.Array, dr: jax.Array, taken: jax.Array
    ) -> Arrays:
        """Returns the gradients of chunks of C tokens."""
        query, key, value, beta, g, state, _, age, grown, left, end, near, far, told, asked, u, e, _, gone = known
        (b, h, c, _), times = value.shape, self._times
        place = jnp.arange(c, dtype=jnp.int32)
        lower, strictly = place[:, None] >= place, place[:, None] > place
        da, db = jnp.split(times(jnp.concatenate([dr, e], 2), u, True), 2, 2)
        da, db = jnp.where(strictly, -da, 0), jnp.where(lower, db, 0)
        wide, aged = beta * da * age, db * age
        of_state = times(jnp.concatenate([gone, taken], 2), state, True)
        across = times(jnp.concatenate([aged, wide], 2), key)
        down = times(jnp.concatenate([wide.swapaxes(2, 3), aged.swapaxes(2, 3)], 3), jnp.concatenate([key, query], 2))
        onward = times(left * u, after, True)
        (dq, dk) = (x + y for x, y in zip(jnp.split(of_state, 2, 2), jnp.split(across, 2, 2), strict=True))
        dk = isolate(isolate(dk + down)[0] + onward)[0]

        both = apart_from_sums(da * (beta * near)) + apart_from_sums(db * far)
        leaving = _row_sums(left * u * later)
        (dbeta,) = isolate(_row_sums(dr * (value - apart_from_sums(grown * told))) + _row_sums(da * near))
        dg = isolate(_row_sums(both) - _column_sums(both))[0]
        dg = dg + _row_sums(grown * (apart_from_sums(e * asked) - apart_from_sums(beta * dr * told)))
        dg = isolate(dg - leaving)[0]
        at_end = end[..., 0, 0] * _row_sums((after * state).reshape(b, h, -1)) + _row_sums(leaving)
        dg = dg.at[:, :, -1].add(isolate(at_end)[0])
        dg = jnp.where(g < self.contract.least, 0, _sums_from_the_end(dg))
        group = self.group
        per_head = (_over_group(isolate(x)[0], group) for x in (dq, dk))
        return isolate(*per_head, beta * dr, dg, dbeta)

    def _times(self, x: jax.Array, w: jax.Array, transpose_w: bool = False) -> jax.Array:
        return multiply(self.product, x, w, transpose_w)


def _row_sums(x: jax.Array) -> jax.Array:
    """(..., C) to (...)."""
    rows = isolate(x)[0].reshape(-1, x.shape[-1])
    return isolate(add_lanes(rows, row_contract()))[0].reshape(x.shape[:-1])


def _column_sums(x: jax.Array) -> jax.Array:
    """(B, H, C, D) to (B, H, D)."""
    columns = isolate(x)[0].reshape(-1, *x.shape[2:])
    return isolate(add_lanes(columns, row_contract()))[0].reshape(*x.shape[:2], x.shape[3])


def _sums_from_the_end(x: jax.Array) -> jax.Array:
    """(B, H, C): the sums of each element and those after it, one addition at a time from the last one on."""
    place = jnp.arange(x.shape[2], dtype=jnp.int32)
    (x,) = isolate(x)

    def add(total: jax.Array, i: jax.Array) -> jax.Array:
        at = x.shape[2] - 1 - i
        return total + jnp.where(place <= at, lax.dynamic_slice_in_dim(x, at, 1, 2), 0)

    return isolate(fold_positions(add, jnp.zeros_like(x), 0, x.shape[2]))[0]


def _over_group(x: jax.Array, group: int) -> jax.Array:
    """(B, H, C, D) to (B, J, C, D): adds the value heads of each key head upwards."""
    parts = x.reshape(x.shape[0], -1, group, *x.shape[2:])
    total = parts[:, :, 0]
    for i in range(1, group):
        total = total + parts[:, :, i]
    return total

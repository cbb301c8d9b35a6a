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
    run = _Chunks(scale, product, contract)
    arrays = (query, key, value, g, beta, edges, lengths, cotangent, state_cotangent)
    return by_sequence(run, arrays, together=together)


@dataclass(frozen=True)
class _Chunks:
    """Computes the gradients of the tokens of sequences."""

    scale: float
    product: Product
    contract: DeltaRuleContract

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

        def step(after: jax.Array, chunk: Arrays) -> tuple[jax.Array, Arrays]:
            *tokens, cotangent, state = isolate(*chunk)
            found = self._one(heads_first(*tokens), state, cotangent.swapaxes(1, 2), after)
            return found[-1], found[:-1]

        first, found = lax.scan(step, state_cotangent, of_chunks, reverse=True)

        def whole(x: jax.Array, dtype: jnp.dtype) -> jax.Array:  # (N, B, heads, C, ...)
            x = jnp.moveaxis(x, 0, 2)
            x = x.reshape(*x.shape[:2], chunks * c, *x.shape[4:])
            x = lax.slice_in_dim(x, 0, total, axis=2).swapaxes(1, 2).astype(dtype)
            return jnp.where(meant.reshape(*meant.shape, *[1] * (x.ndim - 2)), x, 0)

        return *isolate(*(whole(x, dtype) for x, dtype in zip(found, dtypes, strict=True))), first

    def _one(self, tokens: Rows, state: jax.Array, cotangent: jax.Array, after: jax.Array) -> Arrays:
        """Returns the gradients of one chunk of C tokens, and of the state before it."""
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
        later, u = times(key, after), times(inverse, residual)

        e = jnp.float32(self.scale) * cotangent.astype(jnp.float32)
        inner = apart_from_sums(times(far.swapaxes(2, 3), e)) + apart_from_sums(left * later)
        dr = times(inverse.swapaxes(2, 3), inner)
        da, db = jnp.split(times(jnp.concatenate([dr, e], 2), u, True), 2, 2)
        da, db = jnp.where(strictly, -da, 0), jnp.where(lower, db, 0)
        wide, aged = beta * da * age, db * age
        (gone, taken) = isolate(grown * e, -(beta * grown * dr))
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
        onto = jnp.concatenate([query, key], 2).swapaxes(2, 3)
        before = apart_from_sums(end * after) + times(onto, jnp.concatenate([gone, taken], 2))
        dg = jnp.where(tokens.g < self.contract.least, 0, _sums_from_the_end(dg))
        per_head = (_over_group(isolate(x)[0], group) for x in (dq, dk))
        return isolate(*per_head, beta * dr, dg, dbeta, before)

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

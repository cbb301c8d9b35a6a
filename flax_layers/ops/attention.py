"""The operations of attention: rotary embeddings, storing in a cache, and attention itself."""

from typing import Any

import jax
import jax.numpy as jnp

import bijax
from bijax.ops.rotary.heads import rotate_and_store, rotate_heads, side_by_side

from .cache import rotate_and_store_in_8_bits


class AttentionOps:
    """What layers with attention are built on; part of `Ops`."""

    def rotate(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Rotates the pairs (x[i], x[i + H/2]) of x (B, T, N, H) by angles with cos and sin (B, T, H/2), float32."""
        return rotate_heads(x, cos, sin)

    def rotate_and_store(
        self,
        heads: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        rows: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        *,
        to_rotate: jax.Array | None = None,
        scales: tuple[jax.Array, jax.Array] | None = None,
        groups: int = 1,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotates the queries and keys in heads (B, T, N + 2 * K, H) as `rotate` does, and stores keys and values.

        Each token is stored in its row, of rows (B * T,), in keys and values (X, Y, K, H) with X * Y rows; rows out of
        range are dropped. If passed, `to_rotate` (B, T, N + K, H) is rotated instead of the queries and keys in
        `heads`. Returns the rotated queries (B, T, N, H), keys and values. A cache of 8 bits has scales of keys and of
        values, (K,) or (K, H); it stores the quotients. The query of a token whose keys or values are inf or nan, which
        such a cache cannot hold, becomes nan. The heads may be in `groups` groups, each with an equal share of queries,
        keys and values in turn.
        """
        if scales is not None:
            heads, angles = side_by_side(heads, keys.shape[2], groups), (cos, sin)
            return rotate_and_store_in_8_bits(self.rotate, heads, angles, rows, (keys, values), to_rotate, scales)
        return self._rotate_and_store(heads, cos, sin, rows, keys, values, to_rotate, groups=groups)

    def _rotate_and_store(self, *arrays: Any, groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`rotate_and_store` with a cache of the heads' dtype; the last array is `to_rotate`."""
        *given, to_rotate = arrays
        return rotate_and_store(*given, to_rotate=to_rotate, groups=groups)

    def attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        page_table: jax.Array | None = None,
        start: jax.Array | None = None,
        lengths: jax.Array | None = None,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        common_prefix: jax.Array | None = None,
        scales: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """Causal attention of query (B, T, N, H) to key and value (B, S, K, H).

        With a page table (B, pages) these are pages (P, page size, K, H), and `start` and `lengths` are passed. Query t
        of sequence b has position start[b] + t (0 by default), key s at position s. With `lengths` only the first
        lengths[b] queries of a sequence count; the other outputs are undefined. Scores are multiplied by `scale`, 1 /
        sqrt(H) by default, and limited smoothly by a `soft_cap`; with a `window` a query sees that many keys at most,
        its own the last. If all sequences begin with the same pages, `common_prefix` () is the number of keys in these,
        so that they may be read once. A cache of 8 bits has scales of keys and of values, (K,) or (K, H).
        """
        options: dict[str, Any] = {
            "scale": scale,
            "is_causal": True,
            "local_window_size": None if window is None else (window - 1, 0),
            "logits_soft_cap": soft_cap,
        }
        if scales is not None:
            options |= {"key_scale": scales[0], "value_scale": scales[1]}
        if page_table is None:
            return bijax.dot_product_attention(query, key, value, **options, **_positions(start, lengths, key.shape[1]))
        ends, queries = _in_pages(start, lengths, page_table, key)
        options["common_prefix_length"] = common_prefix
        return bijax.paged_attention(query, key, value, page_table, ends, **options, **queries)

    def latent_attention(
        self,
        query: jax.Array,
        latents: jax.Array,
        *,
        value_size: int,
        scale: float,
        page_table: jax.Array | None = None,
        start: jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> jax.Array:
        """Causal attention of query (B, T, N, W) to latents (B, S, W), whose first `value_size` columns are the values.

        With a page table these are pages (P, page size, W). Positions and `lengths` are those of `attention`.
        """
        options: dict[str, Any] = {"value_size": value_size, "scale": scale}
        if page_table is None:
            return bijax.latent_attention(query, latents, **options, **_positions(start, lengths, latents.shape[1]))
        ends, queries = _in_pages(start, lengths, page_table, latents)
        return bijax.paged_latent_attention(query, latents, page_table, ends, **options, **queries)


def _positions(start: jax.Array | None, lengths: jax.Array | None, capacity: int) -> dict[str, Any]:
    """Returns the arguments for sequences in a cache; none for whole sequences."""
    if start is None or lengths is None:
        return {}
    return {
        "query_offset": start,
        "query_seq_lengths": lengths,
        "key_value_seq_lengths": jnp.minimum(start + lengths, capacity),
    }


def _in_pages(start: Any, lengths: Any, page_table: jax.Array, pages: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
    """Returns the numbers of keys of sequences in pages, and the arguments for their queries."""
    ends = jnp.minimum(start + lengths, page_table.shape[1] * pages.shape[1])
    return ends, {"query_offset": start, "query_seq_lengths": lengths}

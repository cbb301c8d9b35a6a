"""The operations that a layer is built on."""

from typing import Any, Protocol

import jax

from ..routing import Routing
from .linear_attention import LinearAttentionOps


class Ops(LinearAttentionOps, Protocol):
    """The operations whose bits may depend on the batch; everything else in a layer is exact.

    The layers of this package call nothing else for their arithmetic, save for lone additions, which are exactly
    rounded however they are compiled. `INVARIANT` and `PLAIN` are the two implementations; one object
    with these methods that compares equal to its copies (a frozen dataclass) is a third.
    """

    def matmul(
        self,
        x: jax.Array,
        w: jax.Array,
        *,
        bias: jax.Array | None = None,
        transpose_w: bool = False,
        precision: Any = None,
        preferred_element_type: Any = None,
    ) -> jax.Array:
        """Multiplies the rows of x (..., K) by w (K, N), or (N, K) with `transpose_w`."""

    def head_matmul(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Multiplies each head of x (B, T, N, K) by its own matrix of w (N, K, M)."""

    def quantized_matmul(
        self,
        x: jax.Array,
        weight: jax.Array,
        weight_scale: jax.Array,
        *,
        smooth_scale: jax.Array | None = None,
        bias: jax.Array | None = None,
        preferred_element_type: Any = None,
    ) -> jax.Array:
        """Quantises the rows of x (..., K) * smooth_scale (K,) to int8 and multiplies by weight (K, N), int8."""

    def group_matmul(self, x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """Multiplies rows x (M, K), sorted by group, by the weights w (G, K, N) of groups of these sizes.

        Rows after the last group's have no meaning.
        """

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns the rows (..., D) of table (V, D) by tokens (...), integers; nan for tokens outside the table."""

    def rms_norm(self, x: jax.Array, weight: jax.Array | None, *, eps: float, weight_offset: float = 0.0) -> jax.Array:
        """Divides each row of x (..., C) by its root mean square, times weight (C,) + weight_offset."""

    def add_rms_norm(
        self, x: jax.Array, residual: jax.Array, weight: jax.Array | None, *, eps: float, weight_offset: float = 0.0
    ) -> tuple[jax.Array, jax.Array]:
        """Returns x + residual, of one dtype, and its `rms_norm`."""

    def scale(self, x: jax.Array, factor: float) -> jax.Array:
        """Returns x times a scale that is rounded to the dtype of x."""

    def log_softmax(self, x: jax.Array) -> jax.Array:
        """Returns the log-probabilities of each row of x (..., C)."""

    def soft_cap(self, x: jax.Array, cap: float) -> jax.Array:
        """Returns cap * tanh(x / cap), element by element."""

    def swiglu(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Returns silu(gate) * up, element by element."""

    def geglu(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Returns gelu(gate) * up, element by element, with gelu approximated by tanh."""

    def route(self, logits: jax.Array, bias: jax.Array | None, routing: Routing) -> tuple[jax.Array, jax.Array]:
        """Selects experts (T, topk) by the router's products (T, E), float32; returns their weights (T, topk) too."""

    def experts(
        self, x: jax.Array, selected: jax.Array, weights: jax.Array, gate_up: jax.Array, down: jax.Array
    ) -> jax.Array:
        """Adds the results of each token's experts, times their weights.

        With tokens x (T, C), experts and weights (T, topk), and for each expert e the kernels gate_up[e] (C, 2 * I)
        and down[e] (I, C), around silu(gate) * up.
        """

    def quantized_experts(
        self,
        x: jax.Array,
        selected: jax.Array,
        weights: jax.Array,
        gate_up: tuple[jax.Array, jax.Array],
        down: tuple[jax.Array, jax.Array],
    ) -> jax.Array:
        """The same with kernels of int8 and the scales (E, N) of their columns; rows are quantised as they come."""

    def rotate(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Rotates the pairs (x[i], x[i + H/2]) of x (B, T, N, H) by angles with cos and sin (B, T, H/2), float32."""

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
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotates the queries and keys in heads (B, T, N + 2 * K, H) as `rotate` does, and stores keys and values.

        Each token is stored in its row, of rows (B * T,), in keys and values (X, Y, K, H) with X * Y rows; rows out of
        range are dropped. If passed, `to_rotate` (B, T, N + K, H) is rotated instead of the queries and keys in
        `heads`. Returns the rotated queries (B, T, N, H), keys and values. A cache of 8 bits has scales of keys and of
        values, (K,) or (K, H); it stores the quotients. The query of a token whose keys or values are inf or nan, which
        such a cache cannot hold, becomes nan.
        """

    def attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        start: jax.Array | None = None,
        lengths: jax.Array | None = None,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> jax.Array:
        """Causal attention of query (B, T, N, H) to key and value (B, S, K, H).

        Query t of sequence b has position start[b] + t (0 by default), key s at position s. With `lengths` only
        the first lengths[b] queries of a sequence count; the other outputs are undefined. Scores are multiplied by
        `scale`, 1 / sqrt(H) by default, and limited smoothly by a `soft_cap`; with a `window` a query sees that many
        keys at most, its own the last.
        """

    def paged_attention(
        self,
        query: jax.Array,
        key_pages: jax.Array,
        value_pages: jax.Array,
        page_table: jax.Array,
        *,
        start: jax.Array,
        lengths: jax.Array,
        scale: float | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        common_prefix: jax.Array | None = None,
        scales: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """The same with keys and values in pages (P, page size, K, H), listed by page_table (B, pages).

        If all sequences begin with the same pages, `common_prefix` () is the number of keys in these, so that they may
        be read once. A cache of 8 bits has scales of keys and of values, (K,) or (K, H).
        """

    def latent_attention(
        self,
        query: jax.Array,
        latents: jax.Array,
        *,
        value_size: int,
        scale: float,
        start: jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> jax.Array:
        """Causal attention of query (B, T, N, W) to latents (B, S, W), whose first `value_size` columns are the values.

        Positions and `lengths` are those of `attention`.
        """

    def paged_latent_attention(
        self,
        query: jax.Array,
        latent_pages: jax.Array,
        page_table: jax.Array,
        *,
        value_size: int,
        scale: float,
        start: jax.Array,
        lengths: jax.Array,
    ) -> jax.Array:
        """The same with latents in pages (P, page size, W), listed by page_table (B, pages)."""

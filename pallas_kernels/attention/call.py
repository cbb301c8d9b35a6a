"""One attention call, as passed through all layers: its arrays, of which some are optional, and its options."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import jax
import numpy as np
from jax import lax

Limits = tuple[jax.Array, jax.Array, jax.Array]
"""Limits of sequences in columns, (B,) int32 each: position of the first query, queries, keys."""


@dataclass(frozen=True)
class AttentionOptions:
    """The static parameters of a call, apart from its shapes.

    Attributes:
        scale: Factor of the scores.
        causal: Whether a query sees only positions up to its own.
        window: Number of keys that a query sees on each side of its position; None for no limit.
        soft_cap: Soft cap of the magnitude of the scores; None for no cap.
        latent_value_size: Width of the values where these are the first columns of the keys; None where they are an
            array of their own.
    """

    scale: float
    causal: bool = False
    window: tuple[int, int] | None = None
    soft_cap: float | None = None
    latent_value_size: int | None = None

    @property
    def factor(self) -> float:
        """Factor of the query-key products: the scale, in units of the soft cap if present."""
        return self.scale if self.soft_cap is None else self.scale / self.soft_cap


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arrays and options of a call: a pytree whose leaves are the arrays that are present.

    With B sequences, T queries, S keys, N query heads, K key heads, heads of width H, and of width V for the values.
    Optional arrays are declared only here. A backend function takes this record, and its kernel takes one of
    references. Optional arrays per head or per query-key pair have a leading dimension of B, or of 1 if shared by all
    sequences.

    Attributes:
        query: (B, T, N, H) float32, bfloat16 or float16.
        key: (B, S, K, H) of the same dtype, or int8 or float8_e4m3fn; or (P, page, K, H) with a page table. K divides
            N.
        value: (B, S, K, V), or (P, page, K, V), of the dtype of `key`; None if the values are the first
            `options.latent_value_size` columns of the keys, as in a latent cache. Kernels then read the keys alone.
        limits: (B, 3) int32 for each sequence: absolute position of the first query; number of queries (later ones see
            nothing); number of keys (later ones in the cache are never seen). A negative number of queries makes all
            results of the sequence nan.
        options: Scale, mask and soft cap.
        page_table: (B, n) int32, the pages of each sequence in order.
        alibi_slopes: (B or 1, N), times (key position - query position), added to the scaled scores.
        sinks: (B or 1, N), a score per head that is added to the softmax denominator and has no key.
        key_scale: (B or 1, K, H or 1), the scales of 8-bit keys; see `EightBitContract`.
        value_scale: (B or 1, K, V or 1), the same for the values.
        common_prefix: (1,) int32, number of leading keys that every sequence (up to its length) shares with the first
            sequence. It does not affect the bits, and a backend may ignore it.
        bias: (B or 1, N or 1, T or 1, S or 1) floats, added to the scaled scores.
        mask: bool, shaped like `bias`; false where a query does not see a key.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array | None
    limits: jax.Array | np.ndarray
    options: AttentionOptions = field(metadata={"static": True})
    page_table: jax.Array | None = None
    alibi_slopes: jax.Array | None = None
    sinks: jax.Array | None = None
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    common_prefix: jax.Array | None = None
    bias: jax.Array | None = None
    mask: jax.Array | None = None

    @property
    def present(self) -> tuple[str, ...]:
        """The names of the optional arrays that are present."""
        return tuple(name for name in OPTIONAL if getattr(self, name) is not None)

    @property
    def of_sequences(self) -> tuple[str, ...]:
        """The names of the arrays whose leading dimension is always B. Pages have no sequence axis."""
        if self.page_table is not None:
            return ("query", "limits", "page_table")
        return ("query", "key", "limits") if self.value is None else ("query", "key", "value", "limits")

    @property
    def values(self) -> jax.Array:
        """The values (B, S, K, V) as an array: a copy of columns of the keys where they have none."""
        return self.key[..., : self.value_size] if self.value is None else self.value

    @property
    def value_size(self) -> int:
        """Width V of a head of the values."""
        if self.value is not None:
            return int(self.value.shape[3])
        return self.options.latent_value_size or 0

    @property
    def capacity(self) -> int:
        """Key capacity of a sequence's cache."""
        return self.key.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no query, no key, or heads of width 0."""
        return 0 in self.query.shape or 0 in self.key.shape or not (self.value_size and self.capacity)

    @property
    def changes_scores(self) -> bool:
        """Whether there is a bias, a mask or slopes."""
        return any(name in OF_SCORES for name in self.present)

    def only(self, *names: str) -> "AttentionCall":
        """Returns the call with only the named optional arrays."""
        others: dict[str, Any] = {name: None for name in self.present if name not in names}
        return replace(self, **others)

    def numbers(self) -> Limits:
        """Returns the columns of `limits`, (B,) int32: positions of the first queries, queries, keys."""
        offsets, queries, keys = (self.limits[:, i] for i in range(3))
        return offsets, queries, keys  # type: ignore[return-value]  # kernels receive JAX arrays

    def sequence(self, index: jax.Array, names: tuple[str, ...] | None = None) -> "AttentionCall":
        """Returns the call with the arrays of one sequence, and with all pages.

        Args:
            index: Index of the sequence.
            names: Arrays to take, in this order; all by default.
        """
        found: dict[str, Any] = {}
        for name in dict.fromkeys((*self.of_sequences, *self.present)) if names is None else names:
            x = getattr(self, name)
            is_own = name in self.of_sequences or x.shape[0] > 1
            found[name] = lax.dynamic_slice_in_dim(x, index, 1) if is_own else x
        return replace(self, **found)


OPTIONAL: Final = tuple(f.name for f in fields(AttentionCall) if f.default is None)
"""The names of the optional arrays, in the order of the leaves."""

OF_HEADS: Final = ("alibi_slopes", "sinks")
"""Those that hold a number of each query head, (B or 1, N)."""

OF_SCORES: Final = ("alibi_slopes", "bias", "mask")
"""Those that are added to scores or hide keys; the backward pass needs them too."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class AttentionResults:
    """The results of a call, and the cotangent for its backward pass.

    Attributes:
        out: (B, T, N, V), the outputs.
        lse: (B, T, N) float32, the log-sum-exp of the scores.
        cotangent: (B, T, N, V), the gradient of `out`.
    """

    out: jax.Array
    lse: jax.Array
    cotangent: jax.Array

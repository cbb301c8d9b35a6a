"""One call of attention, as every layer hands it on: its arrays, which of them are present, and its options."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import jax
import numpy as np
from jax import lax

Limits = tuple[jax.Array, jax.Array, jax.Array]
"""Limits of sequences in columns, (B,) int32 each: position of the first query, queries, keys."""


@dataclass(frozen=True)
class AttentionOptions:
    """What is fixed about a call, apart from its shapes.

    Attributes:
        scale: Factor of the scores.
        causal: Whether a query sees no later position than its own.
        window: Keys before and after its own position that a query sees at most; None for no such limit.
        soft_cap: Scores are bent to stay below this magnitude; None for none.
    """

    scale: float
    causal: bool = False
    window: tuple[int, int] | None = None
    soft_cap: float | None = None

    @property
    def factor(self) -> float:
        """What products of queries and keys are multiplied by: the scale, in units of the soft cap if there is one."""
        return self.scale if self.soft_cap is None else self.scale / self.soft_cap


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arrays of a call, and its options: a pytree whose leaves are the arrays that are present.

    With B sequences, T queries, S keys, N query heads, K key heads, heads of width H, and of width V for the values.
    This is the only place that declares an optional array. A function of a backend takes the record, and its kernel
    takes one that holds references. The optional arrays that are numbers of heads or of pairs of a query and a key have
    a leading dimension of B, or of 1 where one serves all sequences.

    Attributes:
        query: (B, T, N, H) float32, bfloat16 or float16.
        key: (B, S, K, H) of the same dtype, or int8 or float8_e4m3fn; or (P, page, K, H) with a page table. K divides
            N.
        value: (B, S, K, V), or (P, page, K, V), of the dtype of `key`.
        limits: (B, 3) int32, numbers of each sequence: absolute position of the first query; queries, later ones see
            nothing; keys, what the cache holds beyond is never seen. A negative number of queries marks a sequence
            whose results are all nan.
        options: Scale, mask and soft cap.
        page_table: (B, n) int32, the pages of each sequence in order.
        alibi_slopes: (B or 1, N), times the position of the key minus that of the query, added to the scaled scores.
        sinks: (B or 1, N), a score for each head that joins the sum of the exponentials and belongs to no key.
        key_scale: (B or 1, K, H or 1), the factors of 8-bit keys; see `EightBitContract`.
        value_scale: (B or 1, K, V or 1), the same for the values.
        common_prefix: (1,) int32, so many keys at the start of every sequence, or all of a shorter one, are those of
            the first sequence. It changes no bit, and a backend may ignore it.
        bias: (B or 1, N or 1, T or 1, S or 1) floats, added to the scaled scores.
        mask: bool of such a shape; false where a query does not see a key.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
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
        """The names of the arrays whose leading dimension is always B. Pages belong to no sequence."""
        return ("query", "key", "value", "limits") if self.page_table is None else ("query", "limits", "page_table")

    @property
    def capacity(self) -> int:
        """Keys of a sequence that its cache has room for."""
        return self.key.shape[1] * (1 if self.page_table is None else self.page_table.shape[1])

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no query, no key, or no element of a head."""
        return 0 in self.query.shape or 0 in self.key.shape or not (self.value.shape[3] and self.capacity)

    @property
    def changes_scores(self) -> bool:
        """Whether anything is added to the scores, or a mask hides keys."""
        return any(name in OF_SCORES for name in self.present)

    def only(self, *names: str) -> "AttentionCall":
        """Returns the call with the named optional arrays alone."""
        others: dict[str, Any] = {name: None for name in self.present if name not in names}
        return replace(self, **others)

    def numbers(self) -> Limits:
        """Returns the columns of `limits`, (B,) int32: positions of the first queries, queries, keys."""
        offsets, queries, keys = (self.limits[:, i] for i in range(3))
        return offsets, queries, keys  # type: ignore[return-value]  # kernels are given arrays of JAX

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
    """The results of a call, and the gradient that its backward pass starts from.

    Attributes:
        out: (B, T, N, V), the outputs.
        lse: (B, T, N) float32, the log-sum-exp of the scores.
        cotangent: (B, T, N, V), the gradient of `out`.
    """

    out: jax.Array
    lse: jax.Array
    cotangent: jax.Array

"""The model interface of the engine."""

from typing import Any, Protocol, Self

import jax


class Model(Protocol):
    """A language model with a paged cache of keys and values, or whatever else it keeps for each token.

    The engine calls the methods with arrays of a few fixed shapes. With `one_program` it does so inside `jax.jit`,
    model and sampling together, since a GPU is faster than a host that calls many programs; the model must then be a
    pytree of its weights. Otherwise it calls them outside, and the model compiles its own programs, once for each
    shape. It must not wait for the device: tokens may still be in flight. `flax_layers.models.ServedLlama` is one such
    model.

    For the engine's promise, `extend` and `logits` must be row-invariant: the result for a token may depend on the
    tokens up to it in its own sequence, and neither on the batch, nor on how the sequence was cut into calls, nor
    on which pages hold it.

    A model may have another method, `embed`, with the same promise: it maps rows of hidden (R, ...) to embeddings
    (R, D), float32, for requests that ask for those.

    A model with LoRA adapters has an attribute `adapter_names`, and `extend` takes `adapters`, (B,) int32: for each
    sequence 0 for the model itself, or i + 1 for adapter i. The result for a token may then depend on the adapter of
    its own sequence, and not on those of others.

    A model that can be cut over several devices has the method `partitioned`, which maps a `jax.sharding.Mesh` to such
    a model. The result has the attribute `mesh`; its pages may be sharded, and hidden states and logits are the same
    on all devices. If its experts are on several devices, the attribute `expert_devices` says on how many, and the
    method `overlapped` maps a `bijax.parallel.Overlap` to the model that computes while rows travel to them.
    """

    @property
    def vocab_size(self) -> int:
        """Number of tokens, those that `logits` returns columns for."""

    @property
    def one_program(self) -> bool:
        """Whether the engine traces `extend` and `logits`. Weights are then the leaves of the model as a pytree."""

    @property
    def least_common_prefix(self) -> int | None:
        """The shortest common prefix, in tokens, for which `common_prefix` is worth a program.

        None if it never is. It has a meaning with `one_program` alone.
        """

    @property
    def max_length(self) -> int:
        """Longest sequence, in tokens."""

    def init_pages(self, num_pages: int, page_size: int) -> Any:
        """Returns an empty cache of `num_pages` pages that hold `page_size` tokens each.

        The first dimension of its arrays is the page.
        """

    def extend(
        self,
        pages: Any,
        tokens: jax.Array,
        page_table: jax.Array,
        start: jax.Array,
        lengths: jax.Array,
        common_prefix: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Appends tokens to sequences: prompts, parts of them, or one token each.

        Args:
            pages: The cache. It is used up.
            tokens: (B, T) int32, each sequence padded at its end.
            page_table: (B, n) int32: page i of a sequence holds its positions from i * page_size on. Entries after the
                last position of a sequence are undefined.
            start: (B,) int32, tokens of each sequence already in the cache.
            lengths: (B,) int32, new tokens of each sequence, from 0 to T. A row with 0 is padding and must not be
                written.
            common_prefix: () int32, tokens that all sequences begin with, in the same pages, which may be read once; no
                bit may depend on it. None where it is not known, as it always is unless `least_common_prefix` is set.

        Returns:
            hidden (B, T, ...), where the first lengths[b] of a sequence are valid, and the updated cache.
        """

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps rows of hidden (R, ...) to float32 logits (R, vocab_size)."""

    def plain(self) -> Self:
        """Returns the model with the same weights and stock JAX operations, which promises nothing about bits."""

    def with_weights(self, weights: Any) -> Self:
        """Returns the model with new weights, in a format of its choice, and the compiled programs of this one.

        Raises:
            TypeError: If it does not accept weights in that format.
            ValueError: If they belong to another model.
        """


class StatefulModel(Model, Protocol):
    """A model that keeps a state of each sequence in addition to the pages, as linear attention does.

    The engine has a state for each running sequence, in a *slot*, and *snapshots*, states at positions that are
    multiples of `state_interval`. It passes `extend` pages and states together, as (pages, states), with `slots`.

    For the engine's promise, a sequence that continues from a snapshot must have the bits of one that was computed from
    its beginning, and so must one whose last tokens were written again (drafts), if these are after the last position
    of that kind before them.
    """

    @property
    def state_interval(self) -> int:
        """Positions at which a state can be kept are multiples of this."""

    def init_states(self, num_slots: int) -> Any:
        """Returns the states of running sequences, in arrays whose first dimension is the slot."""

    def init_snapshots(self, number: int) -> Any:
        """Returns room for snapshots, in arrays whose first dimension is the snapshot."""

    def extend(
        self,
        pages: Any,
        tokens: jax.Array,
        page_table: jax.Array,
        start: jax.Array,
        lengths: jax.Array,
        common_prefix: jax.Array | None = None,
        *,
        slots: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Appends tokens to sequences, as `Model.extend` does.

        Args:
            pages: Pages and states.
            tokens: (B, T) int32.
            page_table: (B, n) int32.
            start: (B,) int32. A sequence that starts at 0 has an empty state, whatever its slot holds.
            lengths: (B,) int32. The slot of a row with 0 must not be written.
            common_prefix: () int32 or None.
            slots: (B,) int32, the slot of each sequence.
        """

    def keep_state(self, states: Any, snapshots: Any, slot: int, index: int, position: int) -> Any:
        """Returns the snapshots, with the state of a slot, of which `position` tokens count, at `index`.

        The snapshots are used up. An index past the end changes nothing.
        """

    def restore_state(self, states: Any, snapshots: Any, slot: int, index: int, position: int) -> Any:
        """Returns the states, with the snapshot at `index`, which is one of `position` tokens, in a slot.

        The states are used up. A slot past the end changes nothing.
        """


class DraftingModel(Model, Protocol):
    """A model with a head that drafts tokens, as multi-token prediction does.

    Entry t of the head is made of the hidden state at token t and of token t + 1, and attends to the entries before it;
    its logits are those of token t + 2. It keeps something of each entry in the page of token t, in arrays that
    `init_pages` returns with those of the model, and that `extend` leaves as they are.

    No result of the model may depend on the head. Drafts do not depend on the batch if `draft` and `draft_logits` are
    row-invariant, as `extend` and `logits` must be.
    """

    @property
    def draft_head(self) -> Any:
        """The head, or None for a model without."""

    def draft(
        self,
        pages: Any,
        hidden: jax.Array,
        tokens: jax.Array,
        page_table: jax.Array,
        start: jax.Array,
        lengths: jax.Array,
        *,
        own: bool,
    ) -> tuple[jax.Array, Any]:
        """Appends entries to what the head keeps of sequences.

        Args:
            pages: As for `extend`, with the states of a model that keeps some. They are used up.
            hidden: (B, T, ...), the hidden states of the entries' tokens.
            tokens: (B, T) int32, the token after each.
            page_table: (B, n) int32.
            start: (B,) int32, entries of each sequence before these.
            lengths: (B,) int32, new entries of each sequence, from 0 to T. A row with 0 must not be written.
            own: Whether `hidden` is what this method returned, instead of the model's.

        Returns:
            The head's hidden states (B, T, ...), and the pages.
        """

    def draft_logits(self, hidden: jax.Array) -> jax.Array:
        """Maps rows of the head's hidden states (R, ...) to float32 logits (R, vocab_size)."""


def has_draft_head(model: Any) -> bool:
    """Returns whether a model is a `DraftingModel` with a head."""
    return getattr(model, "draft_head", None) is not None


def adapter_names(model: Any) -> tuple[str, ...]:
    """Returns the names of a model's adapters; see `Model`."""
    return tuple(getattr(model, "adapter_names", ()))


def state_interval(model: Any) -> int | None:
    """Returns `StatefulModel.state_interval`, or None for a model that keeps pages alone."""
    return getattr(model, "state_interval", None)


class Tokenizer(Protocol):
    """The tokenizer interface of the engine, for texts and stop strings.

    `skip_special_tokens` needs another attribute, `special_token_ids`, a collection of tokens.
    """

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of tokens; incomplete characters as U+FFFD."""

"""A partitioned model with a head for multi-token prediction, as inference engines call it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from bijax.core.hashed_once import HashedOnce
from bijax.parallel import Overlap

from ..ops import PLAIN
from .adapters import Adapters
from .layers import KVCache
from .mtp import MTPHead
from .partitioned import PartitionedLlama
from .partitioned_head import PartitionedHead, partition_head
from .partitioned_programs import ServedBlock, extend_on, join_on, project_on
from .quantized_cache import QuantizedCache
from .served_partitioned import Frame, ServedPartitionedLlama, repeated
from .served_states import Pages

if TYPE_CHECKING:
    from ..checkpoint import lora


class DraftingPartitionedLlama(ServedPartitionedLlama):
    """A `ServedPartitionedLlama` with a head: a `bijax.serving.DraftingModel`.

    The head's block is cut as those of the model, and its keys and values come last among those of the layers.

    Args:
        model: The model.
        head: Its head.
        one_program: As for `ServedLlama`.
        overlap: As for `ServedPartitionedLlama`.
        cache_dtype: The same; the head's keys and values have the model's dtype.
        adapters: The same; they do not change the head.

    Guarantee: as `ServedPartitionedLlama`. Drafts do not depend on the number of devices either.

    Example:
        >>> from flax import nnx
        >>> from flax_layers.checkpoint import LlamaConfig
        >>> from flax_layers.models import Llama, MTPHead, ServedLlama
        >>> config = LlamaConfig.tiny(head_dim=8)
        >>> head = MTPHead(config, rngs=nnx.Rngs(1))
        >>> served = ServedLlama(Llama(config, rngs=nnx.Rngs(0)), draft_head=head)
        >>> len(served.partitioned(jax.make_mesh((1,), ("model",))).init_pages(2, 4))  # of the layer and the head
        2
    """

    def __init__(
        self,
        model: PartitionedLlama,
        head: PartitionedHead,
        *,
        one_program: bool | None = None,
        overlap: Overlap | None = None,
        cache_dtype: str | QuantizedCache | None = None,
        adapters: Mapping[str, lora.LoRA] | Adapters | None = None,
    ) -> None:
        how: dict[str, Any] = {"overlap": overlap, "cache_dtype": cache_dtype, "adapters": adapters}
        super().__init__(model, one_program=one_program, **how)
        self.draft_head = head
        arrays, specs = head.merged(head.params, head.rest), head.merged(head.specs, repeated(head.rest))
        own, own_specs = self._arrays, model.merged(model.specs, repeated(model.rest))
        self._block_of_head = self._part(ServedBlock(arrays.block, None), ServedBlock(specs.block, None), self._kept)
        self._joins = [
            self._part((arrays, own.embed, norm, own.rotary), (specs, own_specs.embed, norm_specs, own_specs.rotary))
            for norm, norm_specs in ((own.norm, own_specs.norm), (arrays.norm, specs.norm))
        ]
        self._end_of_head = self._part((arrays.norm, own.projection), (specs.norm, own_specs.projection))

    def init_pages(self, num_pages: int, page_size: int) -> Pages:
        """Returns keys and values of each layer that has them, then those of the head's block."""
        sizes = {**self._arrays.cache_sizes(), "num_layers": 1}
        of_head = self._pages_of(lambda table: KVCache.paged(table, num_pages=num_pages, page_size=page_size, **sizes))
        return [*super().init_pages(num_pages, page_size), *of_head]

    def extend(self, pages: Any, tokens: jax.Array, *places: Any, **options: Any) -> tuple[jax.Array, Any]:
        """Appends tokens to sequences; see `ServedLlama.extend`."""
        paged, with_states = _split(pages)
        hidden, kept = super().extend(with_states(paged[:-1]), tokens, *places, **options)
        written, with_states = _split(kept)
        return hidden, with_states([*written, paged[-1]])

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
        """Applies the head to tokens; see `bijax.serving.DraftingModel`."""
        paged, with_states = _split(pages)
        stored = paged[-1]
        capacity = page_table.shape[1] * stored[0].shape[1]
        x, rotary = join_on(*self._joins[own], hidden, tokens, start, lengths, capacity=capacity)
        places = (page_table, start, lengths, None, None)
        (x, _), kept = extend_on(*self._block_of_head, (x, None), rotary, stored, *places, alone=True)
        return x, with_states([*paged[:-1], kept])

    def draft_logits(self, hidden: jax.Array) -> jax.Array:
        """Maps rows (R, hidden_size) of the head's residual stream to float32 logits (R, vocab_size), gathered."""
        return project_on(*self._end_of_head, hidden, soft_cap=self.config.logits_soft_cap)

    def plain(self) -> DraftingPartitionedLlama:
        """Returns the model with the same shards and stock JAX operations; see `ServedPartitionedLlama.plain`."""
        return self._like(self.model.with_ops(PLAIN), None, self._cache, self.draft_head.with_ops(PLAIN))

    def with_weights(self, weights: Any) -> ServedPartitionedLlama:
        """Returns the model with other weights, in the same shards.

        Args:
            weights: As for `ServedPartitionedLlama.with_weights`; also a pair of such weights and an `MTPHead`, which
                is cut. Alone they leave the head as it is, which changes no bit.

        Raises:
            TypeError: As `ServedPartitionedLlama.with_weights`.
            ValueError: The same.
        """
        if isinstance(weights, tuple) and len(weights) == 2 and isinstance(weights[1], MTPHead):
            weights, head = weights
            changed = dataclasses.replace(self.draft_head, params=partition_head(head, self.model).params)
            return self._like(self.model, self.overlap, self._cache, changed).with_weights(weights)
        return super().with_weights(weights)

    def _like(
        self,
        model: PartitionedLlama,
        overlap: Overlap | None,
        cache: str | QuantizedCache | None,
        head: PartitionedHead | None = None,
    ) -> DraftingPartitionedLlama:
        how: dict[str, Any] = {"one_program": self.one_program, "overlap": overlap, "cache_dtype": cache}
        how["adapters"] = self._adapters
        return DraftingPartitionedLlama(model, self.draft_head if head is None else head, **how)


def _split(pages: Any) -> tuple[Pages, Any]:
    """Returns pages without states, and a function that adds the states to the pages again."""
    if isinstance(pages, tuple):
        return list(pages[0]), lambda paged: (paged, pages[1])
    return list(pages), lambda paged: paged


class _Frame(HashedOnce):
    """A served model with a head without its arrays, as the static part of a pytree."""

    def __init__(self, of_model: Frame, head: PartitionedHead) -> None:
        super().__init__(of_model, head.config, head.graph, tuple(jax.tree.leaves(head.specs)))
        self.of_model, self.head = of_model, dataclasses.replace(head, params={}, rest=None)


def _flatten(served: DraftingPartitionedLlama) -> tuple[tuple[Any, ...], _Frame]:
    model, head = served.model, served.draft_head
    frame = _Frame(Frame(model, served.one_program, served.overlap), head)
    return (model.params, model.rest, served._cache, served._adapters, head.params, head.rest), frame


def _unflatten(frame: _Frame, children: Iterable[Any]) -> DraftingPartitionedLlama:
    params, rest, cache, adapters, head_params, head_rest = children
    model = dataclasses.replace(frame.of_model.model, params=params, rest=rest)
    head = dataclasses.replace(frame.head, params=head_params, rest=head_rest)
    how: dict[str, Any] = {"one_program": frame.of_model.one_program, "overlap": frame.of_model.overlap}
    return DraftingPartitionedLlama(model, head, **how, cache_dtype=cache, adapters=adapters)


jax.tree_util.register_pytree_node(DraftingPartitionedLlama, _flatten, _unflatten)

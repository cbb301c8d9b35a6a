"""A Llama model as inference engines call it: the engine allocates the pages of the cache."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from bijax.core.hashed_once import HashedOnce

from ..ops import PLAIN
from ._layered import Additions, Layers, Stored, _start
from .adapters import Adapters
from .layers.delta_net_state import DeltaNetSnapshot
from .llama import Llama
from .mtp import MTPHead
from .parallel_adapters import cut_adapters
from .partition import partition
from .partitioned_head import partition_head
from .quantized_cache import QuantizedCache
from .same_model import check_same_arrays, check_same_config
from .served_model import ServedModel
from .served_mtp import ServedHead
from .served_partitioned import ServedPartitionedLlama
from .served_partitioned_head import DraftingPartitionedLlama
from .served_programs import extend_all, flattened, norm_rows, project_rows, sort
from .served_states import Pages, States, by_kind, by_layer, init_snapshots, keep_state, restore_state

if TYPE_CHECKING:
    from ..checkpoint import lora


class ServedLlama(ServedModel):
    """A Llama model for `bijax.serving.Engine`.

    On a CPU all blocks of one kind share one compiled program for each shape, where XLA would compile each of them
    again in a program for the whole model. Elsewhere the whole of a step is one program, since a GPU is faster than a
    host that calls the blocks one by one; the model is a pytree for that. The bits are the same.

    A model with linear attention is a `bijax.serving.StatefulModel`: its pages and states are passed together. With a
    head it is a `bijax.serving.DraftingModel`: the keys and values of the head come last among those of the layers.

    Args:
        model: The model.
        one_program: Whether the engine makes one program of a step; by default where the weights are not on a CPU.
        adapters: LoRA adapters by name, from `flax_layers.checkpoint.load_lora`, which requests can choose.
        cache_dtype: Dtype of the keys and values in the cache, see `QuantizedCache`; the model's by default. The head's
            have the model's.
        draft_head: A head that drafts tokens for speculative decoding; None for none.

    Raises:
        TypeError: If the model is not a `Llama`.
        ValueError: If an adapter changes a layer that the model does not have, there is no such cache, or the head
            belongs to another model.

    Guarantee: row-invariant with a model whose operations are, as `Llama.extend`; see `Adapters` for those.

    Example:
        >>> from flax_layers.checkpoint import LlamaConfig
        >>> config = LlamaConfig.tiny()
        >>> served = ServedLlama(Llama(config, rngs=nnx.Rngs(0)))
        >>> served.vocab_size, served.max_length
        (32, 64)
    """

    def __init__(
        self,
        model: Llama,
        *,
        one_program: bool | None = None,
        adapters: "Mapping[str, lora.LoRA] | Adapters | None" = None,
        cache_dtype: str | QuantizedCache | None = None,
        draft_head: MTPHead | None = None,
    ) -> None:
        if not isinstance(model, Llama):
            raise TypeError(f"ServedLlama: model must be a flax_layers.Llama, got {type(model).__name__}.")
        self.model, self.config = model, model.config
        self.draft_head = draft_head
        self._head = None if draft_head is None else ServedHead(draft_head, model)
        self._adapters = (
            adapters if isinstance(adapters, Adapters) else Adapters.stack(model, adapters) if adapters else None
        )
        self._cache = QuantizedCache.choose(model, cache_dtype) if isinstance(cache_dtype, str) else cache_dtype
        self._layers = Layers(model)
        self._linear = tuple(model.config.is_linear(layer) for layer in range(model.config.num_layers))
        if one_program is None:
            one_program = any(d.platform != "cpu" for leaf in jax.tree.leaves(model) for d in leaf.devices())
        self.one_program, self._is_plain = one_program, model.norm.ops is PLAIN
        # Arguments are flattened once: flattening a module takes longer than the call.
        first, self._first = flattened((model.embed, model.rotaries))
        last, self._last = flattened((model.norm, model.projection))
        self._structure = HashedOnce(first, tuple((kind, rotary) for kind, _, rotary in self._layers.blocks))
        self._end = HashedOnce(last)
        self._parameters = tuple(parameters for _, parameters, _ in self._layers.blocks)

    def init_pages(self, num_pages: int, page_size: int) -> Pages:
        """Returns keys and values of each layer that has them, (pages, page_size, K, H); latents have no values."""
        cache = self.model.paged_cache(np.zeros((1, 1), np.int32), num_pages=num_pages, page_size=page_size)
        pages: Pages = list(zip(cache.keys, cache.values, strict=True))
        if self._cache is not None:
            dtype = self._cache.dtype
            pages = jax.tree.map(lambda array: jnp.zeros(array.shape, dtype), pages)
        return pages if self._head is None else [*pages, self._head.init_pages(num_pages, page_size)]

    def init_states(self, num_slots: int) -> States:
        """Returns the states of each layer with linear attention."""
        return list(self.model.init_slots(num_slots))

    def init_snapshots(self, number: int) -> list[DeltaNetSnapshot]:
        """Returns room for snapshots of each layer with linear attention."""
        return init_snapshots(self.model, number)

    def keep_state(
        self, states: States, snapshots: list[DeltaNetSnapshot], slot: int, index: int, position: int
    ) -> list[DeltaNetSnapshot]:
        """Returns the snapshots with the state of a slot; see `bijax.serving.StatefulModel`."""
        return keep_state(states, snapshots, slot, index, position, ops=self.model.norm.ops)

    def restore_state(
        self, states: States, snapshots: list[DeltaNetSnapshot], slot: int, index: int, position: int
    ) -> States:
        """Returns the states with a snapshot in a slot; see `bijax.serving.StatefulModel`."""
        return restore_state(states, snapshots, slot, index, position)

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
        adapters: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Appends tokens to sequences.

        Args:
            pages: The cache, with linear attention the pair of pages and states. It is used up.
            tokens: (B, T) int32, each sequence padded at its end.
            page_table: (B, n) int32, the pages of each sequence in the order of its tokens.
            start: (B,) int32, tokens that each sequence has already.
            lengths: (B,) int32, new tokens of each sequence, 0 for padding.
            common_prefix: () int32, tokens that all sequences begin with, in the same pages; None if that is unknown.
            slots: (B,) int32, where the states of the sequences are, with linear attention.
            adapters: (B,) int32, 0 for the model itself, i + 1 for adapter i of `adapter_names`; None for the model.

        Returns:
            The residual stream (B, T, hidden_size) after the last block, and the cache.
        """
        model, layers, stateful = self.model, self._layers, slots is not None
        paged: Pages = pages[0] if stateful else pages
        of_head, paged = (paged[-1:], paged[:-1]) if self._head is not None else ([], paged)
        stored: list[Stored] = by_layer(paged, pages[1], self._linear) if stateful else list(paged)
        capacity = page_table.shape[1] * paged[0][0].shape[1]
        additions = Additions(cache_scales=None if self._cache is None else self._cache.scales)
        if adapters is not None and self._adapters is not None:
            groups = sort(self._adapters.members, adapters, length=tokens.shape[1])
            additions = additions._replace(stacks=self._adapters.blocks, groups=groups)
        numbers = (page_table, start, lengths, common_prefix, slots, additions)
        if self.one_program:
            given = (self._first, self._parameters)
            hidden, written = extend_all(self._structure, given, tokens, stored, *numbers, capacity)
        else:
            x, angles = _start(model.embed, model.rotaries, tokens, start, lengths, capacity)
            hidden, written = layers.extend(x, angles, stored, *numbers)
        kept, states = by_kind(written)
        return hidden, ([*kept, *of_head], states) if stateful else [*kept, *of_head]

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
        """Applies the head to tokens; see `bijax.serving.DraftingModel`.

        Raises:
            ValueError: If the model has no head.
        """
        head, stateful = self._used_head(), isinstance(pages, tuple)
        *paged, of_head = pages[0] if stateful else pages
        hidden, of_head = head.extend(of_head, hidden, tokens, page_table, start, lengths, own=own)
        return hidden, ([*paged, of_head], pages[1]) if stateful else [*paged, of_head]

    def draft_logits(self, hidden: jax.Array) -> jax.Array:
        """Maps rows (R, hidden_size) of the head's residual stream to float32 logits (R, vocab_size).

        Raises:
            ValueError: If the model has no head.
        """
        return project_rows(*self._used_head().end, hidden, self.config.logits_soft_cap)

    def _used_head(self) -> ServedHead:
        if self._head is None:
            raise ValueError("ServedLlama: drafts need a head, got a model without; pass draft_head.")
        return self._head

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps rows (R, hidden_size) of the residual stream to float32 logits (R, vocab_size)."""
        return project_rows(self._end, self._last, hidden, self.config.logits_soft_cap)

    def embed(self, hidden: jax.Array) -> jax.Array:
        """Maps rows (R, hidden_size) of the residual stream to their norms, float32."""
        return norm_rows(self._end, self._last, hidden)

    def partitioned(
        self, mesh: Mesh, *, axis: str = "model", expert_axis: str = "expert", leaves: int = 8
    ) -> "ServedPartitionedLlama":
        """Returns the model with weights and cache cut over the devices of a mesh.

        The arguments, errors and bits are those of `partition`.

        Raises:
            ValueError: As `partition`.
        """
        cut = partition(self.model, mesh, axis=axis, expert_axis=expert_axis, leaves=leaves)
        more: dict[str, Any] = {
            "cache_dtype": None if self._cache is None else self._cache.dtype,
            "adapters": None if self._adapters is None else cut_adapters(cut, self._adapters),
        }
        if self.draft_head is None:
            return ServedPartitionedLlama(cut, **more)
        return DraftingPartitionedLlama(cut, partition_head(self.draft_head, cut), **more)

    def plain(self) -> "ServedLlama":
        """Returns the model with the same weights and stock JAX operations."""
        head = None if self.draft_head is None else nnx.with_attributes(self.draft_head, ops=PLAIN)
        return self._with_model(nnx.with_attributes(self.model, ops=PLAIN), self._cache, head)

    def with_weights(self, weights: Any) -> "ServedLlama":
        """Returns the model with other weights, and the same adapters.

        Args:
            weights: A `Llama` of the same sizes, or its state as `nnx.state(model)` returns it. With a head also a pair
                of either and an `MTPHead`; alone they leave the head as it is, which changes no bit. The arrays are
                shared, not copied.

        Raises:
            TypeError: If they have another format.
            ValueError: If they belong to another model.
        """
        head = self.draft_head
        if isinstance(weights, tuple) and len(weights) == 2 and isinstance(weights[1], MTPHead) and head is not None:
            weights, head = weights
        if isinstance(weights, Llama):
            check_same_config("ServedLlama", "the weights", weights.config, self.config)
            weights = nnx.state(weights)
        if not isinstance(weights, nnx.State):
            raise TypeError(f"ServedLlama: weights must be a Llama or its nnx.State, got {type(weights).__name__}.")
        graph, state = nnx.split(self.model)
        check_same_arrays("ServedLlama", weights, state)
        # Scales of a cache belong to the weights.
        return self._with_model(nnx.merge(graph, weights), None if self._cache is None else self._cache.dtype, head)

    def _with_model(self, model: Llama, cache: str | QuantizedCache | None, head: MTPHead | None) -> "ServedLlama":
        more: Any = {"adapters": self._adapters, "cache_dtype": cache, "draft_head": head}
        return ServedLlama(model, one_program=self.one_program, **more)


def _unflatten(one_program: bool, children: Iterable[Any]) -> ServedLlama:
    model, adapters, cache, head = children
    return ServedLlama(model, one_program=one_program, adapters=adapters, cache_dtype=cache, draft_head=head)


jax.tree_util.register_pytree_node(
    ServedLlama,
    lambda served: ((served.model, served._adapters, served._cache, served.draft_head), served.one_program),
    _unflatten,
)

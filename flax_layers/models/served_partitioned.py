"""A partitioned Llama model as inference engines call it: weights and pages are cut over the devices of a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bijax.core.hashed_once import HashedOnce
from bijax.parallel import Overlap

from ..ops import PLAIN
from .adapters import Adapters
from .block import Stream
from .layers.delta_net_state import DeltaNetSnapshot
from .llama import Llama
from .overlap_operations import Places
from .overlapped_programs import OverlappedBlocks, extend_overlapped
from .parallel_adapters import adapter_specs, cut_adapters
from .parallel_delta_net import slot_specs
from .partitioned import PartitionedLlama
from .partitioned_programs import OnMesh, ServedBlock, extend_on, heads_cut, norm_on, project_on, start_on
from .partitioned_states import init_slots_on, init_snapshots_on, keep_state_on, restore_state_on
from .partitioned_weights import with_weights
from .quantized_cache import QuantizedCache
from .served_model import ServedModel
from .served_programs import sort
from .served_states import Pages, States, by_kind, by_layer

if TYPE_CHECKING:
    from ..checkpoint import lora

type Part = tuple[OnMesh, tuple[jax.Array, ...]]

_ON_ALL: Final = P()


class ServedPartitionedLlama(ServedModel):
    """A partitioned Llama model for `bijax.serving.Engine`; `ServedLlama.partitioned` makes one.

    Each device has its share of the weights, of the heads of each page and of the states; latents are repeated. Hidden
    states and logits are the same on all devices. A model with linear attention is a `bijax.serving.StatefulModel`.

    Args:
        model: The model.
        one_program: As for `ServedLlama`.
        overlap: See `overlapped`, which checks it. Where a batch overlaps, all blocks are one program.
        cache_dtype: As for `ServedLlama`; the scales of a cache of 8 bits are cut as its heads.
        adapters: As for `ServedLlama`; each device has its part of them.

    Raises:
        ValueError: If an adapter changes a layer that the model does not have, there is no such cache, or there are
            adapters with overlap.

    Guarantee: row-invariant, and with the same bits on 1, 2, 4, ... `leaves` devices, as `PartitionedLlama`.

    Example:
        >>> from flax import nnx
        >>> from flax_layers.checkpoint import LlamaConfig
        >>> from flax_layers.models import ServedLlama
        >>> config = LlamaConfig.tiny(head_dim=8)
        >>> served = ServedLlama(Llama(config, rngs=nnx.Rngs(0))).partitioned(jax.make_mesh((1,), ("model",)))
        >>> served.vocab_size, served.mesh.shape["model"]
        (32, 1)
    """

    def __init__(
        self,
        model: PartitionedLlama,
        *,
        one_program: bool | None = None,
        overlap: Overlap | None = None,
        cache_dtype: str | QuantizedCache | None = None,
        adapters: Mapping[str, lora.LoRA] | Adapters | None = None,
    ) -> None:
        self.model, self.config = model, model.config
        self._adapters = cut_adapters(model, adapters) if isinstance(adapters, Mapping) and adapters else None
        if isinstance(adapters, Adapters):  # those of a `ServedPartitionedLlama`, which are cut
            self._adapters = adapters
        self._cache = QuantizedCache.choose(model, cache_dtype) if isinstance(cache_dtype, str) else cache_dtype
        self.overlap = overlap
        if one_program is None:
            one_program = any(device.platform != "cpu" for device in model.mesh.devices.flat)
        self.one_program = one_program
        arrays = model.local(model.params)
        specs = model.merged(model.specs, repeated(model.rest))
        self._is_plain = arrays.norm.ops is PLAIN
        self._first = self._part((arrays.embed, arrays.rotaries), (specs.embed, specs.rotaries))
        self._last = self._part((arrays.norm, arrays.projection), (specs.norm, specs.projection))
        self._linear = tuple(model.config.is_linear(layer) for layer in range(model.config.num_layers))
        known: dict[OnMesh, OnMesh] = {}  # structures that are equal become one object
        self._blocks: list[tuple[OnMesh, tuple[jax.Array, ...], int]] = []
        for index, (block, spec) in enumerate(zip(arrays.blocks, specs.blocks, strict=True)):
            kept = slot_specs(model.axis) if self._linear[index] else self._kept
            stacks = None if self._adapters is None else self._adapters.blocks[index]
            parts = (
                ServedBlock(block, self._scales(index), stacks),
                ServedBlock(spec, self._scale_specs, adapter_specs(model.axis, stacks)),
            )
            structure, parameters = self._part(*parts, kept)
            self._blocks.append((known.setdefault(structure, structure), parameters, arrays.rotary_of(index)))
        blocks = tuple((block, rotary) for block, _, rotary in self._blocks)
        self._overlapped = None if overlap is None else OverlappedBlocks(blocks, overlap)

    def _part(self, modules: Any, specs: Any, kept: Any = _ON_ALL) -> Part:
        leaves, tree = jax.tree.flatten(modules)
        return OnMesh(tree, tuple(jax.tree.leaves(specs)), self.mesh, self.model.axis, kept), tuple(leaves)

    def _scales(self, layer: int) -> tuple[jax.Array, jax.Array] | None:
        return None if self._cache is None else self._cache.scales[layer]

    @property
    def _scale_specs(self) -> Any:
        return None if self._cache is None else (P(self.model.axis), P(self.model.axis))

    @property
    def _kept(self) -> P:
        """How pages are sharded."""
        return heads_cut(self.model.axis) if self.config.latent is None else P()

    @property
    def _arrays(self) -> Llama:
        return self.model.local(self.model.params)

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.model.mesh

    def init_pages(self, num_pages: int, page_size: int) -> Pages:
        """Returns keys and values of each layer that has them, sharded by heads; latents are repeated."""
        arrays = self._arrays
        dtype = None if self._cache is None else self._cache.dtype
        return self._pages_of(lambda table: arrays.paged_cache(table, num_pages=num_pages, page_size=page_size), dtype)

    def _pages_of(self, make: Callable[[np.ndarray], Any], dtype: str | None = None) -> Pages:
        """Returns the pages of a cache that is made of a page table, sharded over the mesh, of its dtype or another."""

        def zeros() -> Pages:
            cache = make(np.zeros((1, 1), np.int32))
            pages: Pages = list(zip(cache.keys, cache.values, strict=True))
            return pages if dtype is None else jax.tree.map(lambda x: x.astype(dtype), pages)

        return jax.jit(zeros, out_shardings=NamedSharding(self.mesh, self._kept))()

    def init_states(self, num_slots: int) -> States:
        """Returns the states of each layer with linear attention, sharded by heads."""
        return init_slots_on(self.mesh, self.model.axis, self._arrays, num_slots)

    def init_snapshots(self, number: int) -> list[DeltaNetSnapshot]:
        """Returns room for snapshots of each layer with linear attention, sharded by heads."""
        return init_snapshots_on(self.mesh, self.model.axis, self._arrays, number)

    def keep_state(
        self, states: States, snapshots: list[DeltaNetSnapshot], slot: int, index: int, position: int
    ) -> list[DeltaNetSnapshot]:
        """Returns the snapshots with the state of a slot; see `bijax.serving.StatefulModel`."""
        places, ops = (slot, index, position), self._arrays.norm.ops
        return keep_state_on(self.mesh, self.model.axis, states, snapshots, *places, ops=ops)

    def restore_state(
        self, states: States, snapshots: list[DeltaNetSnapshot], slot: int, index: int, position: int
    ) -> States:
        """Returns the states with a snapshot in a slot; see `bijax.serving.StatefulModel`."""
        return restore_state_on(self.mesh, self.model.axis, states, snapshots, slot, index, position)

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
        """Appends tokens to sequences; see `ServedLlama.extend`."""
        stateful = slots is not None
        stored = by_layer(pages[0], pages[1], self._linear) if stateful else pages
        first: Any = pages[0][0]
        capacity = page_table.shape[1] * (first[0] if stateful else first).shape[1]
        x, angles = start_on(*self._first, tokens, start, lengths, capacity=capacity)
        split = None if self.overlap is None else self.overlap.split(*tokens.shape)
        if self._overlapped is not None and (split is not None or self._overlapped.overlap.kind == "single_batch"):
            places, own = Places(page_table, start, lengths, common_prefix, slots), tuple(b[1] for b in self._blocks)
            hidden, kept_by_all = extend_overlapped(self._overlapped, own, x, angles, stored, places, split=split)
            return hidden, by_kind(kept_by_all) if stateful else kept_by_all
        groups = None
        if adapters is not None and self._adapters is not None:
            groups = sort(self._adapters.members, adapters, length=tokens.shape[1])
        stream: Stream = (x, None)
        written, last = [], len(self._blocks) - 1
        for index, ((structure, parameters, rotary), layer) in enumerate(zip(self._blocks, stored, strict=True)):
            given = (angles[rotary], layer, page_table, start, lengths, common_prefix, slots, groups)
            alone = not self.one_program or index == last
            stream, kept = extend_on(structure, parameters, stream, *given, alone=alone)
            written.append(kept)
        return stream[0], by_kind(written) if stateful else written

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Maps rows (R, hidden_size) of the residual stream to float32 logits (R, vocab_size), gathered."""
        return project_on(*self._last, hidden, soft_cap=self.config.logits_soft_cap)

    def embed(self, hidden: jax.Array) -> jax.Array:
        """Maps rows (R, hidden_size) of the residual stream to their norms, float32."""
        return norm_on(*self._last, hidden)

    @property
    def expert_devices(self) -> int:
        """Devices that experts are spread over; 1 without experts."""
        if self.config.experts is None:
            return 1
        return self.mesh.shape[self.model.axis] * self.mesh.shape.get(self.model.expert_axis, 1)

    def overlapped(self, overlap: Overlap | None) -> ServedPartitionedLlama:
        """Returns the model with the communication of its experts overlapped with computation; None for no overlap.

        Raises:
            ValueError: If its experts are not on several devices, or it has stock JAX operations or adapters.

        Guarantee: the bits are those without.
        """
        if overlap is not None and (self.expert_devices == 1 or self._is_plain):
            has = "stock JAX operations" if self._is_plain else "no experts on other devices"
            raise ValueError(
                "ServedPartitionedLlama: overlap needs experts on several devices and invariant operations, got a model"
                f" with {has}; pass None."
            )
        if overlap is not None and self._adapters is not None:
            raise ValueError(
                "ServedPartitionedLlama: overlap needs a model without adapters, got"
                f" {', '.join(self.adapter_names)}; leave either out."
            )
        return self._like(self.model, overlap, self._cache)

    def plain(self) -> ServedPartitionedLlama:
        """Returns the model with the same shards and stock JAX operations, such as `jax.lax.psum`, without overlap."""
        return self._like(self.model.with_ops(PLAIN), None, self._cache)

    def with_weights(self, weights: Any) -> ServedPartitionedLlama:
        """Returns the model with other weights, in the same shards.

        Args:
            weights: A `Llama` of the same sizes or its state, which are cut, or a `PartitionedLlama` that was cut in
                the same way, whose arrays are moved to this mesh.

        Raises:
            TypeError: If they have another format.
            ValueError: If they belong to another model, or were cut in another way.
        """
        model = with_weights(self.model, weights)
        # Scales of a cache belong to the weights.
        return self._like(model, self.overlap, None if self._cache is None else self._cache.dtype)

    def _like(
        self, model: PartitionedLlama, overlap: Overlap | None, cache: str | QuantizedCache | None
    ) -> ServedPartitionedLlama:
        how: dict[str, Any] = {"overlap": overlap, "cache_dtype": cache, "adapters": self._adapters}
        return ServedPartitionedLlama(model, one_program=self.one_program, **how)


def repeated(rest: Any) -> Any:
    """Returns the `jax.sharding.PartitionSpec` of leaves that are the same on all devices."""
    return jax.tree.map(lambda _: P(), rest)


class Frame(HashedOnce):
    """A served model without its arrays, as the static part of a pytree; equal frames run the same programs."""

    def __init__(self, model: PartitionedLlama, one_program: bool, overlap: Overlap | None) -> None:
        specs: list[P] = jax.tree.leaves(model.specs)
        super().__init__(
            *(one_program, overlap, model.mesh, model.axis, model.expert_axis, model.leaves, model.graph, tuple(specs))
        )
        self.model = dataclasses.replace(model, params={}, rest=None)
        self.one_program, self.overlap = one_program, overlap


def _flatten(served: ServedPartitionedLlama) -> tuple[tuple[Any, ...], Frame]:
    frame = Frame(served.model, served.one_program, served.overlap)
    return (served.model.params, served.model.rest, served._cache, served._adapters), frame


def _unflatten(frame: Frame, children: Iterable[Any]) -> ServedPartitionedLlama:
    params, rest, cache, adapters = children
    model = dataclasses.replace(frame.model, params=params, rest=rest)
    how: dict[str, Any] = {"overlap": frame.overlap, "cache_dtype": cache, "adapters": adapters}
    return ServedPartitionedLlama(model, one_program=frame.one_program, **how)


jax.tree_util.register_pytree_node(ServedPartitionedLlama, _flatten, _unflatten)

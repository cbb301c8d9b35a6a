"""A model over the devices of a mesh: its parameters, and functions of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .layers import KVCache
from .layers.embed import check_token_ids
from .llama import Llama
from .parallel_delta_net import state_specs
from .partition_layers import at, cut_layers
from .partitioned_module import Params, PartitionedModule
from .partitioned_states import init_states_on

if TYPE_CHECKING:
    from ..checkpoint import LlamaConfig


@dataclasses.dataclass(frozen=True)
class PartitionedLlama(PartitionedModule[Llama]):
    """A model over the devices of a mesh; made by `partition`, which documents its use.

    Attributes:
        params: The parameters, each sharded over the mesh: a tree of dicts.
        specs: A tree of the same structure with their `jax.sharding.PartitionSpec`.
        mesh: The mesh.
        axis: Name of the mesh axis that the weights are cut over.
        expert_axis: Name of the axis that experts are cut over as well, if the mesh has it.
        leaves: Leaves of each sum that is cut, which fix its bits.
        config: The model's numbers.
        dtype: Dtype of the computation and of the cache.
        rest: What a model holds besides parameters, the same on all devices.
        graph: The structure of the model of one device.
    """

    mesh: Mesh
    axis: str
    expert_axis: str
    leaves: int
    config: LlamaConfig
    dtype: Any

    def logits(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Computes whole sequences, as `Llama.__call__` does; to be differentiated with respect to the parameters.

        Args:
            params: Parameters with the structure of `params`.
            tokens: (B, T) integers.

        Returns:
            (B, T, vocab_size) float32 logits, whose last dimension is sharded over the axis.

        Raises:
            TypeError: If the tokens are not integers.
            ValueError: As `Llama.__call__`.
        """
        check_token_ids(tokens, self.config.vocab_size)
        columns = P(None, None, self.axis)
        run = self._mapped(lambda params, tokens: self.local(params)(tokens), (P(),), columns)
        return run(params, jnp.asarray(tokens))

    def extend(
        self, params: Params, tokens: jax.Array, cache: KVCache, *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Appends tokens to the sequences in a cache, as `Llama.extend` does.

        Args:
            params: Parameters with the structure of `params`.
            tokens: (B, T) integers.
            cache: What the sequences hold so far; see `cache`.
            lengths: (B,) integers, new tokens of each sequence; T for all by default.

        Returns:
            (B, T, vocab_size) float32 logits, whose last dimension is sharded over the axis, and the new cache.
        """
        check_token_ids(tokens, self.config.vocab_size)
        tokens = jnp.asarray(tokens)
        lengths = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32) if lengths is None else jnp.asarray(lengths)
        specs = self._cache_specs(cache)

        def run(params: Params, tokens: jax.Array, cache: KVCache, lengths: jax.Array) -> tuple[jax.Array, KVCache]:
            return self.local(params).extend(tokens, cache, lengths=lengths)

        mapped = self._mapped(run, (P(), specs, P()), (P(None, None, self.axis), specs))
        return mapped(params, tokens, cache, lengths)

    def cache(self, *, batch: int, capacity: int) -> KVCache:
        """Returns an empty contiguous cache, whose heads and states are sharded over the axis; latents are repeated.

        Args:
            batch: Number of sequences.
            capacity: Tokens that each can hold.
        """
        local = self.local(self.params)
        cache = KVCache.contiguous(batch=batch, capacity=capacity, **local.cache_sizes())
        cache = jax.device_put(cache, self.shardings(self._cache_specs(cache)))
        return dataclasses.replace(cache, states=tuple(init_states_on(self.mesh, self.axis, local, batch)))

    def local(self, params: Params) -> Llama:
        """Returns this device's part of the model, inside a `jax.shard_map` of your own over the axis.

        Args:
            params: This device's part of the parameters, cut by `specs`.
        """
        return self.merged(params, self.rest)

    def whole(self, params: Params) -> Params:
        """Returns parameters, or their gradients, with the structure and the shapes that one device's model has.

        Args:
            params: A tree with the structure of `params`.

        Returns:
            A tree as `nnx.to_pure_dict(nnx.state(model, nnx.Param))` of the model that was partitioned, with the
            weights of layers of int8.
        """
        state = jax.tree.unflatten(jax.tree.structure(self._abstract), jax.tree.leaves(params))
        found: Params = nnx.to_pure_dict(state)
        for path, layer in cut_layers(self.local(params)):
            at(found, path).update(layer.whole())
        return found

    def _mapped(self, function: Any, in_specs: tuple[Any, ...], out_specs: Any) -> Any:
        return jax.shard_map(function, mesh=self.mesh, in_specs=(self.specs, *in_specs), out_specs=out_specs)

    def shardings(self, specs: Any) -> Any:
        """Returns the shardings of a tree of specs on the mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def _cache_specs(self, cache: KVCache) -> KVCache:
        heads = P(None, None, self.axis, None)
        specs: Any = jax.tree.map(lambda _: P(), cache)
        specs = dataclasses.replace(specs, states=(state_specs(self.axis),) * len(cache.states))
        if self.config.latent is not None:
            return specs
        return dataclasses.replace(specs, keys=(heads,) * len(cache.keys), values=(heads,) * len(cache.values))

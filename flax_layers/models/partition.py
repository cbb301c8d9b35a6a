"""Models whose weights are cut over the devices of a mesh axis (tensor parallelism)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..ops import INVARIANT
from .layers import KVCache, Linear
from .layers.embed import Embed, check_token_ids
from .llama import Llama
from .parallel_layers import ColumnParallelLinear, Cut, ParallelHeadNorm, RowParallelLinear, VocabParallelEmbed

if TYPE_CHECKING:
    from ..checkpoint import LlamaConfig

type Params = dict[str, Any]

_OP = "partition"


@dataclasses.dataclass(frozen=True)
class PartitionedLlama:
    """A model over the devices of a mesh axis; made by `partition`, which documents its use.

    Attributes:
        params: The parameters, each sharded over the mesh: a tree of dicts.
        specs: A tree of the same structure with their `jax.sharding.PartitionSpec`.
        mesh: The mesh.
        axis: Name of the mesh axis that the weights are cut over.
        leaves: Leaves of each sum that is cut, which fix its bits.
        config: The model's numbers.
    """

    params: Params
    specs: Params
    mesh: Mesh
    axis: str
    leaves: int
    config: LlamaConfig
    _graph: Any = dataclasses.field(repr=False)
    _abstract: Any = dataclasses.field(repr=False)
    _rest: Any = dataclasses.field(repr=False)
    _dtype: Any = dataclasses.field(repr=False)

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
        found: jax.Array = run(params, jnp.asarray(tokens))
        return found

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
        found: tuple[jax.Array, KVCache] = mapped(params, tokens, cache, lengths)
        return found

    def cache(self, *, batch: int, capacity: int) -> KVCache:
        """Returns an empty contiguous cache, whose heads are sharded over the axis.

        Args:
            batch: Number of sequences.
            capacity: Tokens that each can hold.
        """
        config = self.config
        cache = KVCache.contiguous(
            batch=batch,
            capacity=capacity,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._dtype,
        )
        return jax.device_put(cache, self._shardings(self._cache_specs(cache)))

    def local(self, params: Params) -> Llama:
        """Returns this device's part of the model, inside of a `jax.shard_map` of your own over the axis.

        Args:
            params: This device's part of the parameters, cut by `specs`.
        """
        state = jax.tree.unflatten(jax.tree.structure(self._abstract), jax.tree.leaves(params))
        model: Llama = nnx.merge(self._graph, state, self._rest)
        return model

    def whole(self, params: Params) -> Params:
        """Returns parameters, or their gradients, with the structure and the shapes that one device's model has.

        Args:
            params: A tree with the structure of `params`.

        Returns:
            A tree as `nnx.to_pure_dict(nnx.state(model, nnx.Param))` of the model that was partitioned.
        """
        state = jax.tree.unflatten(jax.tree.structure(self._abstract), jax.tree.leaves(params))
        found: Params = nnx.to_pure_dict(state)
        for path, layer in _cut_layers(nnx.merge(self._graph, state, self._rest)):
            if isinstance(layer, ColumnParallelLinear):
                _at(found, path).update(layer.whole())
        return found

    def _mapped(self, function: Any, in_specs: tuple[Any, ...], out_specs: Any) -> Any:
        return jax.shard_map(function, mesh=self.mesh, in_specs=(self.specs, *in_specs), out_specs=out_specs)

    def _shardings(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def _cache_specs(self, cache: KVCache) -> KVCache:
        heads = P(None, None, self.axis, None)
        specs: Any = jax.tree.map(lambda _: P(), cache)
        return dataclasses.replace(specs, keys=(heads,) * len(cache.keys), values=(heads,) * len(cache.values))


def partition(model: Llama, mesh: Mesh, *, axis: str = "model", leaves: int = 8) -> PartitionedLlama:
    """Cuts a model's weights over the devices of a mesh axis: tensor parallelism, with bits that do not depend on D.

    Queries, keys, values, gates and up projections are cut by columns, the output of attention and the down projection
    by rows, and the vocabulary by tokens; heads stay whole. Columns are stored in `leaves` groups, (in, leaves,
    columns), each with its share of every projection, so that a gradient's sum over columns has its leaves at the same
    positions on every number of devices.

        partitioned = partition(model, mesh)
        logits = jax.jit(partitioned.logits)(partitioned.params, tokens)

    Args:
        model: A model with `INVARIANT` operations: Llama, Mistral, Qwen2, Qwen3, Gemma 2 or 3, without experts and
            without int8 layers. Its parameters are taken over.
        mesh: A mesh.
        axis: Name of one of its axes, with 1, 2, 4, ... `leaves` devices. The parameters are repeated along the others.
        leaves: Leaves of each sum that is cut, a power of two: the most devices. It belongs to the definition of the
            model, for it fixes its bits; the number of devices does not.

    Returns:
        The parameters with their shardings, and functions of them.

    Raises:
        TypeError: If `model` is not a `Llama`.
        ValueError: If the mesh has no such axis, its number of devices is not a power of two or more than `leaves`, the
            devices do not divide the key/value heads, `leaves` does not divide the columns of a projection or the
            vocabulary, or the model has other operations, experts or other layers than linear ones.

    Guarantee: row-invariant as `Llama`. Logits and the gradients of all parameters have the same bits on 1, 2, 4, ...
    `leaves` devices. They differ from those of `Llama`, whose sums are not cut.

    Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism"
    (https://arxiv.org/abs/1909.08053), for the cut.

    Example:
        >>> from flax_layers.checkpoint import LlamaConfig
        >>> config = LlamaConfig(
        ...     vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1,
        ...     head_dim=8, rope_theta=10000.0, rms_norm_eps=1e-5, tie_word_embeddings=True,
        ...     max_position_embeddings=64, bos_token_id=1, eos_token_ids=(2,))
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> partitioned = partition(Llama(config, rngs=nnx.Rngs(0)), mesh)
        >>> tuple(partitioned.specs["blocks"][0]["attention"]["out"]["kernel"])
        ('model', None)
        >>> partitioned.params["blocks"][0]["mlp"]["gate_up"]["kernel"].shape
        (8, 8, 4)
    """
    cut = _checked(model, mesh, axis, leaves)
    whole_graph, whole_state = nnx.split(model)
    local: Any = nnx.merge(whole_graph, whole_state)  # shares the arrays
    config = model.config
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for block in local.blocks:
        attention, mlp = block.attention, block.mlp
        attention.qkv = ColumnParallelLinear(attention.qkv, (query, key, key), cut)
        attention.out = RowParallelLinear(attention.out, cut)
        if attention.query_norm is not None:
            attention.query_norm = ParallelHeadNorm(attention.query_norm, config.num_heads, cut)
            attention.key_norm = ParallelHeadNorm(attention.key_norm, config.num_kv_heads, cut)
        attention.num_heads //= cut.devices
        attention.num_kv_heads //= cut.devices
        mlp.gate_up = ColumnParallelLinear(mlp.gate_up, (config.intermediate_size,) * 2, cut)
        mlp.down = RowParallelLinear(mlp.down, cut)
    local.embed = VocabParallelEmbed(local.embed, cut)
    if local.lm_head is not None:
        local.lm_head = ColumnParallelLinear(local.lm_head, (config.vocab_size,), cut)
    split: Any = nnx.split(local, nnx.Param, ...)
    graph, state, rest = split
    params = nnx.to_pure_dict(state)
    specs = jax.tree.map(lambda _: P(), params)
    for path, layer in _cut_layers(local):
        own = _at(specs, path)
        own.update({name: spec for name, spec in layer.specs(axis).items() if name in own})
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    placed, rest = jax.device_put((params, rest), (shardings, NamedSharding(mesh, P())))
    return PartitionedLlama(placed, specs, mesh, axis, leaves, config, graph, abstract, rest, model.dtype)


def _cut_layers(model: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields the layers of a partitioned model whose weights are cut, with their paths."""
    for index, block in enumerate(model.blocks):
        yield ("blocks", index, "attention", "qkv"), block.attention.qkv
        yield ("blocks", index, "attention", "out"), block.attention.out
        yield ("blocks", index, "mlp", "gate_up"), block.mlp.gate_up
        yield ("blocks", index, "mlp", "down"), block.mlp.down
    yield ("embed",), model.embed
    if model.lm_head is not None:
        yield ("lm_head",), model.lm_head


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _checked(model: Any, mesh: Mesh, axis: str, leaves: int) -> Cut:
    """Returns how a model is cut.

    Raises:
        TypeError: If it is no `Llama`.
        ValueError: If it cannot be cut in this way.
    """
    if not isinstance(model, Llama):
        raise TypeError(f"{_OP}: model must be a flax_layers.Llama, got {type(model).__name__}.")
    if axis not in mesh.shape:
        raise ValueError(f"{_OP}: axis must be one of the mesh's axes {tuple(mesh.shape)}, got {axis!r}.")
    devices, config = mesh.shape[axis], model.config
    for name, number in (("leaves", leaves), (f"the number of devices of axis {axis!r}", devices)):
        if number < 1 or number & (number - 1):
            raise ValueError(f"{_OP}: {name} must be a power of two, got {number}; sums are added as a binary tree.")
    if devices > leaves:
        raise ValueError(
            f"{_OP}: each device needs a leaf of the sums, got {leaves} leaves for the {devices} devices of axis"
            f" {axis!r}; use fewer devices, or more leaves, which have other bits."
        )
    if config.num_kv_heads % devices:
        raise ValueError(
            f"{_OP}: the devices of axis {axis!r} must divide the key/value heads, got {devices} devices and"
            f" {config.num_kv_heads} heads; use a mesh with fewer devices on this axis."
        )
    lengths = {
        "columns of the query heads": config.num_heads * config.head_dim,
        "columns of the key/value heads": config.num_kv_heads * config.head_dim,
        "intermediate size": config.intermediate_size,
        "vocabulary": config.vocab_size,
    }
    for name, length in lengths.items():
        if length % leaves:
            raise ValueError(
                f"{_OP}: the {leaves} leaves of a sum must divide the {name}, got {length}; use fewer leaves, or pad"
                " the weights with zeros."
            )
    if (other := config.experts or config.linear or config.latent) is not None:
        raise ValueError(
            f"{_OP}: the model must have no experts, no linear and no latent attention, got {other}; cut it with"
            " bijax.parallel."
        )
    for layer in _linear_layers(model):
        if type(layer) not in (Linear, Embed):
            raise ValueError(f"{_OP}: the layers must be flax_layers' linear ones, got a {type(layer).__name__}.")
        if layer.ops != INVARIANT:
            raise ValueError(f"{_OP}: the model must have the operations INVARIANT, got {layer.ops}.")
    return Cut(axis, devices, leaves)


def _linear_layers(model: Llama) -> Iterator[Any]:
    return (layer for _, layer in _cut_layers(model))

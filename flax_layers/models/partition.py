"""Models whose weights are cut over the devices of a mesh axis (tensor parallelism)."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..ops import Ops
from .layers import KVCache
from .layers.embed import check_token_ids
from .llama import Llama
from .parallel_layers import ColumnParallelLinear, Cut
from .partition_checks import check_config, check_layers, check_mesh
from .partition_layers import at, cut_layers, cut_model, place_weights

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint, LlamaConfig

type Params = dict[str, Any]


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
        dtype: Dtype of the computation and of the cache.
        rest: What a model holds besides parameters, the same on all devices.
        graph: The structure of the model of one device.
    """

    params: Params
    specs: Params
    mesh: Mesh
    axis: str
    leaves: int
    config: LlamaConfig
    dtype: Any
    rest: Any = dataclasses.field(repr=False)
    graph: Any = dataclasses.field(repr=False)
    _abstract: Any = dataclasses.field(repr=False)

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
            dtype=self.dtype,
        )
        return jax.device_put(cache, self._shardings(self._cache_specs(cache)))

    def local(self, params: Params) -> Llama:
        """Returns this device's part of the model, inside a `jax.shard_map` of your own over the axis.

        Args:
            params: This device's part of the parameters, cut by `specs`.
        """
        return self.merged(params, self.rest)

    def merged(self, params: Params, rest: Any) -> Llama:
        """Returns the model of one device with other leaves: arrays, or what stands for them, as a `PartitionSpec`.

        Args:
            params: A tree with the structure of `params`.
            rest: One with the structure of `rest`.
        """
        state = jax.tree.unflatten(jax.tree.structure(self._abstract), jax.tree.leaves(params))
        model: Llama = nnx.merge(self.graph, state, rest)
        return model

    def with_ops(self, ops: Ops) -> PartitionedLlama:
        """Returns the model with the same parameters and other operations.

        Args:
            ops: The operations; with `PLAIN` products and sums are JAX's, whose bits depend on the number of devices.
        """
        split: Any = nnx.split(nnx.with_attributes(self.local(self.params), ops=ops), nnx.Param, ...)
        return dataclasses.replace(self, graph=split[0])

    def whole(self, params: Params) -> Params:
        """Returns parameters, or their gradients, with the structure and the shapes that one device's model has.

        Args:
            params: A tree with the structure of `params`.

        Returns:
            A tree as `nnx.to_pure_dict(nnx.state(model, nnx.Param))` of the model that was partitioned.
        """
        state = jax.tree.unflatten(jax.tree.structure(self._abstract), jax.tree.leaves(params))
        found: Params = nnx.to_pure_dict(state)
        for path, layer in cut_layers(self.local(params)):
            if isinstance(layer, ColumnParallelLinear):
                at(found, path).update(layer.whole())
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
    if not isinstance(model, Llama):
        raise TypeError(f"partition: model must be a flax_layers.Llama, got {type(model).__name__}.")
    cut = check_mesh(mesh, axis, leaves)
    check_config(model.config, cut)
    check_layers(layer for _, layer in cut_layers(model))
    whole_graph, whole_state = nnx.split(model)
    found = _laid_out(cut_model(nnx.merge(whole_graph, whole_state), cut), mesh, cut)  # shares the arrays
    shardings = found._shardings(found.specs)
    params, rest = jax.device_put((found.params, found.rest), (shardings, NamedSharding(mesh, P())))
    return dataclasses.replace(found, params=params, rest=rest)


def load_partitioned(
    checkpoint: Checkpoint,
    mesh: Mesh,
    *,
    axis: str = "model",
    leaves: int = 8,
    dtype: Any = jnp.float32,
    param_dtype: Any = jnp.float32,
) -> PartitionedLlama:
    """Reads a checkpoint straight into the devices of a mesh axis.

    The host reads one weight after another, and each device gets its part alone: no device ever holds a whole model.

    Args:
        checkpoint: As `flax_layers.checkpoint.load_checkpoint` returns it.
        mesh: As for `partition`.
        axis: The same.
        leaves: The same.
        dtype: Dtype of the computation.
        param_dtype: Dtype of the parameters.

    Returns:
        The result of `partition` with the model that `Llama.from_checkpoint` returns.

    Raises:
        ValueError: As `partition`, or if weights and configuration do not belong together.

    Guarantee: as `partition`.

    Example:
        >>> import numpy as np
        >>> from flax_layers.checkpoint import Checkpoint, LlamaConfig, Weights
        >>> from flax_layers.checkpoint.weights import expected_shapes
        >>> config = LlamaConfig(
        ...     vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1,
        ...     head_dim=8, rope_theta=10000.0, rms_norm_eps=1e-5, tie_word_embeddings=True,
        ...     max_position_embeddings=64, bos_token_id=1, eos_token_ids=(2,))
        >>> shapes = dict(expected_shapes(config))
        >>> weights = Weights(shapes, lambda name: np.zeros(shapes[name], np.float32))
        >>> loaded = load_partitioned(Checkpoint(config, weights, tokenizer=None), jax.make_mesh((1,), ("model",)))
        >>> loaded.params["embed"]["embedding"].shape
        (32, 8)
    """
    config, cut = checkpoint.config, check_mesh(mesh, axis, leaves)
    check_config(config, cut)
    make = functools.partial(Llama, config, dtype=dtype, param_dtype=param_dtype)
    whole = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
    local: Any = nnx.eval_shape(lambda: cut_model(make(rngs=nnx.Rngs(0)), cut))
    local._set_rotary()
    found = _laid_out(local, mesh, cut)
    params = place_weights(whole, local, found.params, found._shardings(found.specs), checkpoint.weights)
    return dataclasses.replace(found, params=params, rest=jax.device_put(found.rest, NamedSharding(mesh, P())))


def _laid_out(local: Llama, mesh: Mesh, cut: Cut) -> PartitionedLlama:
    """Returns a model of one device, whose arrays are not placed yet, with their specs."""
    split: Any = nnx.split(local, nnx.Param, ...)
    graph, state, rest = split
    params = nnx.to_pure_dict(state)
    specs = jax.tree.map(lambda _: P(), params)
    for path, layer in cut_layers(local):
        own = at(specs, path)
        own.update({name: spec for name, spec in layer.specs(cut.axis).items() if name in own})
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    return PartitionedLlama(params, specs, mesh, cut.axis, cut.leaves, local.config, local.dtype, rest, graph, abstract)

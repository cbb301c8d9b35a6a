"""Other weights for a partitioned model that is served, in the same shards."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from .llama import Llama
from .partition import partition
from .partitioned import PartitionedLlama
from .same_model import check_same_arrays, check_same_config


def with_weights(model: PartitionedLlama, weights: Any) -> PartitionedLlama:
    """Returns a model with other weights; see `ServedPartitionedLlama.with_weights`."""
    if isinstance(weights, PartitionedLlama):
        check_same_config("ServedPartitionedLlama", "the weights", weights.config, model.config)
        params = weights.params
        if weights.leaves != model.leaves:
            raise ValueError(
                f"ServedPartitionedLlama: the weights must be cut for sums of {model.leaves} leaves, got"
                f" {weights.leaves}; pass leaves={model.leaves} to partition."
            )
    elif isinstance(weights, (Llama, nnx.State)):
        params = _cut(model, weights)
    else:
        raise TypeError(
            "ServedPartitionedLlama: weights must be a Llama, its nnx.State or a PartitionedLlama, got"
            f" {type(weights).__name__}."
        )
    check_same_arrays("ServedPartitionedLlama", params, model.params)
    shardings = jax.tree.map(lambda spec: NamedSharding(model.mesh, spec), model.specs)
    return dataclasses.replace(model, params=jax.device_put(params, shardings))


def _cut(model: PartitionedLlama, weights: Llama | nnx.State[Any, Any]) -> Any:
    config, dtype = model.config, model.dtype
    if isinstance(weights, nnx.State):
        whole = nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
        graph, state = nnx.split(whole)
        names: list[Any] = [jax.tree.structure(s) for s in (state, weights)]
        if names[0] != names[1]:
            raise ValueError(
                "ServedPartitionedLlama: the weights must have the names, shapes and dtypes of the model's own."
            )
        weights = nnx.merge(graph, weights)
    check_same_config("ServedPartitionedLlama", "the weights", weights.config, config)
    axes = {"axis": model.axis, "expert_axis": model.expert_axis}
    return partition(weights, model.mesh, **axes, leaves=model.leaves).params

"""Models whose weights are cut over the devices of a mesh: tensor parallelism, and expert parallelism."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .llama import Llama
from .parallel_cut import Cut
from .partition_checks import check_config, check_layers, check_mesh
from .partition_layers import cut_layers, cut_model, laid_out, place_weights
from .partitioned import PartitionedLlama

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint


def partition(
    model: Llama, mesh: Mesh, *, axis: str = "model", expert_axis: str = "expert", leaves: int = 8
) -> PartitionedLlama:
    """Cuts a model's weights over the devices of a mesh, with bits that do not depend on the number of devices.

    Tensor parallelism: queries, keys, values, gates and up projections are cut by columns, the output of attention and
    the down projection by rows, and the vocabulary by tokens; heads stay whole. Columns are stored in `leaves` groups,
    (in, leaves, columns), each with its share of every projection, so that a gradient's sum over columns has its leaves
    at the same positions on every number of devices.

    Linear attention is cut by key heads, with the value heads that share them, their channels and states; latent
    attention by query heads, while all devices compute and keep the latents. Layers of int8 are cut by columns alone,
    and have the bits of `Llama`.

    Expert parallelism: experts stay whole, and are spread over the devices of both axes; a mesh without `expert_axis`
    spreads them over `axis` alone. Everything else is repeated along `expert_axis`.

        partitioned = partition(model, mesh)
        logits = jax.jit(partitioned.logits)(partitioned.params, tokens)

    Args:
        model: A model with `INVARIANT` operations. Its parameters are taken over.
        mesh: A mesh.
        axis: Name of one of its axes, with 1, 2, 4, ... `leaves` devices. The parameters are repeated along all axes
            but this one and the next.
        expert_axis: Name of an axis with 1, 2, 4, ... devices, which the mesh need not have.
        leaves: Leaves of each sum that is cut, a power of two: the most devices. It belongs to the definition of the
            model, for it fixes its bits; the number of devices does not.

    Returns:
        The parameters with their shardings, and functions of them.

    Raises:
        TypeError: If `model` is not a `Llama`.
        ValueError: If the mesh has no such axis, its number of devices is not a power of two or more than `leaves`, the
            devices do not divide the heads (of keys and values, of keys of linear attention, of queries of latent
            attention) or the experts, `leaves` does not divide the columns of a projection or the vocabulary, there is
            more than one device for experts and the model has none, or the model has other operations.

    Guarantee: row-invariant as `Llama`. Logits and the gradients of all parameters have the same bits on 1, 2, 4, ...
    `leaves` devices of `axis`, and on 1, 2, 4, ... of `expert_axis`. They differ from those of `Llama`, whose sums are
    not cut.

    Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism"
    (https://arxiv.org/abs/1909.08053), for the cut; for experts D. Lepikhin et al., "GShard: Scaling Giant Models with
    Conditional Computation and Automatic Sharding" (https://arxiv.org/abs/2006.16668).

    Example:
        >>> from flax_layers.checkpoint import LlamaConfig
        >>> config = LlamaConfig.tiny(head_dim=8)
        >>> mesh = jax.make_mesh((1,), ("model",))
        >>> partitioned = partition(Llama(config, rngs=nnx.Rngs(0)), mesh)
        >>> tuple(partitioned.specs["blocks"][0]["attention"]["out"]["kernel"])
        ('model', None)
        >>> partitioned.params["blocks"][0]["mlp"]["gate_up"]["kernel"].shape
        (8, 8, 4)
    """
    if not isinstance(model, Llama):
        raise TypeError(f"partition: model must be a flax_layers.Llama, got {type(model).__name__}.")
    cut = check_mesh(mesh, axis, leaves, expert_axis)
    check_config(model.config, cut)
    check_layers(layer for _, layer in cut_layers(model))
    whole_graph, whole_state = nnx.split(model)
    # The copy shares the arrays.
    found = _laid_out(cut_model(nnx.merge(whole_graph, whole_state), cut), mesh, cut, expert_axis)
    shardings = found.shardings(found.specs)
    params, rest = jax.device_put((found.params, found.rest), (shardings, NamedSharding(mesh, P())))
    return dataclasses.replace(found, params=params, rest=rest)


def load_partitioned(
    checkpoint: Checkpoint,
    mesh: Mesh,
    *,
    axis: str = "model",
    expert_axis: str = "expert",
    leaves: int = 8,
    dtype: Any = jnp.float32,
    param_dtype: Any = jnp.float32,
    prepare: Callable[[Llama], Any] | None = None,
) -> PartitionedLlama:
    """Reads a checkpoint straight into the devices of a mesh.

    The host reads one weight after another, and each device gets its part alone: no device ever holds a whole model.

    Args:
        checkpoint: As `flax_layers.checkpoint.load_checkpoint` returns it.
        mesh: As for `partition`.
        axis: The same.
        expert_axis: The same.
        leaves: The same.
        dtype: Dtype of the computation.
        param_dtype: Dtype of the parameters.
        prepare: Called with the model, without arrays, before it is cut: `convert` with `quantize="int8"`. A kernel of
            int8 is quantised by one device, which has all of it meanwhile.

    Returns:
        The result of `partition` with the model that `Llama.from_checkpoint` returns.

    Raises:
        ValueError: As `partition`, or if weights and configuration do not belong together.

    Guarantee: as `partition`.

    Example:
        >>> import numpy as np
        >>> from flax_layers.checkpoint import Checkpoint, LlamaConfig, Weights
        >>> from flax_layers.checkpoint.weights import expected_shapes
        >>> config = LlamaConfig.tiny(head_dim=8)
        >>> shapes = dict(expected_shapes(config))
        >>> weights = Weights(shapes, lambda name: np.zeros(shapes[name], np.float32))
        >>> loaded = load_partitioned(Checkpoint(config, weights, tokenizer=None), jax.make_mesh((1,), ("model",)))
        >>> loaded.params["embed"]["embedding"].shape
        (32, 8)
    """
    config, cut = checkpoint.config, check_mesh(mesh, axis, leaves, expert_axis)
    check_config(config, cut)
    make = functools.partial(Llama, config, dtype=dtype, param_dtype=param_dtype)
    whole = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))

    def local_model() -> Llama:
        model = make(rngs=nnx.Rngs(0))
        if prepare is not None:
            prepare(model)
        check_layers(layer for _, layer in cut_layers(model))
        return cut_model(model, cut)

    local: Any = nnx.eval_shape(local_model)
    local._set_rotary()
    found = _laid_out(local, mesh, cut, expert_axis)
    params = place_weights(whole, local, found.params, found.shardings(found.specs), checkpoint.weights)
    return dataclasses.replace(found, params=params, rest=jax.device_put(found.rest, NamedSharding(mesh, P())))


def _laid_out(local: Llama, mesh: Mesh, cut: Cut, expert_axis: str) -> PartitionedLlama:
    """Returns a model of one device, whose arrays are not placed yet, with their specs."""
    params, specs, rest, graph, abstract = laid_out(local, cut_layers(local))
    axes = (mesh, cut.axis, expert_axis, cut.leaves)
    return PartitionedLlama(params, specs, rest, graph, abstract, *axes, local.config, local.dtype)

"""The layers of a model that are cut over devices: where they are, what they become, and where weights go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from .layers import Attention, GatedDeltaNet, LatentAttention, MoE, QuantizedWeight, QuantMoE
from .llama import Llama
from .llama_weights import read_weights
from .parallel_cut import Cut, CutLayer
from .parallel_delta_net import ParallelGatedDeltaNet
from .parallel_experts import ParallelMoE
from .parallel_heads import ParallelHeadNorm
from .parallel_latent import ParallelLatentAttention
from .parallel_layers import VocabParallelEmbed
from .parallel_linear import column_parallel_layer, row_parallel_layer
from .parallel_quant import ParallelQuantMoE, stored_in_int8
from .parallel_rows import RowCut

type Path = tuple[Any, ...]

WEIGHTS: Final = (nnx.Param, QuantizedWeight)
"""The variables of a model that are cut or repeated as its parameters: a filter of Flax."""


def laid_out(local: Any, layers: Iterable[tuple[Path, CutLayer]]) -> tuple[Any, Any, Any, Any, Any]:
    """Returns how a module of one device is laid out on the devices of a mesh.

    Args:
        local: The module, in which layers are cut.
        layers: Those layers and where they are.

    Returns:
        Its parameters, a tree of dicts; a tree of the same structure with their `jax.sharding.PartitionSpec`; what it
        holds besides; its structure; and its state without arrays.
    """
    split: Any = nnx.split(local, WEIGHTS, ...)
    graph, state, rest = split
    params = nnx.to_pure_dict(state)
    specs = jax.tree.map(lambda _: PartitionSpec(), params)
    for path, layer in layers:
        own = at(specs, path)
        own.update({name: spec for name, spec in layer.specs().items() if name in own})
    return params, specs, rest, graph, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def cut_model(model: Llama, cut: Cut) -> Llama:
    """Puts layers that are cut into a model, which is changed, and returns it as the model of one device.

    Args:
        model: The model, with arrays or without them (`nnx.eval_shape`).
        cut: How it is cut.
    """
    local: Any = model
    config: Any = model.config
    for block in local.blocks:
        cut_block(block, config, cut)
    local.embed = VocabParallelEmbed(local.embed, cut)
    if local.lm_head is not None:
        local.lm_head = column_parallel_layer(local.lm_head, (config.vocab_size,), cut)
    return model


def cut_block(block: Any, config: Any, cut: Cut) -> None:
    """Puts layers that are cut into a block.

    Args:
        block: The block, which is changed.
        config: The numbers of its model.
        cut: How it is cut.
    """
    block.rows = RowCut(cut.axis, cut.devices)
    if isinstance(block.attention, GatedDeltaNet):
        block.attention = ParallelGatedDeltaNet(block.attention, cut)
    elif isinstance(block.attention, LatentAttention):
        block.attention = ParallelLatentAttention(block.attention, cut)
    else:
        _cut_attention(block.attention, config, cut)
    if isinstance(block.mlp, (MoE, QuantMoE)):
        block.mlp = ParallelMoE(block.mlp, cut) if isinstance(block.mlp, MoE) else ParallelQuantMoE(block.mlp, cut)
        if block.mlp.shared is not None:
            _cut_mlp(block.mlp.shared, config.experts.shared_size, cut)
    else:
        _cut_mlp(block.mlp, config.intermediate_size, cut)


def _cut_attention(attention: Any, config: Any, cut: Cut) -> None:
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention.qkv = column_parallel_layer(attention.qkv, (query, key, key), cut)
    if attention.gate is not None:
        attention.gate = column_parallel_layer(attention.gate, (query,), cut)
    attention.out = row_parallel_layer(attention.out, cut)
    if attention.query_norm is not None:
        attention.query_norm = ParallelHeadNorm(attention.query_norm, config.num_heads, cut)
        attention.key_norm = ParallelHeadNorm(attention.key_norm, config.num_kv_heads, cut)
    attention.num_heads //= cut.devices
    attention.num_kv_heads //= cut.devices


def _cut_mlp(mlp: Any, width: int, cut: Cut) -> None:
    mlp.gate_up = column_parallel_layer(mlp.gate_up, (width, width), cut)
    mlp.down = row_parallel_layer(mlp.down, cut)


def cut_layers(model: Any) -> Iterator[tuple[Path, Any]]:
    """Yields the layers of a model whose weights are cut, with their paths."""
    for index, block in enumerate(model.blocks):
        yield from block_layers(block, ("blocks", index))
    yield ("embed",), model.embed
    if model.lm_head is not None:
        yield ("lm_head",), model.lm_head


def block_layers(block: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yields the layers of a block whose weights are cut, with their paths; `path` is that of the block."""
    attention, mlp = block.attention, block.mlp
    if not isinstance(attention, Attention):
        yield (*path, "attention"), attention
    for name in _cut_products(attention):
        yield (*path, "attention", name), getattr(attention, name)
    path = (*path, "mlp")
    if hasattr(mlp, "routing"):
        yield path, mlp
        mlp, path = mlp.shared, (*path, "shared")
    if mlp is not None:
        yield (*path, "gate_up"), mlp.gate_up
        yield (*path, "down"), mlp.down


def _cut_products(attention: Any) -> tuple[str, ...]:
    """Returns the names of the linear layers of attention that are cut."""
    if isinstance(attention, GatedDeltaNet):
        return ("qkvz", "ba", "out")
    if isinstance(attention, LatentAttention):
        return ("query", "out")
    return ("qkv", "out") if attention.gate is None else ("qkv", "gate", "out")


def at(tree: Any, path: Path) -> Any:
    """Returns what is at a path."""
    for key in path:
        tree = tree[key]
    return tree


def place_weights(
    whole: Llama, local: Llama, params: Any, shardings: Any, weights: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Reads weights one after another, and gives each device its part.

    Args:
        whole: The model on one device, without arrays.
        local: The model of a device of the mesh, without arrays.
        params: Shapes and dtypes of the parameters: a tree of dicts.
        shardings: A tree of the same structure.
        weights: Weights under Hugging Face names.

    Returns:
        The parameters.

    Raises:
        ValueError: If a weight does not have the shape of its parameter.
        KeyError: If a weight is missing.
    """
    paths = {id(node): path for path, node in nnx.iter_graph(whole) if isinstance(node, nnx.Param)}
    layers: dict[Path, CutLayer] = dict(cut_layers(local))
    placed = jax.tree.map(lambda leaf: leaf, params)  # its dicts are changed
    for parameter, read in read_weights(whole, weights):
        *layer, name = paths[id(parameter)]
        path, value = tuple(layer), read.astype(parameter.dtype)
        own, where = at(placed, path), at(shardings, path)
        if (cut := layers.get(path)) is not None:
            parts = cut.stored(str(name), value)
        elif name not in own:  # a layer of int8 that all devices have
            parts = stored_in_int8(str(name), value)
        else:
            parts = {str(name): value}
        own.update({part: place(array, where[part]) for part, array in parts.items()})
    return dict(placed)


def place(value: np.ndarray, sharding: Any) -> jax.Array:
    """Returns an array of the host on devices, of which other processes may own some.

    Of several processes each places its own part, without comparing what `jax.device_put` would send to all.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

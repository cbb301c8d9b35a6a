"""LoRA adapters of a model that is served: each sequence of a batch has its own, or none."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .block import Block
from .layers import Attention
from .llama import Llama

if TYPE_CHECKING:
    # Reading checkpoints needs packages that the model does not.
    from ..checkpoint import LoRA

# The linear layers of a block, with the checkpoint's names of the parts of their kernels.
_LAYERS: Final = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


class Stack(NamedTuple):
    """The matrices that the adapters of one rank have for one linear layer.

    Their shapes depend on the layer and the rank alone, not on what each adapter changes of the layer: they fix the
    contract of the products.

    Attributes:
        down: (G, in, parts * rank): for each part of the layer the transpose of lora_A, zeros where there is none.
        up: (G, parts * rank, out): lora_B times the scaling, in the rows and columns of its part.
        adapted: (G, out) bool, the columns that an adapter changes. The others keep the bits of the base.
    """

    down: Any
    up: Any
    adapted: Any

    def adapt(self, base: Any, stacks: tuple[Any, ...], groups: tuple[Group, ...]) -> AdaptedLinear:
        """Returns a layer with adapters of this kind."""
        return AdaptedLinear(base, stacks, groups)


type Stacks = dict[str, tuple[Any, ...]]
"""The linear layers of a block that adapters change, by name; a `Stack` for each rank, cut over devices or not."""


class Group(NamedTuple):
    """How the tokens of a batch are sorted by the adapters of one rank.

    Attributes:
        order: (R,) the tokens, sorted by adapter; those that have none of these come last.
        places: (R,) where each token is in this order.
        sizes: (G,) the tokens of each adapter.
        adapter: (R,) the adapter of each token; G for none of these.
    """

    order: jax.Array
    places: jax.Array
    sizes: jax.Array
    adapter: jax.Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["blocks"], meta_fields=["names", "members"])
@dataclass(frozen=True)
class Adapters:
    """The adapters of a model. A pytree.

    Adapters of one rank are stacked, and each token is multiplied by the matrices of its own adapter
    (`Ops.group_matmul`). The base's product is computed as without adapters; then what the adapter makes of the same
    input is added.

    Attributes:
        blocks: For each block the stacks of its linear layers.
        names: Of the adapters.
        members: For each rank which adapters have it, in the order of the stacks.

    Guarantee: row-invariant with `INVARIANT`: a token's bits depend on its own adapter alone, and neither on the
    adapters of other tokens, nor on which others are loaded. Without an adapter they are those of the base model.

    Source: Chen et al., "Punica: Multi-Tenant LoRA Serving", 2023, for products with the adapters of all rows at once.
    """

    blocks: tuple[Stacks, ...]
    names: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def stack(cls, model: Llama, adapters: Mapping[str, LoRA]) -> Adapters:
        """Returns adapters for a model, in the dtype of its computation.

        Args:
            model: The model.
            adapters: By name, read for the config of the model.

        Raises:
            ValueError: If an adapter changes a layer that the model does not have.
        """
        return jax.tree.map(jnp.asarray, cls.on_host(model, adapters))

    @classmethod
    def on_host(cls, model: Llama, adapters: Mapping[str, LoRA]) -> Adapters:
        """Returns the same in arrays of the host; the model needs no arrays."""
        loras = list(adapters.values())
        by_rank: dict[int, list[int]] = {}
        for index, lora in enumerate(loras):
            by_rank.setdefault(lora.rank, []).append(index)
        kinds = [tuple(loras[index] for index in members) for members in by_rank.values()]
        blocks = [_stacks(block, f"model.layers.{i}", kinds, model.dtype) for i, block in enumerate(model.blocks)]
        known = {f"model.layers.{i}.{part}" for i, block in enumerate(model.blocks)
                 for name, parts in _LAYERS.items() if _find(block, name) is not None for part in parts}  # fmt: skip
        for name, lora in adapters.items():
            unknown = sorted(set(lora.down) - known)
            if unknown:
                raise ValueError(
                    f"Adapters: {name!r} changes {unknown[0]}, which is no linear layer that adapters can change: they"
                    " change those of attention and MLP in the model's blocks, and neither experts nor attention with"
                    " latents, linear attention or an output gate. Merge the adapter into the model's weights instead,"
                    " as merge_and_unload of peft does."
                )
        return cls(tuple(blocks), tuple(adapters), tuple(map(tuple, by_rank.values())))


def sort_tokens(members: tuple[tuple[int, ...], ...], chosen: jax.Array, length: int) -> tuple[Group, ...]:
    """Sorts the tokens of a batch, once for all layers; a group for each rank.

    Args:
        members: As `Adapters.members`.
        chosen: (B,) int32, for each sequence 0 for the base model, or i + 1 for adapter i.
        length: Tokens of each sequence, padding included.

    Example:
        >>> [group] = sort_tokens(((0, 1),), jnp.array([2, 0, 1]), 1)
        >>> group.order.tolist(), group.places.tolist(), group.sizes.tolist(), group.adapter.tolist()
        ([2, 0, 1], [1, 2, 0], [1, 1], [1, 2, 0])
    """
    groups, number = [], sum(map(len, members))
    for of_rank in members:
        table = np.full(number + 1, len(of_rank), np.int32)
        table[np.array(of_rank) + 1] = np.arange(len(of_rank))
        adapter = jnp.repeat(jnp.asarray(table)[chosen], length)
        order = jnp.argsort(adapter, stable=True)
        places = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))
        sizes = jnp.sum(adapter[:, None] == jnp.arange(len(of_rank)), axis=0, dtype=jnp.int32)
        groups.append(Group(order, places, sizes, adapter))
    return tuple(groups)


class AdaptedLinear:
    """A linear layer with the adapters of the tokens of one batch, for the time of a call.

    Args:
        base: The layer.
        stacks: Its adapters, for each rank.
        groups: The tokens by adapter, for each rank.
    """

    def __init__(self, base: Any, stacks: tuple[Stack, ...], groups: tuple[Group, ...]) -> None:
        self._base, self._stacks, self._groups = base, stacks, groups

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x (..., in_features) to (..., out_features)."""
        y = self._base(x)
        rows, out = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        for stack, group in zip(self._stacks, self._groups, strict=True):
            inner = self._down(rows.astype(stack.down.dtype)[group.order], stack, group)
            change, adapted = self._up(inner, stack, group)
            # Not a sum with zeros: -0.0 + 0.0 is 0.0.
            out = jnp.where(adapted, out + change.astype(out.dtype), out)
        return out.reshape(y.shape)

    def _down(self, rows: jax.Array, stack: Any, group: Group) -> jax.Array:
        """Multiplies rows, sorted by adapter, by the first matrices."""
        return self._base.ops.group_matmul(rows, stack.down, group.sizes)

    def _up(self, inner: jax.Array, stack: Any, group: Group) -> tuple[jax.Array, jax.Array]:
        """Multiplies by the second matrices; returns that for each token, and which numbers are changed."""
        change = self._base.ops.group_matmul(inner, stack.up, group.sizes)[group.places]
        nothing = jnp.zeros((1, change.shape[1]), bool)
        return change, jnp.concatenate([stack.adapted, nothing])[group.adapter]


def attach(block: Block, stacks: Stacks, groups: tuple[Group, ...]) -> None:
    """Puts adapters before the linear layers of a block, which must be a copy for one call."""
    for name, of_layer in stacks.items():
        part, _, layer = name.partition(".")
        module = getattr(block, part)
        object.__setattr__(module, layer, of_layer[0].adapt(getattr(module, layer), of_layer, groups))


def _stacks(block: Block, prefix: str, kinds: list[tuple[LoRA, ...]], dtype: Any) -> Stacks:
    found: Stacks = {}
    for name, parts in _LAYERS.items():
        layer = _find(block, name)
        # A layer that no adapter changes in any block has none. Blocks of a kind must have the same ones.
        if layer is None or not any(key.endswith(parts) for kind in kinds for lora in kind for key in lora.down):
            continue
        widths = layer_widths(block, name) or (layer.out_features,)
        found[name] = tuple(
            _stack([[(lora, f"{prefix}.{part}") for part in parts] for lora in kind], layer.in_features, widths, dtype)
            for kind in kinds
        )
    return found


def _stack(given: list[list[tuple[LoRA, str]]], features: int, widths: tuple[int, ...], dtype: Any) -> Stack:
    rank, ends = given[0][0][0].rank, np.cumsum(widths)
    down = np.zeros((len(given), features, len(widths) * rank), np.float32)
    up = np.zeros((len(given), len(widths) * rank, sum(widths)), np.float32)
    adapted = np.zeros((len(given), sum(widths)), bool)
    for index, parts in enumerate(given):
        for part, (lora, name) in enumerate(parts):
            if name not in lora.down:
                continue
            inner, columns = slice(part * rank, (part + 1) * rank), slice(ends[part] - widths[part], ends[part])
            down[index, :, inner] = lora.down[name].T
            up[index, inner, columns] = lora.up[name].T * np.float32(lora.scaling)
            adapted[index, columns] = True
    return Stack(down.astype(jnp.dtype(dtype)), up.astype(jnp.dtype(dtype)), adapted)


def _find(block: Block, name: str) -> Any:
    """Returns a linear layer of a block; None if it has experts or attention of another kind there."""
    part, _, layer = name.partition(".")
    module = getattr(block, part)
    if getattr(module, "gate", None) is not None:  # of attention: its product is a part of q_proj in checkpoints
        return None
    found = getattr(module, layer, None)
    return found if hasattr(found, "in_features") else None


def layer_widths(block: Block, name: str) -> tuple[int, ...] | None:
    """Returns the columns of each part of a linear layer, which a mesh cuts; None for layers whose rows it cuts."""
    attention = block.attention
    if name == "attention.qkv" and isinstance(attention, Attention):
        return tuple(n * attention.head_dim for n in (attention.num_heads, *[attention.num_kv_heads] * 2))
    parts = len(_LAYERS[name])
    return (_find(block, name).out_features // parts,) * parts if parts > 1 else None

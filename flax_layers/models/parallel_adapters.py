"""LoRA adapters of a model that is cut over the devices of a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import bijax
from bijax.parallel import psum, tree_sum
from bijax.parallel._axes import vary_over

from ..ops import PLAIN
from .adapters import AdaptedLinear, Adapters, Group, Stack, layer_widths
from .llama import Llama
from .parallel_layers import grouped
from .partition_layers import place
from .partitioned import PartitionedLlama

if TYPE_CHECKING:
    from ..checkpoint import LoRA


class ColumnStack(NamedTuple):
    """A `Stack` of a layer whose columns are cut over D devices.

    Attributes:
        down: (G, in, parts * rank), the same on all devices.
        up: (G, parts * rank, D, out / D), the columns of each device.
        adapted: (G, D, out / D) bool.
    """

    down: Any
    up: Any
    adapted: Any

    def adapt(self, base: Any, stacks: tuple[Any, ...], groups: tuple[Group, ...]) -> AdaptedLinear:
        """Returns a layer with adapters of this kind."""
        return AdaptedColumns(base, stacks, groups)

    @classmethod
    def specs(cls, axis: str) -> ColumnStack:
        """Returns how the matrices are sharded."""
        return cls(P(), P(None, None, axis, None), P(None, axis, None))


class RowStack(NamedTuple):
    """A `Stack` of a layer whose rows are cut over the devices.

    Attributes:
        down: (leaves, G + 1, in / leaves, rank), the rows of each leaf of the sum; zeros for tokens without an adapter.
        up: (G, rank, out), the same on all devices.
        adapted: (G, out) bool, the same.
    """

    down: Any
    up: Any
    adapted: Any

    def adapt(self, base: Any, stacks: tuple[Any, ...], groups: tuple[Group, ...]) -> AdaptedLinear:
        """Returns a layer with adapters of this kind."""
        return AdaptedRows(base, stacks, groups)

    @classmethod
    def specs(cls, axis: str) -> RowStack:
        """Returns how the matrices are sharded."""
        return cls(P(axis, None, None, None), P(), P())


class AdaptedColumns(AdaptedLinear):
    """A layer whose columns are cut, with adapters: each device adds to its columns. No sum is cut."""

    def _up(self, inner: jax.Array, stack: ColumnStack, group: Group) -> tuple[jax.Array, jax.Array]:
        own = Stack(stack.down, stack.up[:, :, 0], stack.adapted[:, 0])
        return super()._up(_varying(inner, self._base), own, _varying(group, self._base))


class AdaptedRows(AdaptedLinear):
    """A layer whose rows are cut, with adapters: the rank's sums are cut as those of the layer.

    Each device multiplies its columns of the input, leaf by leaf; the sums are added as the tree of
    `bijax.parallel.row_parallel`, and rounded once. What travels has a number for each token and rank, float32.
    """

    def _down(self, rows: jax.Array, stack: RowStack, group: Group) -> jax.Array:
        (leaves, groups, width, rank), count = stack.down.shape, rows.shape[0]
        # Leaf by leaf the tokens of each adapter, then those without one.
        by_leaf = rows.reshape(count, leaves, width).swapaxes(0, 1).reshape(leaves * count, width)
        sizes = jnp.append(group.sizes, count - group.sizes.sum(dtype=jnp.int32))
        weights = stack.down.reshape(leaves * groups, width, rank)
        operands = _varying((by_leaf, weights, jnp.tile(sizes, leaves)), self._base)
        axis = self._base.cut.axis
        if self._base.ops is PLAIN:
            parts = PLAIN.group_matmul(*operands).reshape(leaves, count, rank)
            return lax.psum(parts.sum(0), axis)
        parts = bijax.group_matmul(*operands, preferred_element_type="float32").reshape(leaves, count, rank)
        return psum(tree_sum(parts), axis, dtype=rows.dtype)


def _varying(tree: Any, base: Any) -> Any:
    """Returns arrays cast to vary over the axis of a layer, as products with what is cut need them."""
    return jax.tree.map(lambda x: vary_over(base.cut.axis, x), tree)


def cut_adapters(model: PartitionedLlama, adapters: Mapping[str, LoRA] | Adapters) -> Adapters:
    """Returns adapters cut as the layers of a model, each device with its part.

    Args:
        model: The model.
        adapters: By name, read for the config of the model; or those of the model on one device.

    Raises:
        ValueError: If an adapter changes a layer that the model does not have.
    """
    make: Any = nnx.eval_shape(lambda: Llama(model.config, dtype=model.dtype, rngs=nnx.Rngs(0)))
    whole = adapters if isinstance(adapters, Adapters) else Adapters.on_host(make, adapters)
    blocks = []
    for block, stacks in zip(make.blocks, whole.blocks, strict=True):
        found: dict[str, tuple[Any, ...]] = {}
        for name, of_layer in stacks.items():
            cut = [_cut(model, stack, layer_widths(block, name)) for stack in of_layer]
            found[name] = tuple(_placed(model, stack) for stack in cut)
        blocks.append(found)
    return dataclasses.replace(whole, blocks=tuple(blocks))


def adapter_specs(axis: str, stacks: Any) -> Any:
    """Returns how the stacks of a block are sharded; None for None."""
    if stacks is None:
        return None
    return {name: tuple(type(stack).specs(axis) for stack in of_layer) for name, of_layer in stacks.items()}


def _cut(model: PartitionedLlama, stack: Stack, widths: tuple[int, ...] | None) -> ColumnStack | RowStack:
    """Returns the matrices of a layer in the order of the devices; `widths` of its parts, None if its rows are cut."""
    down, up, adapted = (np.asarray(x) for x in stack)
    if widths is not None:
        devices = model.mesh.shape[model.axis]
        return ColumnStack(down, grouped(up, widths, devices), grouped(adapted, widths, devices))
    by_leaf = down.reshape(down.shape[0], model.leaves, -1, down.shape[2]).swapaxes(0, 1)
    nothing = np.zeros_like(by_leaf[:, :1])
    return RowStack(np.concatenate([by_leaf, nothing], axis=1), up, adapted)


def _placed(model: PartitionedLlama, stack: ColumnStack | RowStack) -> Any:
    specs = type(stack).specs(model.axis)
    return type(stack)(*(place(x, NamedSharding(model.mesh, spec)) for x, spec in zip(stack, specs, strict=True)))

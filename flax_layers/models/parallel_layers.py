"""Layers whose weights are cut over the devices of a mesh axis, for use inside `jax.shard_map`.

Each is made of a layer of one device, whose parameters it takes over: `partition` puts them into a model. With the
operations `PLAIN` they compute with JAX's own product and `psum`, whose bits depend on the number of devices.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from bijax.parallel import column_parallel, row_parallel, vocab_parallel_embed
from pallas_kernels.parts.jax_triton.few_rows import NORM_ELEMENTS
from pallas_kernels.parts.xla import groups

from ..ops import PLAIN, Ops
from .layers import Embed, Linear
from .layers._dtypes import promote
from .layers.embed import check_token_ids
from .layers.unrounded import Unrounded
from .parallel_cut import Cut, CutLayer


class ColumnParallelLinear(CutLayer, nnx.Module):
    """A linear layer whose columns are cut over the devices, in `leaves` groups.

    Args:
        layer: The layer of one device.
        parts: Numbers of columns of the projections that it computes side by side, such as queries, keys and values.
            Each group has an equal share of every projection.
        cut: How the model is cut.

    Attributes:
        kernel: (in_features, leaves, columns of a group).
        bias: (leaves, columns of a group), or None.

    Guarantee: `bijax.parallel.column_parallel`.
    """

    def __init__(self, layer: Linear, parts: tuple[int, ...], cut: Cut) -> None:
        self.kernel = nnx.Param(grouped(layer.kernel[...], parts, cut.leaves))
        self.bias: Any = nnx.data(None)
        if layer.bias is not None:
            self.bias = nnx.Param(grouped(layer.bias[...], parts, cut.leaves))
        self.parts = parts
        self.dtype, self.precision = layer.dtype, layer.precision
        self.preferred_element_type = layer.preferred_element_type
        self.ops: Ops = layer.ops
        self.cut = cut

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x (..., in_features), the same on all devices, to this device's columns of each projection in turn."""
        return ungrouped(self.columns(x), self.parts, self.cut.leaves, self.cut.own_leaves)

    def in_groups(self, x: jax.Array, heads: int) -> tuple[jax.Array, int]:
        """Does what a call does, for a reader of groups: returns the columns, and how many groups they are in.

        Args:
            x: As for a call.
            heads: Heads of the projection that has the fewest on this device; groups have whole heads of each.
        """
        own = self.cut.own_leaves
        return (self(x), 1) if heads % own else (self.columns(x), own)

    def columns(self, x: jax.Array) -> jax.Array:
        """Maps x to this device's columns group by group, each with its share of every projection."""
        x, kernel, bias = promote(self.dtype, x, self.kernel[...], None if self.bias is None else self.bias[...])
        kernel = kernel.reshape(kernel.shape[0], math.prod(kernel.shape[1:]))
        options: dict[str, Any] = {
            "bias": None if bias is None else bias.reshape(bias.size),
            "precision": self.precision,
            "preferred_element_type": self.preferred_element_type,
        }
        if self.ops is PLAIN:
            return PLAIN.matmul(x, kernel, **options)
        return column_parallel(x, kernel, self.cut.axis, leaves=self.cut.leaves, **options)

    def whole(self) -> dict[str, jax.Array]:
        """Returns the parameters as the layer of one device has them."""
        leaves = self.cut.leaves
        found = {"kernel": ungrouped(_flat(self.kernel[...]), self.parts, leaves, leaves)}
        if self.bias is not None:
            found["bias"] = ungrouped(_flat(self.bias[...]), self.parts, leaves, leaves)
        return found

    def specs(self) -> dict[str, PartitionSpec]:
        """Returns how the parameters are sharded."""
        axis = self.cut.axis
        return {"kernel": PartitionSpec(None, axis, None), "bias": PartitionSpec(axis, None)}

    def stored(self, name: str, value: np.ndarray) -> dict[str, np.ndarray]:
        """Returns a parameter of the layer of one device as this one has it."""
        return {name: grouped(value, self.parts, self.cut.leaves)}


class RowParallelLinear(CutLayer, nnx.Module):
    """A linear layer whose rows are cut over the devices.

    Args:
        layer: The layer of one device.
        cut: How the model is cut.

    Attributes:
        kernel: (in_features, out_features).
        bias: (out_features,), or None.

    Guarantee: `bijax.parallel.row_parallel`.
    """

    def __init__(self, layer: Linear, cut: Cut) -> None:
        self.kernel, self.bias = layer.kernel, layer.bias
        self.dtype, self.precision = layer.dtype, layer.precision
        self.preferred_element_type = layer.preferred_element_type
        self.ops: Ops = layer.ops
        self.cut = cut

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps this device's columns of x (..., in_features) to (..., out_features), the same on all devices."""
        x, kernel, bias, options = self._operands(x)
        if self.ops is PLAIN:
            y = jax.lax.psum(PLAIN.matmul(x, kernel, **options), self.cut.axis)
            return y if bias is None else y + bias.astype(y.dtype)
        return row_parallel(x, kernel, self.cut.axis, bias=bias, leaves=self.cut.leaves, **options)

    def unrounded(self, x: jax.Array) -> jax.Array | Unrounded:
        """Does what a call does, and leaves the rounding of the devices' sum to the next norm if there are few rows.

        The rounding of few rows is one kernel more that the host launches on each device. Kernels that add many rows
        round themselves.
        """
        several = self.cut.own_leaves < self.cut.leaves
        x, kernel, bias, options = self._operands(x)
        few = math.prod(x.shape[:-1]) * kernel.shape[-1] <= NORM_ELEMENTS
        if self.ops is PLAIN or not (several and few) or options["preferred_element_type"] is not None:
            return self(x)
        options |= {"preferred_element_type": jnp.float32, "leaves": self.cut.leaves}
        return Unrounded(row_parallel(x, kernel, self.cut.axis, bias=bias, **options))

    def own_rows(self, x: jax.Array) -> jax.Array:
        """Maps this device's columns of x (..., in_features) to its part of the rows, (R, out_features).

        The number of rows is a multiple of the devices; see `bijax.parallel.own_rows`.
        """
        x, kernel, bias, options = self._operands(x)
        options |= {"leaves": self.cut.leaves, "scatter_dimension": 0}
        return row_parallel(x.reshape(-1, x.shape[-1]), kernel, self.cut.axis, bias=bias, **options)

    def _operands(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None, dict[str, Any]]:
        x, kernel, bias = promote(self.dtype, x, self.kernel[...], None if self.bias is None else self.bias[...])
        return x, kernel, bias, {"precision": self.precision, "preferred_element_type": self.preferred_element_type}

    def specs(self) -> dict[str, PartitionSpec]:
        """Returns how the parameters are sharded."""
        axis = self.cut.axis
        return {"kernel": PartitionSpec(axis, None), "bias": PartitionSpec()}


class VocabParallelEmbed(CutLayer, Embed):
    """An embedding whose rows are cut over the devices; `attend` returns this device's columns.

    Args:
        layer: The embedding of one device.
        cut: How the model is cut.

    Attributes:
        embedding: (num_embeddings, features).
    """

    def __init__(self, layer: Embed, cut: Cut) -> None:
        self.embedding = layer.embedding
        self.num_embeddings, self.features, self.scale = layer.num_embeddings, layer.features, layer.scale
        self.dtype, self.ops = layer.dtype, layer.ops
        self.cut = cut

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the rows (..., features) of the token ids (...), the same on all devices."""
        check_token_ids(tokens, self.num_embeddings)
        (table,) = promote(self.dtype, self.embedding[...])
        rows = vocab_parallel_embed(table, tokens, self.cut.axis)
        return rows if self.scale == 1 else self.ops.scale(rows, self.scale)

    def attend(self, x: jax.Array, *, preferred_element_type: Any = None) -> jax.Array:
        """Multiplies x (..., features) by this device's rows of the table."""
        x, table = promote(self.dtype, x, self.embedding[...])
        if self.ops is PLAIN:
            return PLAIN.matmul(x, table, transpose_w=True, preferred_element_type=preferred_element_type)
        options: dict[str, Any] = {"preferred_element_type": preferred_element_type, "leaves": self.cut.leaves}
        return column_parallel(x, table, self.cut.axis, transpose_w=True, **options)

    def specs(self) -> dict[str, PartitionSpec]:
        """Returns how the parameters are sharded."""
        axis = self.cut.axis
        return {"embedding": PartitionSpec(axis, None)}


def grouped[T: (jax.Array, np.ndarray)](x: T, parts: tuple[int, ...], leaves: int) -> T:
    """Returns the columns (..., N) of projections side by side as (..., leaves, N / leaves), each group with all.

    An array of the host stays there.
    """
    numpy: Any = np if isinstance(x, np.ndarray) else jnp
    ends = [sum(parts[:i]) for i in range(1, len(parts))]
    projections = numpy.split(x, ends, axis=-1)
    return numpy.concatenate([p.reshape(*p.shape[:-1], leaves, p.shape[-1] // leaves) for p in projections], axis=-1)


def ungrouped(x: jax.Array, parts: tuple[int, ...], leaves: int, own: int) -> jax.Array:
    """Returns the columns of `own` groups (..., own * N / leaves) as projections side by side."""
    return groups.ungrouped(x, [part // leaves for part in parts], own)


def _flat(x: jax.Array) -> jax.Array:
    """Merges the last two dimensions."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])

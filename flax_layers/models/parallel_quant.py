"""Layers of int8 that are cut over the devices of a mesh, for use inside `jax.shard_map`.

No sum is cut: products of int8 are exact, but rows are quantised as they come, and their scale is that of a whole row.
So each device has some columns of each kernel, and whole rows.
"""

import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

import bijax

from ..ops import PLAIN, Ops
from .layers import QuantizedWeight, QuantLinear, QuantMoE
from .layers._dtypes import dtype_of
from .layers.moe import tokens
from .layers.quant_linear import quant_product, quantize_columns
from .parallel_cut import Cut, CutLayer
from .parallel_experts import ParallelMoE
from .parallel_layers import grouped, ungrouped


class ColumnParallelQuantLinear(CutLayer, nnx.Module):
    """A linear layer of int8 whose columns are cut over the devices, in groups as in `ColumnParallelLinear`.

    Args:
        layer: The layer of one device.
        parts: Numbers of columns of the projections that it computes side by side.
        cut: How the model is cut.

    Attributes:
        weight: (in_features, leaves, columns of a group) int8.
        weight_scale: (leaves, columns of a group) float32.
        smooth_scale: (in_features,) float32, or None.
        bias: (leaves, columns of a group), or None.

    Guarantee: row-invariant; an element has the bits of `QuantLinear`.
    """

    def __init__(self, layer: QuantLinear, parts: tuple[int, ...], cut: Cut) -> None:
        self.parts, self.cut = parts, cut
        self.weight, self.weight_scale = (
            QuantizedWeight(grouped(v[...], parts, cut.leaves)) for v in (layer.weight, layer.weight_scale)
        )
        self.smooth_scale = layer.smooth_scale
        self.bias: Any = nnx.data(None)
        if layer.bias is not None:
            self.bias = QuantizedWeight(grouped(layer.bias[...], parts, cut.leaves))
        self.dtype, self.param_dtype = layer.dtype, layer.param_dtype
        self.preferred_element_type = layer.preferred_element_type
        self.ops: Ops = layer.ops

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps x (..., in_features), the same on all devices, to this device's columns of each projection in turn."""
        return ungrouped(self.columns(x), self.parts, self.cut.leaves, self.cut.own_leaves)

    def columns(self, x: jax.Array) -> jax.Array:
        """Maps x to this device's columns group by group, each with its share of every projection."""
        weight = self.weight[...]
        weight = weight.reshape(weight.shape[0], math.prod(weight.shape[1:]))
        bias = None if self.bias is None else self.bias[...].reshape(-1)
        return quant_product(self, x, weight, self.weight_scale[...].reshape(-1), bias)

    def specs(self) -> dict[str, PartitionSpec]:
        """Returns how the parameters are sharded."""
        columns = PartitionSpec(self.cut.axis, None)
        return {"weight": PartitionSpec(None, self.cut.axis, None), "weight_scale": columns, "bias": columns}

    def whole(self) -> dict[str, jax.Array]:
        """Returns the parameters as the layer of one device has them."""
        weight, leaves = self.weight[...], self.cut.leaves
        flat = {"weight": weight.reshape(weight.shape[0], -1), "weight_scale": self.weight_scale[...].reshape(-1)}
        if self.bias is not None:
            flat["bias"] = self.bias[...].reshape(-1)
        return {name: ungrouped(value, self.parts, leaves, leaves) for name, value in flat.items()}

    def stored(self, name: str, value: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the int8 parameters of a kernel, or a bias, as this layer has them."""
        found = stored_in_int8(name, value)
        return {name: grouped(array, self.parts, self.cut.leaves) for name, array in found.items()}


class GatheredQuantLinear(CutLayer, nnx.Module):
    """A linear layer of int8 after heads or an MLP that are cut: rows are gathered, and its own columns are cut.

    Args:
        layer: The layer of one device.
        cut: How the model is cut.

    Attributes:
        weight: (in_features, out_features) int8, cut by columns.
        weight_scale: (out_features,) float32.
        smooth_scale: (in_features,) float32, or None.
        bias: (out_features,), or None.

    Raises:
        ValueError: If the devices do not divide the columns.

    Guarantee: row-invariant, with the bits of `QuantLinear`.
    """

    def __init__(self, layer: QuantLinear, cut: Cut) -> None:
        if layer.out_features % cut.devices:
            raise ValueError(
                f"partition: the devices of axis {cut.axis!r} must divide the columns of a layer of int8, got"
                f" {cut.devices} devices and {layer.out_features} columns; use fewer devices."
            )
        self.weight, self.weight_scale = layer.weight, layer.weight_scale
        self.smooth_scale, self.bias = layer.smooth_scale, layer.bias
        self.dtype, self.param_dtype = layer.dtype, layer.param_dtype
        self.preferred_element_type = layer.preferred_element_type
        self.ops: Ops = layer.ops
        self.cut = cut

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps this device's columns of x (..., in_features) to (..., out_features), the same on all devices."""
        axis, last = self.cut.axis, x.ndim - 1
        whole = lax.all_gather(x, axis, axis=last, tiled=True, to="invarying")
        bias = None if self.bias is None else self.bias[...]
        y = quant_product(self, whole, self.weight[...], self.weight_scale[...], bias)
        return lax.all_gather(y, axis, axis=last, tiled=True, to="invarying")

    def specs(self) -> dict[str, PartitionSpec]:
        """Returns how the parameters are sharded."""
        columns = PartitionSpec(self.cut.axis)
        return {"weight": PartitionSpec(None, self.cut.axis), "weight_scale": columns, "bias": columns}

    def stored(self, name: str, value: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the int8 parameters of a kernel, or a bias."""
        return stored_in_int8(name, value)


class ParallelQuantMoE(ParallelMoE):
    """Experts of int8 that are cut over the devices as whole experts; rows travel before they are quantised.

    Args:
        layer: The layer of one device, whose parameters become this one's.
        cut: How the model is cut.

    Attributes:
        router: (features, num_experts).
        router_bias: (num_experts,), or None.
        gate_up: (num_experts, features, 2 * hidden_features) int8.
        gate_up_scale: (num_experts, 2 * hidden_features) float32.
        down: (num_experts, hidden_features, features) int8.
        down_scale: (num_experts, features) float32.
        shared: MLP of the shared experts, or None.
        shared_gate: (features, 1), or None.

    Guarantee: row-invariant, with the bits of one device.
    """

    def __init__(self, layer: QuantMoE, cut: Cut) -> None:
        super().__init__(layer, cut)
        self.gate_up_scale, self.down_scale = layer.gate_up_scale, layer.down_scale
        self.param_dtype = layer.param_dtype

    def operands(self, x: jax.Array) -> tuple[jax.Array, jax.Array, Any, Any]:
        """Returns x (..., features) as (T, features), the router, and this device's experts with their scales."""
        dtype = dtype_of(self.dtype, x, self.param_dtype)
        rows = tokens("ParallelMoE", x, self.features).astype(dtype)
        gate_up, down = (self.gate_up[...], self.gate_up_scale[...]), (self.down[...], self.down_scale[...])
        return rows, self.router[...].astype(dtype), gate_up, down

    def first_product(self, rows: jax.Array, gate_up: Any, counts: jax.Array) -> jax.Array:
        """Returns the products with gates and up projections, before the activation."""
        quantised, scale = bijax.scale_dynamic_quant(rows)
        weight, columns = gate_up
        return bijax.moe_quant_group_gemm(quantised, scale, weight, columns, counts, preferred_element_type=rows.dtype)

    def second_product(self, inner: jax.Array, down: Any, counts: jax.Array) -> jax.Array:
        """Returns the results of the experts."""
        quantised, scale = bijax.moe_swiglu_dynamic_quant(inner, None, counts)
        weight, columns = down
        return bijax.moe_quant_group_gemm(quantised, scale, weight, columns, counts, preferred_element_type=inner.dtype)

    def specs(self) -> dict[str, PartitionSpec]:
        """Returns how the parameters that are cut are sharded."""
        scales = PartitionSpec(self.cut.expert_axes, None)
        return {**super().specs(), "gate_up_scale": scales, "down_scale": scales}

    def stored(self, name: str, value: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the int8 parameters of the experts' kernels; other parameters are unchanged."""
        return stored_in_int8(name, value) if name in ("gate_up", "down") else {name: value}

    def _plain_experts(self, *arguments: Any) -> jax.Array:
        return PLAIN.quantized_experts(*arguments)


def stored_in_int8(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the int8 parameters of a kernel (..., in, out), which one device quantises; a bias is unchanged.

    Args:
        name: `kernel`, `gate_up` or `down` for a kernel.
        value: It.
    """
    if name == "bias":
        return {name: value}
    weight, scale = map(np.asarray, quantize_columns(value))
    own = "weight" if name == "kernel" else name
    return {own: weight, f"{own}_scale": scale}

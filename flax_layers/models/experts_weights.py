"""Where the weights of a checkpoint go in a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..ops import INVARIANT, Ops
from .layers import MoE

if TYPE_CHECKING:
    from ..checkpoint.expert_block import ExpertBlock


def experts_from_checkpoint(
    block: ExpertBlock, *, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32, ops: Ops = INVARIANT
) -> MoE:
    """Returns the layer of an expert block.

    Args:
        block: As `flax_layers.checkpoint.load_expert_block` returns it.
        dtype: Dtype of the computation.
        param_dtype: Dtype of the parameters.
        ops: The operations to compute with.
    """
    config = block.config
    moe: MoE = nnx.eval_shape(
        lambda: MoE(
            block.hidden_size,
            config.intermediate_size,
            routing=config.routing,
            shared_features=config.shared_size,
            shared_gate=config.shared_gate,
            dtype=dtype,
            param_dtype=param_dtype,
            ops=ops,
            rngs=nnx.Rngs(0),
        )
    )
    for parameter, value in read_experts(moe, block.weights, block.prefix):
        parameter.set_value(jnp.asarray(value, parameter.dtype))
    return moe


def read_experts(moe: MoE, weights: Mapping[str, np.ndarray], prefix: str) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields all parameters of a mixture of experts with their values, read one after another.

    Args:
        moe: The layer; its parameters may be abstract (`nnx.eval_shape`).
        weights: Weights under Hugging Face names, kernels as (out, in).
        prefix: What the names start with, `model.layers.0.mlp`.

    Raises:
        KeyError: If a weight is missing.
    """

    def kernel(name: str, *parts: str) -> np.ndarray:
        return np.concatenate([weights[f"{prefix}.{name}{part}_proj.weight"] for part in parts]).T

    numbers = range(moe.routing.num_experts)
    yield moe.router, weights[f"{prefix}.gate.weight"].T
    yield moe.gate_up, np.stack([kernel(f"experts.{i}.", "gate", "up") for i in numbers])
    yield moe.down, np.stack([kernel(f"experts.{i}.", "down") for i in numbers])
    if moe.router_bias is not None:
        yield moe.router_bias, weights[f"{prefix}.gate.e_score_correction_bias"]
    if moe.shared is not None:
        name = "shared_experts" if moe.shared_gate is None else "shared_expert"
        yield moe.shared.gate_up.kernel, kernel(f"{name}.", "gate", "up")
        yield moe.shared.down.kernel, kernel(f"{name}.", "down")
    if moe.shared_gate is not None:
        yield moe.shared_gate, weights[f"{prefix}.shared_expert_gate.weight"].T

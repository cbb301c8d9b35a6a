"""Converts the variables of a linen model for its int8 layers."""

import functools
from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax.core import unfreeze

from ..linen import Dense, MoE, QuantDense, QuantMoE
from ..linen.quantized import COLLECTION, Recorded, recording
from ..models.layers.quant_linear import quantize_columns
from .quantize import smooth_scale

type Variables = Mapping[str, Any]

LINEN_QUANTIZED: Final[Mapping[Any, type]] = {linen.Dense: QuantDense, Dense: QuantDense, MoE: QuantMoE}
"""The int8 layer of each layer."""

_EXPERTS: Final = {"gate_up": 3, "down": 3, "shared_gate_up": 2, "shared_down": 2}

QUANTIZED_TYPES: Final = frozenset(LINEN_QUANTIZED.values())


def quantize_variables(
    model: linen.Module, variables: Variables, *inputs: Any, calibrate: bool = False, **options: Any
) -> dict[str, Any]:
    """Returns the variables of a linen model for its int8 layers.

    The kernel of each `QuantDense` and the experts of each `QuantMoE` move from the parameters to the collection
    "quantized", in int8, with their scales. Everything else is unchanged.

    Args:
        model: As `flax_layers.convert(model, quantize="int8")` returns it, or any model with these layers.
        variables: The float model's variables.
        inputs: Arguments of one call, which finds the layers; arrays or `jax.ShapeDtypeStruct`s, unless they calibrate.
        calibrate: Whether smooth scales come from this call, as for `convert` with a calibration batch; else they are
            ones. Experts are not smoothed.
        options: Keyword arguments of `model.apply` for that call (`method`, `rngs`, `mutable`, arguments of the model).

    Raises:
        TypeError: If JAX traces a part of the calibration call.
        ValueError: If the model has no int8 layers, the call passes one nan or inf, or a kernel is not a matrix because
            the layer is repeated (`linen.scan`, `linen.vmap`); exclude such a layer by a rule.

    Example:
        >>> from flax_layers import convert
        >>> model, x = linen.Dense(3), jnp.ones((2, 4))
        >>> variables = model.init(jax.random.key(0), x)
        >>> model = convert(model, quantize="int8")
        >>> variables = quantize_variables(model, variables, x)
        >>> variables["quantized"]["kernel"].dtype.name, model.apply(variables, x).shape
        ('int8', (2, 3))
    """
    recorded: Recorded = {}
    token = recording.set(recorded)
    try:
        call: Any = functools.partial(model.apply, **options)
        if calibrate:
            call(variables, *inputs)
        else:
            jax.eval_shape(call, variables, *inputs)
    finally:
        recording.reset(token)
    if not recorded:
        raise ValueError(
            "quantize_variables: expected a model with int8 layers, and a call that reaches them; convert the model"
            " with quantize='int8' first."
        )
    found: dict[str, Any] = jax.tree.map(lambda leaf: leaf, unfreeze(dict(variables)))
    for path, calls in recorded.items():
        parameters = _at(found.get("params", {}), path)
        if "kernel" in parameters:
            kernel = _matrix(parameters.pop("kernel"), 2, path)
            smooth = jnp.ones(kernel.shape[:1], jnp.float32)
            if calibrate:
                smooth = smooth_scale("/".join(path), kernel, _largest(calls, path))
            weight, scale = quantize_columns(kernel, smooth)
            stored = {"kernel": weight, "kernel_scale": scale, "smooth_scale": smooth}
        else:
            stored = {}
            for name, rank in _EXPERTS.items():
                if name in parameters:
                    kernels = _matrix(parameters.pop(name), rank, path)
                    stored[name], stored[f"{name}_scale"] = quantize_columns(kernels)
        _at(found.setdefault(COLLECTION, {}), path).update(stored)
    return found


def _at(tree: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for name in path:
        tree = tree.setdefault(name, {})
    return tree


def _matrix(kernel: jax.Array, rank: int, path: tuple[str, ...]) -> jax.Array:
    if kernel.ndim != rank:
        raise ValueError(
            f"quantize_variables: expected a kernel of {rank} dimensions at {'/'.join(path)!r}, got {kernel.shape}, as"
            " of a layer that is repeated; leave it by a rule with False."
        )
    return kernel


def _largest(calls: list[Any], path: tuple[str, ...]) -> np.ndarray:
    """Returns the largest magnitude of each column of a layer's inputs."""
    if any(isinstance(x, jax.core.Tracer) for x in calls):
        raise TypeError(
            "quantize_variables: expected a model that runs a calibration batch as it is, got one that JAX traces"
            f" (jit, remat, scan) around {'/'.join(path)!r}; quantise it without calibration."
        )
    rows = [np.abs(np.asarray(x, np.float32)).reshape(-1, x.shape[-1]) for x in calls]
    return np.concatenate(rows).max(axis=0, initial=0)

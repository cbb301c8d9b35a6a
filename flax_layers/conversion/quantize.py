"""Converts linear layers of an nnx model to int8, in place."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype

from ..models.layers import Linear, MoE, QuantLinear, QuantMoE
from ..nnx import Linear as InvariantLinear
from ..ops import INVARIANT

type Largest = dict[int, np.ndarray]

QUANTIZED: Final[Mapping[Any, type]] = {
    nnx.Linear: QuantLinear,
    InvariantLinear: QuantLinear,
    Linear: QuantLinear,
    MoE: QuantMoE,
}
"""The int8 layer of each layer."""


def check_quantize(quantize: Any) -> None:
    """Checks the argument of that name.

    Raises:
        ValueError: If it is neither None nor "int8".
    """
    if quantize not in (None, "int8"):
        raise ValueError(f"convert: quantize must be None or 'int8', got {quantize!r}.")


def quantized_layers(layers: Sequence[tuple[str, Any]], calibrate: Callable[[], Any] | None) -> list[QuantLinear]:
    """Returns the int8 layers of linear ones.

    Args:
        layers: The layers and their paths.
        calibrate: Calls the model on a calibration batch; None for smooth scales of one.

    Raises:
        TypeError: If the call is traced by JAX.
        ValueError: If a layer has a custom product, or the call does not reach it or passes it nan or inf.
    """
    for path, layer in layers:
        own = getattr(layer, "dot_general", jax.lax.dot_general) is not jax.lax.dot_general
        if own or getattr(layer, "promote_dtype", promote_dtype) is not promote_dtype:
            raise ValueError(
                f"convert: expected a linear layer with the dot_general and promote_dtype of Flax at {path!r}, got"
                " others, which int8 would not call; leave it by a rule with False."
            )
    smooth: list[jax.Array | None] = [None] * len(layers)
    if calibrate is not None:
        largest = _largest_inputs([layer for _, layer in layers], calibrate)
        smooth = [smooth_scale(path, layer.kernel[...], largest.get(id(layer))) for path, layer in layers]
    return [_quantized(layer, s) for (_, layer), s in zip(layers, smooth, strict=True)]


def _quantized(layer: Any, smooth_scale: jax.Array | None) -> QuantLinear:
    return QuantLinear.from_kernel(
        layer.kernel[...],
        None if layer.bias is None else layer.bias[...],
        smooth_scale=smooth_scale,
        dtype=layer.dtype,
        preferred_element_type=layer.preferred_element_type,
        ops=getattr(layer, "ops", INVARIANT),
    )


def become(layer: nnx.Module, other: nnx.Module) -> None:
    """Makes a layer another one, of another type; all references to it see that."""
    object.__setattr__(layer, "__class__", type(other))
    vars(layer).clear()
    vars(layer).update(vars(other))


def smooth_scale(path: str, kernel: jax.Array, largest: np.ndarray | None) -> jax.Array:
    """Returns what evens out the columns of the input and the rows of the kernel: the root of their quotient.

    Raises:
        ValueError: If the largest magnitudes of the columns are missing or not finite.
    """
    if largest is None:
        raise ValueError(
            f"convert: the calibration batch does not reach the layer at {path!r}; call the model in a way that does,"
            " or leave the layer by a rule with False."
        )
    if not np.isfinite(largest).all():
        raise ValueError(f"convert: the calibration batch gives nan or inf to the layer at {path!r}.")
    rows = np.abs(np.asarray(kernel, np.float64)).max(axis=1)
    used = (rows > 0) & (largest > 0)
    root = np.sqrt(np.where(used, rows, 1) / np.where(used, largest, 1))
    return jnp.asarray(root, jnp.float32)


def _largest_inputs(layers: Sequence[nnx.Module], call: Callable[[], Any]) -> Largest:
    """Returns the largest magnitude of each column of the layers' inputs, by layer id."""
    found: Largest = {}
    with _recording(layers, found):
        call()
    return found


@contextlib.contextmanager
def _recording(layers: Sequence[nnx.Module], found: Largest) -> Iterator[None]:
    types = [type(layer) for layer in layers]
    token = _found.set(found)
    try:
        for layer, before in zip(layers, types, strict=True):
            object.__setattr__(layer, "__class__", _recorder(before))
        yield
    finally:
        _found.reset(token)
        for layer, before in zip(layers, types, strict=True):
            object.__setattr__(layer, "__class__", before)


_found: contextvars.ContextVar[Largest] = contextvars.ContextVar("found")


@functools.cache
def _recorder(cls: Any) -> type:
    """Returns a subclass of a linear layer that records the largest magnitudes of its input."""

    class Recorder(cls):  # type: ignore[misc]
        @functools.wraps(cls.__call__)  # `flax.nnx.Sequential` reads the signature when called with keywords
        def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
            if isinstance(x, jax.core.Tracer):
                raise TypeError(
                    "convert: expected a model that runs a calibration batch as it is, got one that JAX traces (jit,"
                    " remat, scan); call a part of it, or quantise without a calibration batch."
                )
            largest = np.abs(np.asarray(x, np.float32)).reshape(-1, x.shape[-1]).max(axis=0, initial=0)
            found = _found.get()
            found[id(self)] = np.maximum(found[id(self)], largest) if id(self) in found else largest
            return super().__call__(x, *args, **kwargs)

    return Recorder

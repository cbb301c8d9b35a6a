"""Float32 activations: the portable implementation, whose gradients serve every platform."""

import math
from collections.abc import Callable
from typing import Final, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.errors import UnsupportedError

Activation = Literal["gelu", "silu", "relu"]

SLOPE: Final = math.sqrt(2 / math.pi)
CUBIC: Final = 0.044715


def _gelu(z: jax.Array) -> jax.Array:
    return 0.5 * z * (1.0 + lax.tanh(SLOPE * (z + CUBIC * (z * z * z))))


def _silu(z: jax.Array) -> jax.Array:
    return z * lax.logistic(z)


def _relu(z: jax.Array) -> jax.Array:
    # As in jax.nn.relu the derivative at 0 is 0, and nan propagates.
    return jnp.where(z <= 0.0, 0.0, z)


ACTIVATIONS: Final[dict[str, Callable[[jax.Array], jax.Array]]] = {
    "gelu": _gelu,
    "silu": _silu,
    "relu": _relu,
}
"""Functions of float32 values. Kernels on a Hopper GPU spell silu and gelu out
(`pallas_kernels.matmul.hopper.activation`), so a platform's bits are its own. The erf form of gelu is missing:
Mosaic does not lower `erf`."""


def activate(z: jax.Array, activation: str | None) -> jax.Array:
    """Applies the named activation; None returns `z` unchanged.

    Args:
        z: float32 of any shape.
        activation: "gelu" (tanh form), "silu", "relu" or None.

    Raises:
        UnsupportedError: If the activation is unknown.

    Example:
        >>> activate(jnp.float32(-1.0), "relu").item()
        0.0
    """
    if activation is None:
        return z
    if activation not in ACTIVATIONS:
        raise UnsupportedError(
            f"pallas_kernels.matmul: expected an activation among {', '.join(ACTIVATIONS)} or None, got {activation!r};"
            " apply another one to the product with activation=None."
        )
    return ACTIVATIONS[activation](z)

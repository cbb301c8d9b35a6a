"""Heads that are cut over the devices of a mesh, and share a weight or the latents of tokens."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bijax.parallel import broadcast_to_leaves

from ..ops import PLAIN, Ops
from .layers import RMSNorm
from .layers._dtypes import promote
from .parallel_cut import Cut

type Run = Callable[[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]], jax.Array]


class _Groups(NamedTuple):
    """Groups of heads: the axis, and how many there are on all devices together."""

    axis: str
    number: int


def by_heads(
    run: Run, shared: jax.Array, heads: tuple[jax.Array, ...], rest: tuple[jax.Array, ...] = (), *, cut: Cut
) -> jax.Array:
    """Computes heads that share an array, with a gradient of that array that does not depend on the devices.

    The function runs once for all heads of this device. When differentiated it runs once for each group of heads, as
    many groups as leaves: the gradient of the shared array is the sum of those of the groups, as a fixed tree over all
    devices.

    Args:
        run: Maps the shared array, the arrays of some heads and the rest to a result of these heads, (B, T, N, ...). A
            head's result must not depend on the other heads.
        shared: The same on all devices.
        heads: (B, T, N, ...) each, this device's heads.
        rest: Arrays without gradients.
        cut: How the heads are cut: `Cut.of_heads`.
    """
    return _by_heads(run, shared, heads, rest, _Groups(cut.axis, cut.leaves))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def _by_heads(
    run: Run, shared: jax.Array, heads: tuple[jax.Array, ...], rest: tuple[jax.Array, ...], groups: _Groups
) -> jax.Array:
    del groups
    return run(shared, heads, rest)


def _forward(
    run: Run, shared: jax.Array, heads: tuple[jax.Array, ...], rest: tuple[jax.Array, ...], groups: _Groups
) -> tuple[jax.Array, Any]:
    def grouped(shared: jax.Array, heads: tuple[jax.Array, ...]) -> jax.Array:
        copies = broadcast_to_leaves(shared, groups.axis, leaves=groups.number)
        parts = zip(*(jnp.split(x, copies.shape[0], axis=2) for x in heads), strict=True)
        return jnp.concatenate([run(copy, part, rest) for copy, part in zip(copies, parts, strict=True)], axis=2)

    return jax.vjp(grouped, shared, heads)


def _backward(run: Run, groups: _Groups, pull: Any, g: jax.Array) -> tuple[Any, Any, None]:
    del run, groups
    return *pull(g), None


_by_heads.defvjp(_forward, _backward)


class ParallelHeadNorm(nnx.Module):
    """A norm of heads that are cut over the devices, with one scale.

    Args:
        layer: The norm of one device.
        heads: Heads on all devices together.
        cut: How the model is cut.

    Attributes:
        scale: (head_dim,).

    Guarantee: row-invariant; the gradient of the scale has the bits of one device (`by_heads`).
    """

    def __init__(self, layer: RMSNorm, heads: int, cut: Cut) -> None:
        self.scale = layer.scale
        self.epsilon, self.scale_offset = layer.epsilon, layer.scale_offset
        self.dtype = layer.dtype
        self.ops: Ops = layer.ops
        self.cut = cut.of_heads(heads)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the heads of x (B, T, heads of this device, head_dim)."""
        x, scale = promote(self.dtype, x, self.scale[...])
        options: dict[str, float] = {"eps": self.epsilon, "weight_offset": self.scale_offset}
        if self.ops is PLAIN:
            return PLAIN.rms_norm(x, scale, **options)

        def run(scale: jax.Array, heads: tuple[jax.Array, ...], _: tuple[jax.Array, ...]) -> jax.Array:
            return self.ops.rms_norm(heads[0], scale, **options)

        return by_heads(run, scale, (x,), cut=self.cut)

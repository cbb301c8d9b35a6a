"""Latent attention whose heads are cut over the devices of a mesh, for use inside `jax.shard_map`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..ops import PLAIN
from .layers import LatentAttention
from .layers._dtypes import promote
from .layers.rotary import check_angles
from .parallel_cut import Cut, CutLayer
from .parallel_heads import by_heads
from .parallel_linear import column_parallel_layer, row_parallel_layer


class ParallelLatentAttention(CutLayer, LatentAttention):
    """Latent attention whose query heads are cut over the devices.

    Every device computes the latents of all tokens and keeps them, since each head reads whole latents. The projections
    from and to heads are cut, `key_up` and `value_up` by heads.

    Args:
        layer: The layer of one device, whose parameters become this one's.
        cut: How the model is cut; its devices divide the heads.

    Attributes:
        query: Cut by columns.
        key_up: (num_heads, nope_head_dim, rank), cut by heads.
        value_up: (num_heads, rank, value_head_dim), cut by heads.
        out: Cut by rows.

    Guarantee: row-invariant; the result and the gradients of all parameters have the bits of one device of the mesh.
    """

    def __init__(self, layer: LatentAttention, cut: Cut) -> None:
        width = layer.nope_head_dim + layer.rope_head_dim
        self.query_down, self.query_norm = layer.query_down, layer.query_norm
        self.query: Any = column_parallel_layer(layer.query, (layer.num_heads * width,), cut)
        self.latent, self.latent_norm = layer.latent, layer.latent_norm
        self.key_up, self.value_up = layer.key_up, layer.value_up
        self.out: Any = row_parallel_layer(layer.out, cut)
        self.num_heads = layer.num_heads // cut.devices
        self.rank, self.nope_head_dim, self.rope_head_dim = layer.rank, layer.nope_head_dim, layer.rope_head_dim
        self.value_head_dim, self.scale = layer.value_head_dim, layer.scale
        self.dtype, self.ops = layer.dtype, layer.ops
        self.cut = cut.of_heads(layer.num_heads)

    def specs(self) -> dict[str, PartitionSpec]:
        """Returns how the parameters that are cut are sharded."""
        heads = PartitionSpec(self.cut.axis, None, None)
        return {"key_up": heads, "value_up": heads}

    def _heads(self, x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """As that of one device, but latents, which all devices have, are rotated apart from this device's queries."""
        check_angles("LatentAttention", x, rotary, self.rope_head_dim)
        low = x if self.query_down is None else self.query_norm(self.query_down(x))
        query = self.query(low).reshape(*x.shape[:2], self.num_heads, self.nope_head_dim + self.rope_head_dim)
        query, latent, key_up = promote(self.dtype, query, self.latent(x), self.key_up[...])
        absorbed = self.ops.head_matmul(query[..., : self.nope_head_dim], key_up)
        query = jnp.concatenate([absorbed, self.ops.rotate(query[..., self.nope_head_dim :], *rotary)], axis=-1)
        key = self.ops.rotate(latent[:, :, None, self.rank :], *rotary)[:, :, 0]
        return query, jnp.concatenate([self.latent_norm(latent[..., : self.rank]), key], axis=-1)

    def _attended(self, query: jax.Array, latents: jax.Array, **places: jax.Array) -> jax.Array:
        if self.ops is PLAIN:
            return super()._attended(query, latents, **places)
        names, attended = tuple(places), super()._attended

        def run(latents: jax.Array, heads: tuple[jax.Array, ...], rest: tuple[jax.Array, ...]) -> jax.Array:
            return attended(heads[0], latents, **dict(zip(names, rest, strict=True)))

        return by_heads(run, latents, (query,), tuple(places.values()), cut=self.cut)

"""Convolutional networks."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen, nnx

from benchmarks.gallery_programs.program import EXAMPLES, Function, Program, normal


def haiku_convnet() -> tuple[Function, jax.Array]:
    def convnet(x: jax.Array) -> jax.Array:
        for channels in (16, 32):
            x = hk.max_pool(jax.nn.relu(hk.Conv2D(channels, 3)(x)), 2, 2, "SAME")
        return hk.Linear(10)(hk.Flatten()(x))

    net = hk.without_apply_rng(hk.transform(convnet))
    x = normal(0, EXAMPLES, 16, 16, 3)
    params = net.init(jax.random.key(0), x)
    return lambda x: net.apply(params, x), x


class _UNet(eqx.Module):
    down: eqx.nn.Conv2d
    middle: eqx.nn.Conv2d
    up: eqx.nn.ConvTranspose2d
    last: eqx.nn.Conv2d

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 4)
        self.down = eqx.nn.Conv2d(3, 16, 3, padding=1, key=keys[0])
        self.middle = eqx.nn.Conv2d(16, 32, 3, stride=2, padding=1, key=keys[1])
        self.up = eqx.nn.ConvTranspose2d(32, 16, 2, stride=2, key=keys[2])
        self.last = eqx.nn.Conv2d(32, 3, 3, padding=1, key=keys[3])

    def __call__(self, x: jax.Array) -> jax.Array:
        skip = jax.nn.silu(self.down(x))
        h = self.up(jax.nn.silu(self.middle(skip)))
        return self.last(jnp.concatenate([skip, jax.nn.silu(h)]))


def equinox_unet() -> tuple[Function, jax.Array]:
    return jax.vmap(_UNet(jax.random.key(0))), normal(0, EXAMPLES, 3, 16, 16)


class _Residual(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.Conv(16, (3, 3))(x)
        h = linen.Conv(16, (3, 3))(linen.relu(linen.GroupNorm(4)(x)))
        x = linen.avg_pool(linen.relu(x + h), (2, 2), (2, 2))
        return linen.Dense(10)(x.mean((1, 2)))


def linen_residual() -> tuple[Function, jax.Array]:
    net, x = _Residual(), normal(0, EXAMPLES, 16, 16, 3)
    params = net.init(jax.random.key(0), x)
    return lambda x: net.apply(params, x), x


def nnx_batch_norm() -> tuple[Function, jax.Array]:
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Conv(3, 16, (3, 3), rngs=rngs), nnx.BatchNorm(16, rngs=rngs), nnx.relu)
    model.eval()
    return model, normal(0, EXAMPLES, 16, 16, 3)


PROGRAMS = (
    Program("haiku: convolutional network", haiku_convnet),
    Program("equinox: U-Net", equinox_unet),
    Program("flax linen: residual block with GroupNorm", linen_residual),
    Program("flax nnx: convolution, BatchNorm in evaluation", nnx_batch_norm),
)

"""Networks of dense layers and attention."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen, nnx

from benchmarks.gallery_programs.program import EXAMPLES, Function, Program, normal


def haiku_mlp() -> tuple[Function, jax.Array]:
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([512, 512, 10])(x)))
    x = normal(0, EXAMPLES, 784)
    params = net.init(jax.random.key(0), x)
    return lambda x: net.apply(params, x), x


def haiku_transformer() -> tuple[Function, jax.Array]:
    def block(x: jax.Array) -> jax.Array:
        norm = lambda: hk.LayerNorm(-1, create_scale=True, create_offset=True)  # noqa: E731
        init = hk.initializers.VarianceScaling(1.0)
        h = norm()(x)
        x = x + hk.MultiHeadAttention(4, 32, w_init=init)(h, h, h)
        return x + hk.Linear(128)(jax.nn.gelu(hk.Linear(512)(norm()(x))))

    net = hk.without_apply_rng(hk.transform(lambda x: block(block(x))))
    x = normal(0, EXAMPLES, 32, 128)
    params = net.init(jax.random.key(0), x)
    return lambda x: net.apply(params, x), x


def equinox_mlp() -> tuple[Function, jax.Array]:
    net = eqx.nn.MLP(256, 10, 512, depth=2, key=jax.random.key(0))
    return jax.vmap(net), normal(0, EXAMPLES, 256)


class _Patches(eqx.Module):
    embed: eqx.nn.Linear
    attention: list[eqx.nn.MultiheadAttention]
    norms: list[eqx.nn.LayerNorm]
    mlps: list[eqx.nn.MLP]
    head: eqx.nn.Linear

    def __init__(self, width: int, depth: int, key: jax.Array) -> None:
        keys = iter(jax.random.split(key, 2 + 2 * depth))
        self.embed = eqx.nn.Linear(48, width, key=next(keys))
        self.attention = [eqx.nn.MultiheadAttention(4, width, key=next(keys)) for _ in range(depth)]
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2 * depth)]
        self.mlps = [eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=next(keys)) for _ in range(depth)]
        self.head = eqx.nn.Linear(width, 10, key=next(keys))

    def __call__(self, patches: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(patches)
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            h = jax.vmap(self.norms[2 * i])(x)
            x = x + attention(h, h, h)
            x = x + jax.vmap(mlp)(jax.vmap(self.norms[2 * i + 1])(x))
        return self.head(x.mean(0))


def equinox_vit() -> tuple[Function, jax.Array]:
    return jax.vmap(_Patches(128, 2, jax.random.key(0))), normal(0, EXAMPLES, 64, 48)


def linen_mlp() -> tuple[Function, jax.Array]:
    net = linen.Sequential([linen.Dense(512), linen.LayerNorm(), linen.silu, linen.Dense(10)])
    x = normal(0, EXAMPLES, 256)
    params = net.init(jax.random.key(0), x)
    return lambda x: net.apply(params, x), x


class _Encoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm_1, self.norm_2 = nnx.LayerNorm(128, rngs=rngs), nnx.LayerNorm(128, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 128, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(128, 512, rngs=rngs), nnx.Linear(512, 128, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


def nnx_transformer() -> tuple[Function, jax.Array]:
    return _Encoder(nnx.Rngs(0)), normal(0, EXAMPLES, 32, 128)


class _VAE(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encode, self.hidden = nnx.Linear(784, 256, rngs=rngs), nnx.Linear(32, 256, rngs=rngs)
        self.mean, self.log_var = nnx.Linear(256, 32, rngs=rngs), nnx.Linear(256, 32, rngs=rngs)
        self.decode = nnx.Linear(256, 784, rngs=rngs)

    def __call__(self, x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = nnx.relu(self.encode(x))
        mean, log_var = self.mean(h), self.log_var(h)
        z = mean + jnp.exp(0.5 * log_var) * jax.vmap(lambda k: jax.random.normal(k, (32,)))(key)
        kl = 0.5 * (jnp.exp(log_var) + mean**2 - 1 - log_var).sum(-1)
        return nnx.sigmoid(self.decode(nnx.relu(self.hidden(z)))), kl


def nnx_vae() -> tuple[Function, tuple[jax.Array, jax.Array]]:
    model = _VAE(nnx.Rngs(0))
    return lambda batch: model(*batch), (normal(0, EXAMPLES, 784), jax.random.split(jax.random.key(1), EXAMPLES))


PROGRAMS = (
    Program("haiku: MLP", haiku_mlp),
    Program("haiku: transformer, 2 blocks", haiku_transformer),
    Program("equinox: MLP", equinox_mlp),
    Program("equinox: vision transformer", equinox_vit),
    Program("flax linen: MLP with LayerNorm", linen_mlp),
    Program("flax nnx: transformer block", nnx_transformer),
    Program("flax nnx: variational autoencoder", nnx_vae),
)

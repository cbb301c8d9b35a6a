"""Equivariant networks of points."""

import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
from flax import linen

from benchmarks.gallery_programs.program import EXAMPLES, Function, Program, normal


def e3nn_harmonics() -> tuple[Function, jax.Array]:
    def features(points: jax.Array) -> jax.Array:
        return e3nn.spherical_harmonics("0e + 1o + 2e + 3o", e3nn.IrrepsArray("1o", points), normalize=True).array

    return features, normal(0, EXAMPLES, 32, 3)


class _Layer(linen.Module):
    @linen.compact
    def __call__(self, points: jax.Array) -> jax.Array:
        harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", e3nn.IrrepsArray("1o", points), normalize=True)
        x = e3nn.flax.Linear("8x0e + 8x0e + 8x1o + 4x2e")(harmonics)
        x = e3nn.tensor_product(x, harmonics, filter_ir_out=["0e", "1o", "2e"])
        x = e3nn.flax.Linear("16x0e + 8x0e + 8x1o")(x)
        return jnp.mean(e3nn.gate(x).array, -2)


def e3nn_layer() -> tuple[Function, jax.Array]:
    net, points = _Layer(), normal(0, EXAMPLES, 16, 3)
    params = net.init(jax.random.key(0), points)
    return lambda points: net.apply(params, points), points


PROGRAMS = (
    Program("e3nn: spherical harmonics", e3nn_harmonics),
    Program("e3nn: tensor product and gate", e3nn_layer),
)

"""Molecular dynamics."""

import jax
import jax.numpy as jnp
from jax_md import energy, simulate, space

from benchmarks.gallery_programs.program import EXAMPLES, Function, Program, normal


def jax_md_run() -> tuple[Function, tuple[jax.Array, jax.Array]]:
    displacement, shift = space.periodic(4.0)
    init, apply = simulate.nve(energy.lennard_jones_pair(displacement), shift, 2e-3)
    grid = jnp.stack(jnp.meshgrid(*[jnp.arange(4.0)] * 2), -1).reshape(16, 2)

    def run(key: jax.Array, moved: jax.Array) -> jax.Array:
        state = init(key, grid + moved, kT=0.5)
        return jax.lax.fori_loop(0, 20, lambda _, state: apply(state), state).position

    return lambda batch: jax.vmap(run)(*batch), (
        jax.random.split(jax.random.key(0), EXAMPLES),
        normal(0, EXAMPLES, 16, 2) / 20,
    )


PROGRAMS = (Program("jax_md: 20 steps of Lennard-Jones particles", jax_md_run),)

"""Matmul on the CPU: bijax against XLA's dot, in one run.

Shapes: K = N = 2048 and the layers of SmolLM2; the vocabulary projection multiplies by the transposed embedding.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import bijax
from benchmarks.harness import cell, interleaved_us, run

SHAPES = (
    (2048, 2048, False),
    (576, 576, False),
    (576, 192, False),
    (576, 1536, False),
    (1536, 576, False),
    (576, 49152, True),
)
ROWS = (1, 2, 8, 64, 512)


def measure(case: tuple[int, int, int, bool]) -> dict[str, Any]:
    m, k, n, transpose_w = case
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((m, k)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((n, k) if transpose_w else (k, n)), jnp.float32)
    dimensions = (((1,), (1 if transpose_w else 0,)), ((), ()))
    xla = jax.jit(lambda x, w: lax.dot_general(x, w, dimensions))
    ours = jax.jit(lambda x, w: bijax.matmul(x, w, transpose_w=transpose_w))
    xla_us, ours_us = interleaved_us([lambda: xla(x, w), lambda: ours(x, w)])
    return cell(ours_us, xla_us, m=m, k=k, n=n, transpose_w=transpose_w, dtype="float32")


if __name__ == "__main__":
    run("matmul_f32", [(m, k, n, t) for k, n, t in SHAPES for m in ROWS], measure)

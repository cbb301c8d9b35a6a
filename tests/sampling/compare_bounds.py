"""Compares bounds with scores in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.sampling.compare_bounds`."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.target import Target
from tests.arrays import on_device
from tests.jax_triton.interpreted import interpret_launches
from tests.jax_triton.interpreter_instructions import interpret_instructions
from tests.sampling.bounds_kernel import bounds_kernel


def compare(temperature: float) -> None:
    rng = np.random.default_rng(0)
    words = np.concatenate([rng.integers(0, 2**32, 5000), 2 ** np.arange(32), 2**32 - 2 ** np.arange(33)])
    given = jnp.asarray(words.astype(np.uint32))
    logits = on_device(rng.standard_normal(len(words)) * rng.choice([0, 1, 1e3, 1e30, np.inf], len(words)))
    scores = logits.astype(jnp.float32) / np.float32(temperature)
    results = launch(
        bounds_kernel,
        scores,
        given,
        len(words),
        target=Target.parse("sm_80"),
        out=[jax.ShapeDtypeStruct(scores.shape, jnp.float32)] * 2,
        grid=(-(-len(words) // 1024),),
        warps=4,
        stages=1,
        fuses=False,
        constants={"BLOCK": 1024},
    )
    bounds, sums = map(np.asarray, results)
    # Words without one of the 23 upper bits have no bound: infinity, or nan for a score of -infinity.
    least = 2**9
    unknown = np.isnan(bounds)
    assert not unknown[(words >= least) | (np.asarray(scores) > -np.inf)].any()
    assert (sums <= bounds)[~unknown].all()
    # Where it matters, at small words, the two are close, and yet apart; the lower bits are not in the bound.
    near = (words >= least) & (words < 2**24) & (abs(np.asarray(scores)) < 100)
    assert near.sum() > 10
    room = bounds[near] - sums[near]
    assert ((room > 0.001) & (room < 0.01 + least / words[near])).all()


if __name__ == "__main__":
    interpret_launches()
    interpret_instructions()
    for temperature in (1.0, 0.01, 1e4):
        compare(temperature)
    print("compared")

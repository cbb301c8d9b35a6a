"""Benchmarks use private parts of the library, so they would break unnoticed if no test ran them."""

from flax import nnx

import bijax
from benchmarks.bench_transform import building_s
from flax_layers import PLAIN, Llama
from tests.layers.small_llama import CONFIG


def test_building_a_block() -> None:
    model = Llama(CONFIG, ops=PLAIN, rngs=nnx.Rngs(0))
    assert set(building_s(model, bijax.invariant, times=1)) == {"trace_s", "lower_s", "compile_s"}

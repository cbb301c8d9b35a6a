"""Benchmarks reach into the library, so that they break unseen where nobody runs them."""

from pathlib import Path

import pytest
from flax import nnx

import bijax
from flax_layers import PLAIN, Llama
from tests.layers.small_llama import CONFIG

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_building_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from bench_transform import building_s

    model = Llama(CONFIG, ops=PLAIN, rngs=nnx.Rngs(0))
    assert set(building_s(model, bijax.invariant, times=1)) == {"trace_s", "lower_s", "compile_s"}

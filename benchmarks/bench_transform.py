"""The cost of `bijax.invariant` for a model in plain JAX: SmolLM2-135M, untouched and transformed.

A step decodes one token for each of B sequences that hold 64 tokens, as in `bench_decode.py`; the prefill computes
these 64 tokens. "bijax" is the same model on the library's own operations. All alternate in one run. Tracing and
compiling are timed once each, for the program of one block.
"""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bijax
from benchmarks.harness import cell, interleaved_us, run
from flax_layers import INVARIANT, PLAIN, Llama
from flax_layers.checkpoint import load_checkpoint, smollm2_path
from flax_layers.models._layered import LayeredModel, OfBlock, _extend

BATCHES = (1, 8, 64)
PROMPT, CAPACITY = 64, 128


def plain(function: Any) -> Any:
    return function


def steps(model: Llama, batch: int, transform: Any) -> tuple[Any, Any]:
    """Returns functions that decode one token for each of `batch` sequences, and that compute their prompts."""
    layers = LayeredModel(model, model.cache(batch=batch, capacity=CAPACITY))
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, PROMPT)).astype(np.int32)
    empty, held, one = np.zeros(batch, np.int32), np.full(batch, PROMPT, np.int32), np.ones(batch, np.int32)
    extend, choose = transform(layers.extend), transform(layers.choose)
    extend(tokens, empty, held)
    return lambda: choose(extend(tokens[:, :1], held, one)[:, 0]), lambda: extend(tokens, empty, held)


def building_s(model: Llama, transform: Any, times: int = 5) -> dict[str, float]:
    """Returns the least seconds of several runs to trace, lower and compile one block at batch 8, uncached.

    Products are compared with their reference once per process; that falls into the first time.
    """
    layers, taken = LayeredModel(model, model.cache(batch=8, capacity=CAPACITY)), []
    stream = jnp.zeros((8, 1, model.config.hidden_size)), None
    starts = jnp.zeros(8, jnp.int32)
    rotary = model.rotary(np.zeros((8, 1), np.int32))
    structure, parameters, _ = layers._layers.blocks[0]
    arguments = (structure, parameters, stream, rotary, layers._stored[0], None, starts, starts, None, None, OfBlock())
    for _ in range(times):
        jax.clear_caches()
        at = [time.perf_counter()]
        traced = transform(_extend).trace(*arguments, alone=True)
        at.append(time.perf_counter())
        lowered = traced.lower()
        at.append(time.perf_counter())
        lowered.compile()
        at.append(time.perf_counter())
        taken.append(np.diff(at))
    return {
        f"{name}_s": round(float(min(t[i] for t in taken)), 3) for i, name in enumerate(("trace", "lower", "compile"))
    }


def main() -> None:
    checkpoint = load_checkpoint(smollm2_path())
    untouched, own = (Llama.from_checkpoint(checkpoint, ops=ops) for ops in (PLAIN, INVARIANT))
    variants = {"transformed": (untouched, bijax.invariant), "bijax": (own, plain), "plain": (untouched, plain)}

    def measure(case: tuple[str, int]) -> dict[str, Any]:
        what, batch = case
        calls = [steps(model, batch, transform)[what == "prefill"] for model, transform in variants.values()]
        ours_us, own_us, plain_us = interleaved_us(calls, seconds=4)
        result = cell(ours_us, plain_us, what=what, batch=batch, dtype="float32")
        result["ratio_of_bijax_ops"] = round(plain_us / own_us, 3)
        if (what, batch) == ("decode", 8):
            result["building_one_block"] = {name: building_s(*variants[name]) for name in ("transformed", "plain")}
        return result

    run("transform_smollm2", [*(("decode", b) for b in BATCHES), ("prefill", 1)], measure)


if __name__ == "__main__":
    main()

"""Decoding SmolLM2-135M in float32: bijax against the same model on plain JAX, in one run.

A step computes one new token for each sequence: the blocks, the vocabulary projection, the log-probabilities and the
greedy choice. `generate` runs it for every token; the two models alternate. The peak memory of each is read in a
process of its own (Linux). Needs the extra `demo` and the wheel that `make bench` installs.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import cell, interleaved_us, run
from flax_layers import INVARIANT, PLAIN, Llama, generate
from flax_layers.checkpoint import load_checkpoint, smollm2_path
from flax_layers.models._layered import LayeredModel

BATCHES = (1, 2, 8)
PROMPT, CAPACITY = 64, 128
OPS = {"bijax": INVARIANT, "plain": PLAIN}


def step(model: Llama, batch: int) -> Any:
    """Returns a function that decodes one token for each of `batch` sequences that hold 64 tokens."""
    layers = LayeredModel(model, model.cache(batch=batch, capacity=CAPACITY))
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, PROMPT)).astype(np.int32)
    held, one = np.full(batch, PROMPT, np.int32), np.ones(batch, np.int32)
    layers.extend(tokens, np.zeros(batch, np.int32), held)
    return lambda: layers.choose(layers.extend(tokens[:, :1], held, one)[:, 0])


def peak_mib(name: str, batch: int) -> float:
    """Returns the peak memory of generating 16 tokens, from a process that does nothing else."""
    command = [sys.executable, "-m", "benchmarks.bench_decode", "--peak", name, str(batch)]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def print_peak(name: str, batch: int) -> None:
    model = Llama.from_checkpoint(load_checkpoint(smollm2_path()), ops=OPS[name])
    prompts = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, PROMPT)).tolist()
    generate(model, prompts, max_new_tokens=16)
    # Not getrusage: there a process starts with the peak of the one that started it.
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(int(line.split()[1]) / 1024)


def main() -> None:
    checkpoint = load_checkpoint(smollm2_path())
    models = {name: Llama.from_checkpoint(checkpoint, ops=ops) for name, ops in OPS.items()}

    def measure(batch: int) -> dict[str, Any]:
        ours_us, plain_us = interleaved_us([step(model, batch) for model in models.values()], seconds=8)
        result = cell(ours_us, plain_us, batch=batch, dtype="float32")
        result["ours_tokens_per_s"] = round(batch * 1e6 / ours_us, 1)
        result["plain_tokens_per_s"] = round(batch * 1e6 / plain_us, 1)
        ours, plain = (peak_mib(name, batch) for name in OPS)
        result["peak_memory_ratio"] = round(ours / plain, 3)
        return result

    run("decode_smollm2", BATCHES, measure)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        print_peak(sys.argv[2], int(sys.argv[3]))
    else:
        main()

"""A Llama of the 1B shape on a GPU: bijax's model and `bijax.invariant` around a plain one, beside the untouched one.

    PYTHONPATH=. python benchmarks/bench_model_gpu.py --layers 4

Steps are jitted and timed by the clock on the wall, in turns: decoding one token against a cache, a prompt, and the
gradient of the loss. Weights are random, the dtype is bfloat16. `ratio` is the time of the faster plain model, with
XLA's attention or cuDNN's, over ours; `transformed` is `bijax.invariant` around the plain model with XLA's attention,
`transformed_cudnn` around the one with cuDNN's, and their ratios are taken against the same models untouched.
"""

import argparse
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from harness import RESULTS, device_name, interleaved_us, record, show, write

import bijax
from flax_layers import INVARIANT, PLAIN, Llama
from flax_layers.checkpoint import LlamaConfig
from flax_layers.models.layers import KVCache
from flax_layers.ops import PlainOps

STEPS: Final = (
    ("decode", 1, 2048),
    ("decode", 8, 2048),
    ("decode", 64, 2048),
    ("prefill", 1, 2048),
    ("prefill", 4, 2048),
    ("gradient", 2, 512),
    ("gradient", 4, 2048),
)

THREADS: Final = 6
UNTOUCHED: Final = {"transformed": "xla", "transformed_cudnn": "cudnn"}


@dataclass(frozen=True)
class CudnnOps(PlainOps):
    """Stock JAX operations with cuDNN's attention."""

    def attention(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        start: jax.Array | None = None,
        lengths: jax.Array | None = None,
        **options: Any,
    ) -> jax.Array:
        if any(option is not None for option in options.values()):
            raise NotImplementedError(f"this model has plain attention, got {options}")
        if start is None or lengths is None:
            return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
        if query.shape[1] > 1:  # a whole prompt into an empty cache
            key, value = key[:, : query.shape[1]], value[:, : query.shape[1]]
            return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            query_seq_lengths=jnp.ones(query.shape[0], jnp.int32),
            key_value_seq_lengths=(start + lengths).astype(jnp.int32),
            implementation="cudnn",
        )


def config(layers: int, keys: int) -> LlamaConfig:
    """Returns the numbers of Llama-3.2-1B with fewer layers."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=keys,
        bos_token_id=None,
        eos_token_ids=(),
    )


Step = Callable[..., Any]


def steps(model: Llama, kind: str, batch: int, keys: int) -> tuple[Step, tuple[Any, ...]]:
    """Returns a function of arrays alone, and its arguments."""
    graph, state = nnx.split(model)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (batch, keys + 1)).astype(np.int32)
    if kind == "gradient":

        def loss(state: Any, tokens: jax.Array) -> jax.Array:
            scores = jax.nn.log_softmax(nnx.merge(graph, state)(tokens[:, :-1]), axis=-1)
            return -jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1).mean()

        return jax.value_and_grad(loss), (state, jnp.asarray(tokens))
    new = 1 if kind == "decode" else keys
    cache = replace(model.cache(batch=batch, capacity=keys), lengths=jnp.full(batch, keys - new, jnp.int32))

    def extend(state: Any, tokens: jax.Array, cache: KVCache) -> Any:
        logits, _ = nnx.merge(graph, state).extend(tokens, cache)
        return jnp.argmax(logits[:, -1], axis=-1)

    return extend, (state, jnp.asarray(tokens[:, :new]), cache)


def compiled(step: Step, arguments: tuple[Any, ...]) -> tuple[Callable[[], Any], int]:
    """Compiles a step; returns a call of it and its temporary memory in MiB."""
    program = jax.jit(step).lower(*arguments).compile()
    memory = program.memory_analysis()
    if memory is None:
        raise RuntimeError("expected XLA to say how much memory a program takes, got nothing.")
    return lambda: program(*arguments), round(memory.temp_size_in_bytes / 2**20)


def programs(kind: str, batch: int, keys: int, models: dict[str, Llama]) -> dict[str, tuple[Step, tuple[Any, ...]]]:
    """Returns the step of each model, and those under `bijax.invariant`."""
    found = {name: steps(model, kind, batch, keys) for name, model in models.items()}
    for name, plain in UNTOUCHED.items():
        step, arguments = found[plain]
        found[name] = (bijax.invariant(step), arguments)
    return found


def measure(kind: str, batch: int, keys: int, ready: dict[str, Future[Any]]) -> dict[str, Any]:
    """Returns one line of the table."""
    calls, memory = {}, {}
    for name, program in ready.items():
        calls[name], memory[name] = program.result()
    times = dict(zip(calls, interleaved_us(list(calls.values()), seconds=1, rounds=5), strict=True))
    plain = min(times["xla"], times["cudnn"])
    return {
        "step": kind,
        "batch": batch,
        "keys": keys,
        **{f"{name}_us": round(us, 1) for name, us in times.items()},
        "ratio": round(plain / times["own"], 3),
        **{f"{name}_ratio": round(times[plain] / times[name], 3) for name, plain in UNTOUCHED.items()},
        **{f"{name}_temp_mib": mib for name, mib in memory.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole models on a GPU.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    models = {}
    for name, ops in (("own", INVARIANT), ("xla", PLAIN), ("cudnn", CudnnOps())):
        model = Llama(
            config(arguments.layers, 2048), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, ops=ops, rngs=nnx.Rngs(0)
        )
        models[name] = model
    cells = []
    with ThreadPoolExecutor(THREADS) as pool:  # XLA tunes on the GPU while it compiles: before anything is timed
        ready = [
            {name: pool.submit(compiled, *program) for name, program in programs(*step, models).items()}
            for step in STEPS
        ]
    for step, row in zip(STEPS, ready, strict=True):
        cells.append(measure(*step, row))
        print(cells[-1], flush=True)
    result = record(f"model_llama_1b_{arguments.layers}_layers", cells)
    show(result)
    print(f"written to {write(result, arguments.json or RESULTS / f'model_bf16_{device_name()}.json')}")


if __name__ == "__main__":
    main()

"""The loss of a language model's last layer and its gradients on a GPU: time, memory and bits.

    python -m benchmarks.bench_loss_gpu

The cross entropy of float32 logits, with the gradients of the hidden states and of the vocabulary (V, K), as tied
embeddings are stored:

| name | is |
|---|---|
| fused | `bijax.linear_cross_entropy` |
| pair | `bijax.matmul` to float32 and `bijax.softmax_cross_entropy` |
| plain | JAX's product with `preferred_element_type=float32`, `log_softmax` and the label's entry |

`ratio` is the time of `plain` over that of `fused`, `pair_ratio` the same over that of `pair`. Memory is what XLA plans
in addition to arguments and results. Loss and both gradients of `fused` are compared with those of `pair` bit for bit.
"""

import argparse
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import bijax
from benchmarks.harness import add_json, interleaved_us, save, show

CASES: Final = ((2048, 2048, 128256), (8192, 2048, 128256), (8192, 4096, 128256), (16384, 2048, 32000))
"""Rows, width and words."""

Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def fused(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    return bijax.mean(bijax.linear_cross_entropy(x, w, labels, transpose_w=True))


def pair(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    logits = bijax.matmul(x, w, transpose_w=True, preferred_element_type=jnp.float32)
    return bijax.mean(bijax.softmax_cross_entropy(logits, labels))


def plain(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


LOSSES: Final[dict[str, Loss]] = {"fused": fused, "pair": pair, "plain": plain}


def run(rows: int, width: int, words: int) -> dict[str, Any]:
    """Returns a line of the table."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, width), jnp.bfloat16)
    w = jax.random.normal(keys[1], (words, width), jnp.bfloat16) * width**-0.5
    labels = jax.random.randint(keys[2], (rows,), 0, words)
    made = {n: jax.jit(jax.value_and_grad(f, (0, 1))).lower(x, w, labels).compile() for n, f in LOSSES.items()}
    bits = [jax.tree.map(lambda a: np.asarray(a).tobytes(), made[name](x, w, labels)) for name in ("fused", "pair")]
    calls = [lambda program=program: program(x, w, labels) for program in made.values()]
    times = interleaved_us(calls, seconds=1, rounds=3, settle=0.3)
    us = dict(zip(made, times, strict=True))
    line: dict[str, Any] = {"rows": rows, "width": width, "words": words, "same_bits": bits[0] == bits[1]}
    line |= {f"{name}_us": round(time, 1) for name, time in us.items()}
    line |= {"ratio": round(us["plain"] / us["fused"], 3), "pair_ratio": round(us["plain"] / us["pair"], 3)}
    for name, program in made.items():
        memory = program.memory_analysis()
        if memory is None:
            raise RuntimeError("expected XLA to say how much memory a program takes, got nothing.")
        line[f"{name}_mib"] = round(memory.temp_size_in_bytes / 2**20)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description="A loss over a vocabulary on a GPU.")
    add_json(parser)
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        rows.append(run(*case))
        print(rows[-1], flush=True)
    show("loss_bf16", rows)
    save("loss_bf16", rows, arguments.json)


if __name__ == "__main__":
    main()

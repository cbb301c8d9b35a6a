"""The gated delta rule on a GPU, compared with flash-linear-attention and with plain JAX.

    python -m benchmarks.bench_delta_rule_gpu --json FILE

Qwen3-Next's sizes: 16 key heads, 32 value heads, 128 wide, bfloat16. Device times of all kernels of a call (CUPTI).
`fla_us` is the chunked form of flash-linear-attention for prompts and its recurrence for decoding, both with the last
state; `plain_us` the same forms in plain JAX. `ratio` is `fla_us` over `ours_us`. In decoding, sequences stand at
different rows of their chunk; in the case "edges" all take their state over an edge, which happens once in 64 tokens.
Ours are the kernels through jax-triton.

flash-linear-attention tries its schedules at first, which takes a minute; TRITON_CACHE_DIR and
TRITON_CACHE_AUTOTUNING=1 keep what it found. All programs are compiled before, side by side. Each case is saved as soon
as it is measured.
"""

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bijax
from benchmarks.device_time import device_time_us
from benchmarks.harness import add_json, save
from flax_layers.ops.plain_linear_attention import PlainLinearAttention

KEY_HEADS: Final = 16
VALUE_HEADS: Final = 32
SIZE: Final = 128
PROMPTS: Final = ((1, 2048), (1, 8192), (4, 2048))
STEPS: Final = ((1, 1), (8, 1), (64, 1), (1, 4), (8, 4), (64, 4))
CALLS: Final = 12


def tokens(sequences: int, count: int) -> dict[str, jax.Array]:
    """Random tokens with keys and queries of length 1."""
    keys = jax.random.split(jax.random.key(0), 5)

    def normal(i: int, *shape: int) -> jax.Array:
        return jax.random.normal(keys[i], (sequences, count, *shape))

    q, k = (bijax.l2_norm(normal(i, KEY_HEADS, SIZE)).astype(jnp.bfloat16) for i in range(2))
    g, beta = -jnp.exp(normal(3, VALUE_HEADS) * 1.5 - 3), jax.nn.sigmoid(normal(4, VALUE_HEADS))
    return {"query": q, "key": k, "value": normal(2, VALUE_HEADS, SIZE).astype(jnp.bfloat16), "g": g, "beta": beta}


class Case(NamedTuple):
    """What is timed: its name, sizes, and for each library a call."""

    what: str
    sequences: int
    tokens: int
    calls: dict[str, Callable[[], Any]]

    def times(self) -> dict[str, Any]:
        found = {f"{name}_us": device_time_us(call, [()], CALLS) for name, call in self.calls.items()}
        return {"what": self.what, "sequences": self.sequences, "tokens": self.tokens, **found}


def prompt(sequences: int, count: int) -> Case:
    x = tokens(sequences, count)
    ours = jax.jit(bijax.gated_delta_rule).lower(**x).compile()
    plain = jax.jit(PlainLinearAttention().gated_delta_rule).lower(**x).compile()
    return Case("prefill", sequences, count, {"ours": lambda: ours(**x), "plain": lambda: plain(**x)})


def extended(sequences: int, rows: np.ndarray) -> bijax.DeltaRuleState:
    """The state of sequences with as many tokens."""
    empty = bijax.DeltaRuleState.zeros(
        sequences,
        key_heads=KEY_HEADS,
        value_heads=VALUE_HEADS,
        key_size=SIZE,
        value_size=SIZE,
        dtype="bfloat16",
    )
    return jax.jit(bijax.gated_delta_rule_extend)(**tokens(sequences, 64), state=empty, lengths=rows)[1]


def in_place(x: dict[str, jax.Array], state: bijax.DeltaRuleState) -> Callable[[], Any]:
    """Returns a call that computes the same tokens at the same positions each time, in arrays that are donated."""

    def step(arrays: Any, edge: jax.Array, length: jax.Array, x: dict[str, jax.Array]) -> Any:
        y, new = bijax.gated_delta_rule_extend(**x, state=bijax.DeltaRuleState(*arrays, edge, length))
        return y, (new.state, new.key, new.residual, new.inverse, new.decay)

    held = [(state.state, state.key, state.residual, state.inverse, state.decay)]
    compiled = jax.jit(step, donate_argnums=0).lower(held[0], state.edge, state.length, x).compile()

    def call() -> jax.Array:
        y, held[0] = compiled(held[0], state.edge, state.length, x)
        return y

    return call


def recurrent(state: jax.Array, x: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The rule token by token in plain JAX."""

    def step(s: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = token
        q, k = (jnp.repeat(a.astype(jnp.float32), VALUE_HEADS // KEY_HEADS, 1) for a in (q, k))
        s = s * jnp.exp(g)[..., None, None]
        u = beta[..., None] * (v - jnp.einsum("bhd,bhdv->bhv", k, s))
        s = s + k[..., None] * u[:, :, None]
        return s, jnp.einsum("bhd,bhdv->bhv", q, s) * SIZE**-0.5

    along = tuple(jnp.moveaxis(x[name], 1, 0) for name in ("query", "key", "value", "g", "beta"))
    state, y = jax.lax.scan(step, state, along)
    return jnp.moveaxis(y, 0, 1).astype(jnp.bfloat16), state


def plain_step(x: dict[str, jax.Array], state: jax.Array) -> Callable[[], Any]:
    compiled = jax.jit(recurrent, donate_argnums=0).lower(state, x).compile()
    held = [state]

    def call() -> jax.Array:
        y, held[0] = compiled(held[0], x)
        return y

    return call


def decode(sequences: int, count: int, *, edges: bool = False) -> Case:
    x = tokens(sequences, count)
    mixed = np.arange(sequences) * 37 % 55 + 1 if sequences > 1 else np.array([30])
    state = extended(sequences, np.full(sequences, 64) if edges else mixed)
    calls = {"plain": plain_step(x, jnp.array(state.state)), "ours": in_place(x, state)}
    return Case("decode, edges" if edges else "decode", sequences, count, calls)


def fla_times() -> dict[str, float]:
    """Returns the times of flash-linear-attention by case, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.fla_delta_rule", json.dumps(PROMPTS), json.dumps(STEPS)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"flash-linear-attention did not run: {run.stderr[-2000:]}")
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="The gated delta rule on a GPU.")
    add_json(parser)
    arguments = parser.parse_args()
    made = [functools.partial(prompt, *sizes) for sizes in PROMPTS]
    made += [functools.partial(decode, *sizes) for sizes in STEPS]
    made.append(functools.partial(decode, 64, 1, edges=True))
    with ThreadPoolExecutor() as pool:
        cases = list(pool.map(lambda case: case(), made))
    fla = fla_times()
    for case in cases:
        cell = case.times()
        times = {name: round(cell[name], 2) for name in ("ours_us", "plain_us")}
        theirs = fla[f"{case.what.partition(',')[0]} {case.sequences}x{case.tokens}"]
        cell |= {**times, "fla_us": round(theirs, 2), "ratio": round(theirs / times["ours_us"], 3)}
        print(cell, flush=True)
        save("delta_rule_bf16", [cell], arguments.json)


if __name__ == "__main__":
    main()

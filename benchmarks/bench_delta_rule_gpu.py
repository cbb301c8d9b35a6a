"""The gated delta rule on a GPU, compared with flash-linear-attention and with plain JAX.

    python -m benchmarks.bench_delta_rule_gpu --json FILE

Qwen3-Next's sizes: 16 key heads, 32 value heads, 128 wide, bfloat16. Device times of all kernels of a call (CUPTI).
`fla_us` is the chunked form of flash-linear-attention for prompts and its recurrence for decoding, both with the last
state; `plain_us` the same forms in plain JAX. `ratio` is `fla_us` over `ours_us`. In decoding, sequences stand at
different rows of their chunk; in the case "edges" all take their state over an edge, which happens once in 64 tokens.
"backward" is the gradients alone ("plain_us" has the outputs too), "training" outputs and gradients. Where
flash-linear-attention refuses its gradients, as with Triton 3.6 on Hopper, `fla_us` and `ratio` are missing.
Gradients of a batch are first compared with those of its sequences alone. Ours are the kernels for GPUs: Mosaic's on
Hopper where there are such, Triton's elsewhere.

flash-linear-attention tries its schedules at first, which takes a minute; TRITON_CACHE_DIR and
TRITON_CACHE_AUTOTUNING=1 keep what it found. Triton's compiler holds Python's lock, so programs are lowered in
processes of their own, at the same time. Each case is saved as soon as it is measured.
"""

import argparse
import functools
import json
import multiprocessing
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import bijax
from benchmarks.device_time import device_time_us
from benchmarks.harness import add_json, save
from bijax.dispatch.delta_rule import delta_rule_gradients_kernel
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
    """What is timed: its name and sizes."""

    what: str
    sequences: int
    tokens: int

    @property
    def is_decoding(self) -> bool:
        return self.what.startswith("decode")

    @property
    def function(self) -> Callable[..., Any]:
        """What is timed of ours."""
        return {"prefill": outputs, "backward": gradients, "training": trained}.get(self.what, step)

    def arguments(self) -> tuple[Any, ...]:
        x = tokens(self.sequences, self.tokens)
        if self.what == "prefill":
            return (x,)
        if self.is_decoding:
            return (*continued(self), x)
        chunks = -(-self.tokens // 64) if self.what == "backward" else 0
        edges = jax.random.normal(jax.random.key(3), (self.sequences, chunks, VALUE_HEADS, SIZE, SIZE)) * 0.1
        return x, x["value"][:, ::-1], *([edges] if chunks else [])

    def lowered(self) -> bytes:
        """Returns our program, with its kernels."""
        names = ("triton_kernel_call", "triton_kernel_call_ffi", "__gpu$xla.gpu.ptx", "mosaic_gpu_v2", "mosaic_gpu")
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in names]
        program = export.export(jax.jit(self.function), disabled_checks=checks)(*jax.eval_shape(self.arguments))
        return bytes(program.serialize())

    def ours(self, lowered: bytes) -> Callable[[], Any]:
        """Returns a call of our program."""
        function, given = export.deserialize(bytearray(lowered)).call, self.arguments()
        if not self.is_decoding:
            compiled = jax.jit(function).lower(*given).compile()
            return lambda: compiled(*given)
        compiled = jax.jit(function, donate_argnums=0).lower(*given).compile()
        kept, *rest = given
        return in_place(lambda kept: compiled(kept, *rest), kept)

    def plain(self) -> Callable[[], Any]:
        """Returns a call of plain JAX."""
        x = tokens(self.sequences, self.tokens)
        if self.what == "prefill":
            plain = jax.jit(PlainLinearAttention().gated_delta_rule).lower(**x).compile()
            return lambda: plain(**x)
        if not self.is_decoding:
            rule = PlainLinearAttention().gated_delta_rule
            given = x, x["value"][:, ::-1]
            both = jax.jit(functools.partial(trained, rule=rule)).lower(*given).compile()
            return lambda: both(*given)
        state = jax.random.normal(jax.random.key(1), (self.sequences, VALUE_HEADS, SIZE, SIZE)) * 0.1
        compiled = jax.jit(recurrent, donate_argnums=0).lower(state, x).compile()
        return in_place(lambda state: compiled(state, x), state)


CASES: Final = (
    *[Case("prefill", *sizes) for sizes in PROMPTS],
    *[Case("decode", *sizes) for sizes in STEPS],
    Case("decode, edges", 64, 1),
    *[Case(what, *sizes) for what in ("backward", "training") for sizes in PROMPTS],
)


Kept = tuple[jax.Array, ...]


def continued(case: Case) -> tuple[Kept, jax.Array, jax.Array]:
    """Returns what sequences keep, their edges, and their lengths."""
    b, keys = case.sequences, jax.random.split(jax.random.key(2), 4)
    rows = np.arange(b) * 37 % 55 + 1 if b > 1 else np.array([30])
    if case.what == "decode, edges":
        rows = np.full(b, 64)

    def normal(i: int, *shape: int) -> jax.Array:
        return jax.random.normal(keys[i], (b, *shape))

    inverse = jnp.tril(normal(3, VALUE_HEADS, 64, 64) * 0.1, -1) + jnp.eye(64)
    kept = (
        normal(0, VALUE_HEADS, SIZE, SIZE) * 0.1,
        bijax.l2_norm(normal(1, KEY_HEADS, 64, SIZE)).astype(jnp.bfloat16),
        normal(2, VALUE_HEADS, 64, SIZE).astype(jnp.bfloat16),
        inverse.astype(jnp.bfloat16).astype(jnp.float32),
        jnp.broadcast_to(jnp.arange(64) * -0.1, (b, VALUE_HEADS, 64)),
    )
    return kept, jnp.zeros(b, jnp.int32), jnp.asarray(rows, jnp.int32)


def step(kept: Kept, edge: jax.Array, length: jax.Array, x: dict[str, jax.Array]) -> tuple[jax.Array, Kept]:
    """Computes tokens of sequences, always at the same positions."""
    y, new = bijax.gated_delta_rule_extend(**x, state=bijax.DeltaRuleState(*kept, edge, length))
    return y, (new.state, new.key, new.residual, new.inverse, new.decay)


def in_place(step: Callable[[Any], tuple[Any, Any]], held: Any) -> Callable[[], Any]:
    """Returns a call of a step that takes what the call before returned, in arrays that are donated."""
    now = [held]

    def call() -> Any:
        y, now[0] = step(now[0])
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


def outputs(x: dict[str, jax.Array]) -> Any:
    """Computes prompts."""
    return bijax.gated_delta_rule(**x)


def trained(x: dict[str, jax.Array], cotangent: jax.Array, rule: Any = bijax.gated_delta_rule) -> Any:
    """Computes outputs, and the gradients of tokens."""
    y, of = jax.vjp(lambda x: rule(**x)[0], x)
    return y, of(cotangent)


def gradients(x: dict[str, jax.Array], cotangent: jax.Array, edges: jax.Array) -> Any:
    """Computes gradients from the states at the edges, which the forward pass keeps."""
    lengths = jnp.full(cotangent.shape[0], cotangent.shape[1], jnp.int32)
    none = jnp.zeros((cotangent.shape[0], *edges.shape[2:]))
    arrays = [x[name] for name in ("query", "key", "value", "g", "beta")]
    return delta_rule_gradients_kernel(*arrays, edges, lengths, cotangent, none, scale=SIZE**-0.5)


def check_gradients(programs: dict[Case, bytes]) -> None:
    """Compares the gradients of sequences with those that each of them has alone.

    Raises:
        RuntimeError: If a number differs.
    """
    batch, one = Case("training", 4, 2048), Case("training", 1, 2048)
    run, alone = (jax.jit(export.deserialize(bytearray(programs[case])).call) for case in (batch, one))
    given, compared = batch.arguments(), 0
    together = jax.tree.leaves(run(*given))
    for i in range(batch.sequences):
        one_of = alone(*jax.tree.map(operator.itemgetter(slice(i, i + 1)), given))
        for ours, single in zip(together, jax.tree.leaves(one_of), strict=True):
            kind = f"u{ours.dtype.itemsize}"
            if (np.asarray(ours[i]).view(kind) != np.asarray(single[0]).view(kind)).any():
                raise RuntimeError(f"Gradients of sequence {i} depend on the others.")
            compared += single.size
    print(f"{compared} numbers of outputs and gradients of sequences alone and in a batch: 0 differ", flush=True)


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
    kinds = sorted({case.what for case in CASES})
    parser.add_argument("--only", nargs="*", default=kinds, choices=kinds, help="the kinds of cases to measure")
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.what in arguments.only]
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other processes have the GPU too
    workers = min(len(cases), os.cpu_count() or 1)
    with ThreadPoolExecutor() as threads, ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as others:
        fla = threads.submit(fla_times)
        programs = list(others.map(Case.lowered, cases))
        theirs = fla.result()  # until now nothing else has run on the GPU
        if "training" in arguments.only:
            check_gradients(dict(zip(cases, programs, strict=True)))
        ours = list(threads.map(Case.ours, cases, programs))
        plain = list(threads.map(Case.plain, cases))
    for case, *calls in zip(cases, ours, plain, strict=True):
        ours_us, plain_us = (round(device_time_us(call, [()], CALLS), 2) for call in calls)
        cell = {**case._asdict(), "ours_us": ours_us, "plain_us": plain_us}
        fla_us = theirs.get(f"{case.what.partition(',')[0]} {case.sequences}x{case.tokens}")
        if fla_us is not None:
            cell |= {"fla_us": round(fla_us, 2), "ratio": round(fla_us / ours_us, 3)}
        print(cell, flush=True)
        save("delta_rule_bf16", [cell], arguments.json)


if __name__ == "__main__":
    main()

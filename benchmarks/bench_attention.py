"""Attention on a Hopper GPU, through the public functions: cuDNN's (`jax.nn`) and ours in the same run.

    python -m benchmarks.bench_attention
    python -m benchmarks.bench_attention --backend jax_triton

Prefill is a whole batch of equal lengths, also "with gradients" (the forward and the backward pass), decode one query
of each sequence against its cache, also from pages of 64 keys in any order and from a cache of int8. The ratio of a row
with gradients is to cuDNN as JAX calls it, whose sums come in any order; `deterministic_us` is cuDNN's time with
`xla_gpu_deterministic_ops`. `one_split_us` is the time of our own prefill where all keys are one split, as decode could
not have them: what its splits cost prefill. Times are device times of all kernels of a call (CUPTI), medians of
alternating calls; calls cycle through sets of arguments that together do not fit into the L2 cache. `rate` is TFLOP/s
of the products that the mask leaves, or TB/s of keys and values. Through jax-triton decode also has few sequences and
few keys, where splits, blocks and columns have programs of their own, and there are heads of 256.
"""

import argparse
import functools
import math
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bijax
from benchmarks.device_time import device_time_us
from benchmarks.harness import add_json, cell, save
from pallas_kernels.attention.call import AttentionCall, AttentionOptions
from pallas_kernels.attention.hopper.launch import attention
from pallas_kernels.contract import SplitAttentionContract

ROTATED_BYTES: Final = 150_000_000  # several times the L2 cache
THREADS: Final = 12
ROUNDS: Final = 3
PAGE: Final = 64
DETERMINISTIC: Final = "deterministic"
PAGED: Final = "paged"
INT8: Final = "int8"
ONE_SPLIT: Final = "one_split"
HOPPER: Final = "hopper"


class Case(NamedTuple):
    """One line of the table: B sequences of T queries and S keys, N query heads, K key heads, heads of width H."""

    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    size: int
    causal: bool = True
    gradients: bool = False

    @property
    def decodes(self) -> bool:
        """Whether the query is the last token of its sequence, which sees all keys."""
        return self.queries == 1

    @property
    def cache(self) -> tuple[int, ...]:
        """The shape of keys and of values."""
        return self.batch, self.keys, self.key_heads, self.size

    @property
    def work(self) -> float:
        """Operations of the products, or bytes of keys and values."""
        if self.decodes:
            return 4 * math.prod(self.cache)
        seen = self.keys * (self.keys + 1) / 2 if self.causal else self.queries * self.keys
        products = 7 if self.gradients else 2  # the backward pass computes the scores once more
        return 2 * products * self.batch * self.heads * self.size * seen


PREFILL: Final = tuple(
    Case(batch, length, length, heads, key_heads, size, causal)
    for batch, length, heads, key_heads, size in (
        (8, 1024, 32, 8, 128),
        (4, 4096, 32, 8, 128),
        (2, 16384, 16, 4, 128),
        (1, 32768, 16, 2, 128),
        (8, 1024, 32, 8, 64),
        (4, 4096, 32, 8, 64),
        (2, 16384, 16, 4, 64),
    )
    for causal in (True, False)
)

GRADIENTS: Final = tuple(
    case._replace(gradients=True) for case in PREFILL if case.keys <= 16384 and (case.causal or case.keys == 4096)
)

DECODE: Final = tuple(
    Case(batch, 1, keys, 32, 8, size)
    for batch, keys, size in (
        (1, 8192, 128),
        (1, 32768, 128),
        (1, 131072, 128),
        (16, 8192, 128),
        (64, 4096, 128),
        (128, 2048, 128),
        (1, 131072, 64),
        (64, 4096, 64),
        (128, 2048, 64),
    )
)

FEW_KEYS: Final = tuple(
    Case(batch, 1, keys, 32, 8, 128)
    for batch, keys in ((1, 1024), (1, 2048), (8, 2048), (8, 8192), (8, 32768), (64, 8192))
)

WIDE: Final = {
    "prefill": tuple(
        Case(b, keys, keys, 16, 4, 256, causal) for b, keys in ((2, 2048), (1, 8192)) for causal in (True, False)
    ),
    "decode": tuple(Case(b, 1, 2048, 16, 4, 256) for b in (1, 64)),
    "gradients": (),
}
"""Heads of 256, through jax-triton."""

KINDS: Final = {"prefill": PREFILL, "gradients": GRADIENTS, "decode": DECODE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_json(parser)
    parser.add_argument("--only", choices=[*KINDS], help="one part of the table")
    parser.add_argument("--backend", choices=(HOPPER, "jax_triton"), default=HOPPER, help="whose kernels are ours")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"bench_attention needs a Hopper GPU, this process runs on {jax.default_backend()}: nothing measured")
        return
    backend = arguments.backend
    kinds = KINDS
    if backend != HOPPER:
        kinds = {kind: part + WIDE[kind] for kind, part in (KINDS | {"decode": DECODE + FEW_KEYS}).items()}
    cases = [case for kind, part in kinds.items() if arguments.only in (None, kind) for case in part]
    with ThreadPoolExecutor(THREADS) as pool:
        pending = [
            {name: pool.submit(compiled, case, name, backend) for name in programs(case, backend)} for case in cases
        ]
        ready = [{name: program.result() for name, program in row.items()} for row in pending]
    cells = [measure(case, row) for case, row in zip(cases, ready, strict=True)]
    save("attention_bf16" + ("" if backend == HOPPER else f"_{backend}"), cells, arguments.json)


def programs(case: Case, backend: str) -> dict[str, Any]:
    """Returns cuDNN's program and ours.

    For decode also from pages and int8, for gradients the deterministic one, for prefill on Hopper's kernels that with
    one split.
    """
    stock = functools.partial(
        jax.nn.dot_product_attention, is_causal=case.causal and not case.decodes, implementation="cudnn"
    )
    if not case.decodes:
        ours = functools.partial(bijax.dot_product_attention, is_causal=case.causal)
        if not case.gradients:
            found: dict[str, Any] = {"cudnn": stock, "ours": ours}
            splits = backend == HOPPER and case.keys > SplitAttentionContract().split
            return found | ({ONE_SPLIT: one_split(case)} if splits else {})
        return {name: with_gradients(f) for name, f in (("cudnn", stock), ("ours", ours), (DETERMINISTIC, stock))}
    last = functools.partial(bijax.dot_product_attention, is_causal=True, query_offset=case.keys - 1)

    def paged(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array) -> jax.Array:
        keys, values = (x.reshape(-1, PAGE, *x.shape[2:]) for x in (k, v))
        return bijax.paged_attention(q, keys, values, table, case.keys)

    def int8(q: jax.Array, k: jax.Array, v: jax.Array, factors: jax.Array) -> jax.Array:
        return last(q, k, v, key_scale=factors, value_scale=factors)

    return {"cudnn": stock, "ours": last, PAGED: paged, INT8: int8}


def one_split(case: Case) -> Callable[..., jax.Array]:
    """Returns our prefill under a contract whose splits are longer than the case's keys."""
    contract = SplitAttentionContract(split=1 << 20)
    limits = np.tile(np.array([[0, case.queries, case.keys]], np.int32), (case.batch, 1))

    def program(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        options = AttentionOptions(case.size**-0.5, case.causal)
        return attention(AttentionCall(q, k, v, jnp.asarray(limits), options), contract=contract)[0]

    return program


def with_gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns a function of queries, keys, values and cotangents that gives the result and the three gradients."""

    def both(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> Any:
        out, pull = jax.vjp(function, q, k, v)
        return out, pull(g)

    return both


def shapes_of(case: Case) -> list[tuple[int, ...]]:
    queries = (case.batch, case.queries, case.heads, case.size)
    return [queries, case.cache, case.cache, *([queries] if case.gradients else [])]


def compiled(case: Case, name: str, backend: str) -> Any:
    shapes = shapes_of(case)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    if name == PAGED:
        arrays.append(jax.ShapeDtypeStruct((case.batch, case.keys // PAGE), jnp.int32))
    if name == INT8:
        arrays[1:] = [jax.ShapeDtypeStruct(case.cache, jnp.int8)] * 2
        arrays.append(jax.ShapeDtypeStruct((case.key_heads, case.size), jnp.float32))
    options = {"xla_gpu_deterministic_ops": True} if name == DETERMINISTIC else None
    with bijax.prefer_backend(backend):
        return jax.jit(programs(case, backend)[name]).lower(*arrays).compile(options)


def measure(case: Case, ready: dict[str, Any]) -> dict[str, Any]:
    sets = max(1, min(4, math.ceil(ROTATED_BYTES / (4 * math.prod(case.cache))))) if case.decodes else 1
    pages = case.batch * (case.keys // PAGE)
    table = jnp.asarray(np.random.default_rng(0).permutation(pages).reshape(case.batch, -1), jnp.int32)
    shapes = shapes_of(case)
    data = [tuple(array(4 * i + j, shape) for j, shape in enumerate(shapes)) for i in range(sets)]
    given = dict.fromkeys(ready, data)
    if case.decodes:
        given[PAGED] = [(*x, table) for x in data]
        factors = jnp.ones((case.key_heads, case.size))
        given[INT8] = [(q, *((32 * x).astype(jnp.int8) for x in (k, v)), factors) for q, k, v in data]
    calls = 8 if case.decodes else max(3, min(8, int(2e13 / case.work)))
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(ROUNDS):
        for name, program in ready.items():
            times[name].append(device_time_us(program, given[name], calls))
    us = {name: statistics.median(found) for name, found in times.items()}
    rate = case.work / us["ours"] / 1e6
    what = "decode" if case.decodes else "causal" if case.causal else "full"
    what += " with gradients" if case.gradients else ""
    extra = {f"{name}_us": round(us[name], 2) for name in (PAGED, INT8, DETERMINISTIC, ONE_SPLIT) if name in us}
    shape = {
        "batch": case.batch,
        "keys": case.keys,
        "heads": case.heads,
        "key_heads": case.key_heads,
        "size": case.size,
    }
    found = cell(us["ours"], us["cudnn"], what=what, **shape, rate=round(rate, 2), **extra)
    print(
        f"{what:21s} {shape!s:86s} cudnn {us['cudnn']:9.2f} us  ours {us['ours']:9.2f} us  ratio {found['ratio']:.3f}"
        f"  {rate:7.2f}  {extra or ''}",
        flush=True,
    )
    return found


def array(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


if __name__ == "__main__":
    main()

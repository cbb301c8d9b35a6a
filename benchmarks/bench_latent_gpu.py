"""Latent attention (DeepSeek's MLA) on a GPU, against the speed of a copy, counted work, and plain JAX.

    python -m benchmarks.bench_latent_gpu

Latents of 512 + 64 columns, bfloat16, from one array or from pages. Device times of all kernels of a call (CUPTI);
calls of decoding cycle through sets of arguments that together do not fit into the L2 cache.

| field | is |
|---|---|
| `copy` | decoding: bytes of all latents in `ours_us`, over those that a copy reads and writes in that time |
| `counted` | prompts: `ours_us` over the time of the products at the rate of cuDNN's causal attention in the same run |
| `rate` | TFLOP/s of the products that the mask leaves |
| `plain_us` | the same formula in plain JAX, where all scores fit into 8 GiB |
| `ratio` | `plain_us` over `ours_us` |

cuDNN's attention (`jax.nn.dot_product_attention`) has as many heads, of 128 columns, and as many queries. The last
queries of sequences are first compared with the same ones alone, bit for bit.
"""

import argparse
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bijax
from benchmarks.device_time import copy_bytes_per_us, in_turns_us
from benchmarks.harness import add_json, save, show

VALUES: Final = 512
WIDTH: Final = VALUES + 64
SCALE: Final = 192**-0.5
CUDNN_SIZE: Final = 128
PAGE: Final = 64
ROTATED_BYTES: Final = 150_000_000  # several times the L2 cache
SCORES_LIMIT: Final = 1 << 33
CALLS: Final = 12

Program = Callable[..., jax.Array]


class Case(NamedTuple):
    """What is timed: B sequences of T queries with N heads and S latents."""

    what: str
    sequences: int
    queries: int
    heads: int
    latents: int

    @property
    def decodes(self) -> bool:
        return self.queries == 1

    @property
    def latent_bytes(self) -> int:
        return self.sequences * self.latents * WIDTH * 2

    @property
    def score_bytes(self) -> int:
        return 4 * self.sequences * self.heads * self.queries * self.latents

    @property
    def seen(self) -> float:
        """Pairs of a query's head and a latent that the mask leaves."""
        return self.sequences * self.heads * (self.latents if self.decodes else self.latents * (self.latents + 1) / 2)

    def arguments(self, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, latents, and the position of the first query."""
        keys = jax.random.split(jax.random.key(seed), 2)
        query = jax.random.normal(keys[0], (self.sequences, self.queries, self.heads, WIDTH), jnp.bfloat16)
        latents = jax.random.normal(keys[1], (self.sequences, self.latents, WIDTH), jnp.bfloat16)
        return query, latents, jnp.full(self.sequences, self.latents - self.queries, jnp.int32)

    def ours(self, query: jax.Array, latents: jax.Array, offset: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"value_size": VALUES, "scale": SCALE, "query_offset": offset}
        if "pages" not in self.what:
            return bijax.latent_attention(query, latents, **options)
        pages = latents.reshape(-1, PAGE, WIDTH)
        table = jnp.arange(len(pages), dtype=jnp.int32).reshape(len(latents), -1)
        return bijax.paged_latent_attention(query, pages, table, offset + 1, **options)

    def programs(self) -> dict[str, Program]:
        """Compiles our program, and the others that this case is compared with."""
        given = jax.eval_shape(self.arguments)
        functions: dict[str, Program] = {"ours": self.ours}
        if self.score_bytes <= SCORES_LIMIT:
            functions["plain"] = plain
        made: dict[str, Program] = {name: jax.jit(f).lower(*given).compile() for name, f in functions.items()}
        token = self._replace(sequences=1, queries=1)
        made["token"] = jax.jit(token.ours).lower(*jax.eval_shape(token.arguments)).compile()
        if not self.decodes:
            heads = jax.ShapeDtypeStruct((self.sequences, self.queries, self.heads, CUDNN_SIZE), jnp.bfloat16)
            made["cudnn"] = jax.jit(cudnn).lower(heads).compile()
        return made


CASES: Final = (
    *[Case("decode", b, 1, heads, 4096) for heads in (16, 128) for b in (1, 8, 64)],
    *[Case("decode, pages of 64", 64, 1, heads, 4096) for heads in (16, 128)],
    *[Case("prefill", 1, length, heads, length) for heads in (16, 128) for length in (2048, 8192)],
)


def plain(query: jax.Array, latents: jax.Array, offset: jax.Array) -> jax.Array:
    """The formula in plain JAX."""
    scores = jnp.einsum("btnw,bsw->bnts", query, latents, preferred_element_type=jnp.float32) * SCALE
    positions = offset[:, None] + jnp.arange(query.shape[1])
    is_seen = jnp.arange(latents.shape[1]) <= positions[..., None]
    weights = jax.nn.softmax(jnp.where(is_seen[:, None], scores, -jnp.inf), -1).astype(query.dtype)
    return jnp.einsum("bnts,bsv->btnv", weights, latents[..., :VALUES])


def cudnn(x: jax.Array) -> jax.Array:
    """Causal attention by cuDNN."""
    return jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn")


def check(case: Case, together: Program, token: Program) -> int:
    """Compares the last queries of sequences with the same ones alone; returns how many numbers were compared.

    Raises:
        RuntimeError: If a number differs.
    """
    query, latents, offset = case.arguments()
    found, compared = np.asarray(together(query, latents, offset)[:, -1]).view(np.uint16), 0
    for i in range(0, case.sequences, math.ceil(case.sequences / 4)):
        one = slice(i, i + 1)
        single = np.asarray(token(query[one, -1:], latents[one], offset[one] + case.queries - 1)).view(np.uint16)
        if (found[i] != single[0, 0]).any():
            raise RuntimeError(f"The last query of sequence {i} of {case} depends on the other queries.")
        compared += single.size
    return compared


def measure(case: Case, programs: dict[str, Program], copy: float) -> dict[str, Any]:
    """Returns a cell.

    Args:
        case: What is timed.
        programs: What `Case.programs` compiled.
        copy: The bytes that a copy reads and writes in a µs.
    """
    sets = [case.arguments(i) for i in range(math.ceil(ROTATED_BYTES / case.latent_bytes) if case.decodes else 1)]
    timed = {name: programs[name] for name in ("ours", "plain") if name in programs}
    us = dict(zip(timed, in_turns_us(list(timed.values()), sets, CALLS), strict=True))
    work = 2 * (WIDTH + VALUES) * case.seen
    cell = {**case._asdict(), "ours_us": round(us["ours"], 2), "rate": round(work / us["ours"] / 1e6, 1)}
    if case.decodes:
        cell["copy"] = round(case.latent_bytes / copy / us["ours"], 3)
    else:
        x = jax.random.normal(jax.random.key(0), (case.sequences, case.queries, case.heads, CUDNN_SIZE), jnp.bfloat16)
        [cudnn_us] = in_turns_us([programs["cudnn"]], [(x,)], CALLS)
        cell["counted"] = round(us["ours"] / (cudnn_us * work / (4 * CUDNN_SIZE * case.seen)), 3)
    if "plain" in us:
        cell |= {"plain_us": round(us["plain"], 2), "ratio": round(us["plain"] / us["ours"], 3)}
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description="Latent attention on a GPU.")
    add_json(parser)
    arguments = parser.parse_args()
    with ThreadPoolExecutor() as threads:
        programs = list(threads.map(Case.programs, CASES))
    compared = sum(check(case, made["ours"], made["token"]) for case, made in zip(CASES, programs, strict=True))
    print(f"{compared} numbers of queries alone and together: 0 differ", flush=True)
    copy = copy_bytes_per_us()
    cells = []
    for case, made in zip(CASES, programs, strict=True):
        cells.append(measure(case, made, copy))
        print(cells[-1], flush=True)
        save("latent_bf16", cells[-1:], arguments.json, copy_gb_s=round(copy / 1e3))
    show("latent_bf16", cells)


if __name__ == "__main__":
    main()

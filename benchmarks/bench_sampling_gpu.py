"""Drawing tokens on a GPU, compared with JAX's functions and with reading the logits.

    python -m benchmarks.bench_sampling_gpu --json FILE

Device times of all kernels of a call (CUPTI). `xla_us` is `jax.random.categorical`, or `jnp.argmax` at temperature 0,
on the same logits, which are normal with a standard deviation of 3; `peak` is added to one of each row. `read_us` is
the maximum of each row by XLA, which reads the logits once; `of_reading` is our time over that.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device_time import device_time_us
from benchmarks.harness import add_json, save
from bijax.sampling._arithmetic import Arithmetic
from bijax.sampling._draw import draw

COLUMNS = 128256
SETS = 6  # of logits, so that none is in the L2 cache when its turn comes


def cell(rows: int, temperature: float, peak: float) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), SETS)
    more = (jnp.full(rows, temperature), jnp.zeros((rows, 2), jnp.uint32), jnp.arange(rows, dtype=jnp.uint32))
    logits = [(3 * jax.random.normal(key, (rows, COLUMNS))).at[:, 777].add(peak) for key in keys]
    ours = jax.jit(lambda *given: draw(*given, Arithmetic())).lower(logits[0], *more).compile()
    if temperature:
        other = jax.jit(lambda x, key: jax.random.categorical(key, x)).lower(logits[0], keys[0]).compile()
        given: list[Any] = [(x, keys[0]) for x in logits]
    else:
        other = jax.jit(lambda x: jnp.argmax(x, axis=-1)).lower(logits[0]).compile()
        given = [(x,) for x in logits]
    read = jax.jit(lambda x: jnp.max(x, axis=-1)).lower(logits[0]).compile()
    whole = np.asarray(ours(logits[0], *more))
    for row in (0, rows - 1):
        one = jax.jit(lambda *given: draw(*given, Arithmetic()))(*(x[row : row + 1] for x in (logits[0], *more)))
        if one[0] != whole[row]:
            raise RuntimeError(f"row {row} of {rows} got another token than alone: {whole[row]} and {one[0]}")
    if not temperature and (whole != np.asarray(jnp.argmax(logits[0], axis=-1))).any():
        raise RuntimeError("greedy tokens are not the first of the largest")
    times = {
        "ours_us": device_time_us(ours, [(x, *more) for x in logits]),
        "read_us": device_time_us(read, [(x,) for x in logits]),
        "xla_us": device_time_us(other, given),
    }
    times = {name: round(us, 2) for name, us in times.items()}
    return {
        "rows": rows,
        "temperature": temperature,
        "peak": peak,
        **times,
        "ratio": round(times["xla_us"] / times["ours_us"], 3),
        "of_reading": round(times["ours_us"] / times["read_us"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Drawing tokens on a GPU.")
    add_json(parser)
    arguments = parser.parse_args()
    cells = []
    for rows in (1, 64, 256):
        for temperature, peak in ((0.0, 0.0), (1.0, 0.0), (1.0, 20.0)):
            cells.append(cell(rows, temperature, peak))
            print(cells[-1], flush=True)
    save("sampling", cells, arguments.json)


if __name__ == "__main__":
    main()

"""Calls of attention on a GPU, compiled side by side."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
import jax.numpy as jnp

from tests.goldens import cases

THREADS: Final = 14  # kernels compile outside of the interpreter lock

KINDS: Final = ((128, "bfloat16"), (64, "float16"))

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def array(seed: int, *shape: int, dtype: str) -> jax.Array:
    return jnp.asarray(cases.array(seed, shape, jnp.dtype(dtype)))


def run(calls: Sequence[Call]) -> list[Any]:
    """Compiles programs side by side and runs them."""

    def ready(call: Call) -> Any:
        function, arguments = call
        return jax.jit(function).lower(*arguments).compile()

    with ThreadPoolExecutor(THREADS) as pool:
        programs = list(pool.map(ready, calls))
    return [program(*arguments) for program, (_, arguments) in zip(programs, calls, strict=True)]

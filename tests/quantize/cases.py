"""The kernels that quantise and pick rows, each with its portable form, on the same arguments."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from bijax.testing import hostile_rows
from pallas_kernels.contract import QuantizeContract, row_contract
from pallas_kernels.quantize import hopper, portable
from pallas_kernels.target import Target


@dataclass(frozen=True)
class Case:
    """One operation: what it is called with, and its two forms."""

    name: str
    portable: Callable[..., Any]
    kernel: Callable[..., Any]
    arguments: tuple[Any, ...]
    parameters: dict[str, Any]


def hopper_kernel(name: str) -> Callable[..., Any]:
    kernel: Callable[..., Any] = getattr(hopper, name)
    return kernel


def triton_kernel(name: str, target: str = "sm_90") -> Callable[..., Any]:
    """Returns a kernel through jax-triton for a target."""
    from pallas_kernels.quantize.jax_triton import launch  # needs Triton

    return functools.partial(getattr(launch, name), target=Target.parse(target))


def cases(
    m: int,
    columns: int,
    dtype: str,
    smooth: str = "float32",
    kind: str = "normal",
    kernel: Callable[[str], Callable[..., Any]] = hopper_kernel,
) -> Iterator[Case]:
    """Yields every operation on (m, columns) arrays, m at least 4; rows of zeros, with nan and with inf among them."""
    rng = np.random.default_rng(0)
    x, residual = (np.array(hostile_rows(seed, (m, columns), dtype)[k]) for seed, k in ((0, kind), (1, "normal")))
    x[1], x[2, 7], x[3, columns - 1] = 0, np.nan, np.inf
    w, s = (np.exp(rng.standard_normal(columns)).astype(jnp.dtype(smooth)) for _ in range(2))
    by_expert = np.stack([s, w, -s])
    expert = rng.integers(-1, 3, (2 * m, 1)).astype(np.int32)
    place = rng.integers(0, m, (2 * m, 1)).astype(np.int32)
    norm = {"eps": 1e-6, "contract": row_contract()}
    for name in ("int8", "float8_e4m3fn"):
        of = {"contract": QuantizeContract(name)}  # type: ignore[arg-type]
        quantize = {"quantize": of["contract"]}
        yield Case(f"quantize {name}", portable.quantize, kernel("quantize"), (x, s), of)
        arguments = (x, by_expert, place, expert)
        yield Case(f"quantize picked {name}", portable.quantize, kernel("quantize"), arguments, of)
        arguments = (x, w, s, residual)
        yield Case(f"quantize_norm {name}", portable.quantize_norm, kernel("quantize_norm"), arguments, quantize | norm)
    yield Case("quantize alone", portable.quantize, kernel("quantize"), (x,), of)
    yield Case("quantize_norm alone", portable.quantize_norm, kernel("quantize_norm"), (x,), quantize | norm)

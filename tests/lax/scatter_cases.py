"""Scatters of which one update is chosen, and how their bits are checked."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.lax import scatter_chosen
from bijax.testing import assert_bits_equal
from tests.arrays import on_device
from tests.lax.primitive_cases import equations

RULES = {
    "scatter": scatter_chosen.scatter,
    "scatter-max": scatter_chosen.scatter_max,
    "scatter_max": scatter_chosen.scatter_max,
    "scatter-min": scatter_chosen.scatter_min,
    "scatter_min": scatter_chosen.scatter_min,
}

HOW = {"set": lax.scatter, "max": lax.scatter_max, "min": lax.scatter_min}

WINDOWS = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))

PARTS = lax.ScatterDimensionNumbers((1,), (0,), (0,))

SWAPPED = lax.ScatterDimensionNumbers((0,), (1,), (1, 0))

Function = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

Case = tuple[Callable[[str], Function], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def at(index: Callable[[jax.Array], Any], **options: Any) -> Callable[[str], Function]:
    return lambda how: lambda x, i, u: getattr(x.at[index(i)], how)(u, **options)


def windows(numbers: lax.ScatterDimensionNumbers, **options: Any) -> Callable[[str], Function]:
    return lambda how: lambda x, i, u: HOW[how](x, i, u, numbers, **options)


# the scatter made of "set", "max" or "min", and the shapes of operand, indices and updates
CASES: dict[str, Case] = {
    "rows": (at(lambda i: i), (20, 4), (50,), (50, 4)),
    "clipped rows": (at(lambda i: i, mode="clip", unique_indices=True), (20, 4), (50,), (50, 4)),
    "promised rows": (at(lambda i: i % 20, mode="promise_in_bounds"), (20, 4), (50,), (50, 4)),
    "elements": (at(lambda i: (i, i[::-1])), (20, 20), (90,), (90,)),
    "columns": (at(lambda i: (slice(None), i)), (5, 20, 3), (50,), (5, 50, 3)),
    "two axes of indices": (at(lambda i: i), (20, 2), (3, 9), (3, 9, 2)),
    "windows": (windows(WINDOWS), (6, 7), (9, 2), (9, 3, 2)),
    "clipped windows": (windows(WINDOWS, mode="clip"), (6, 7), (9, 2), (9, 3, 2)),
    "parts of rows": (windows(PARTS), (6, 7), (9, 1), (9, 4)),
    "axes swapped": (windows(SWAPPED), (7, 6), (9, 2), (4, 9)),
    "a scalar": (at(lambda i: ()), (), (1,), ()),
    "vmap of all": (lambda how: jax.vmap(at(lambda i: i)(how)), (3, 20, 4), (3, 50), (3, 50, 4)),
    "vmap of updates": (
        lambda how: jax.vmap(at(lambda i: i)(how), (0, None, 0)),
        (3, 20, 4),
        (50,),
        (3, 50, 4),
    ),
    "vmap of windows": (
        lambda how: jax.vmap(windows(WINDOWS)(how), (2, 1, 0)),
        (6, 7, 3),
        (9, 3, 2),
        (3, 9, 3, 2),
    ),
    "no updates": (windows(PARTS), (6, 7), (0, 1), (0, 4)),
    "nothing": (windows(PARTS), (6, 0), (9, 1), (9, 0)),
}


def values(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    """Few values, so that many are equal, with zeros of both signs, infinities and nans.

    Without denormals: those XLA:CPU takes for zeros where it compares.
    """
    choice = np.array([-0.0, 0.0, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan], np.float32)
    p = [0.2, 0.2, 0.15, 0.15, 0.12, 0.06, 0.06, 0.06]
    return on_device(np.random.default_rng(seed).choice(choice, shape, p=p)).astype(dtype)


def operands(case: Case, seed: int = 0, dtype: str = "float32") -> tuple[jax.Array, jax.Array, jax.Array]:
    _, shape, indices, updates = case
    i = np.random.default_rng(seed).integers(-3, max(shape, default=0) + 3, indices)
    return values(seed + 1, shape, dtype), jnp.asarray(i, jnp.int32), values(seed + 2, updates, dtype)


def bits(y: jax.Array, how: str) -> np.ndarray:
    """The bits, with one for all nans where they were compared: XLA:CPU may turn the sign of a nan then."""
    numbers = np.asarray(y)
    if how != "set":
        numbers = np.where(np.isnan(numbers), np.asarray(np.nan, numbers.dtype), numbers)
    return numbers.view(f"u{numbers.dtype.itemsize}")


def check_bits(name: str, replaced: Callable[[Function], Function]) -> None:
    """Compares scatters, replaced and run on the device of the process, with those of XLA:CPU."""
    functions = [CASES[name][0](how) for how in HOW]
    args = [operands(CASES[name], seed) for seed in range(5)]
    assert len([e for f in functions for n in RULES for e in equations(f, *args[0], name=n)]) == len(HOW)
    stock = jax.jit(lambda *args: [f(*args) for f in functions])
    ours = jax.jit(lambda *args: [replaced(f)(*args) for f in functions])
    for a in args:
        on_cpu = jax.device_put(a, jax.devices("cpu")[0])
        for how, actual, expected in zip(HOW, ours(*a), stock(*on_cpu), strict=True):
            assert_bits_equal(*(bits(y, how) for y in (actual, expected)), err_msg=how)

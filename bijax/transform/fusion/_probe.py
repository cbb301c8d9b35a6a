"""Checks once per process that the functions of row programs have the same bits as in this jaxlib."""

import functools
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.core.architecture import target_for
from bijax.core.tag import kernel_code
from bijax.dispatch.kernels import run_kernel
from bijax.transform.hook.state import OFF, Request, requested, tagged
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.row_program.program import RowProgram, Step
from pallas_kernels.runtime.own_settings import own_settings

ROWS: Final = 128
COLUMNS: Final = 1024
FUNCTIONS: Final = ("exp", "div", "rsqrt")
"""Operations of row programs that IEEE 754 does not fix."""

_PIECES: Final = Request(True, fuse_rows=False)
_PROGRAM: Final = RowProgram(
    columns=(0, 1),
    masks=(),
    vectors=(),
    numbers=(),
    steps=(Step("exp", 2, (0,)), Step("div", 3, (0, 1)), Step("rsqrt", 4, (1,))),
    results=(2, 3, 4),
    dtypes=("float32",) * len(FUNCTIONS),
    parts=(1,) * len(FUNCTIONS),
    totals=(),
)

Arrays = tuple[np.ndarray, ...]


def check_functions(device: jax.Device) -> None:
    """Checks that row programs have the bits of the operations that they replace; cheap after the first time.

    Args:
        device: A GPU of this process that programs are lowered for.

    Raises:
        UnsupportedError: If a function's bits differ.
    """
    differ = _differ(device.device_kind, device)
    if any(differ.values()):
        counts = ", ".join(f"{name}: {count}" for name, count in differ.items())
        raise UnsupportedError(
            "bijax.invariant: expected functions of row programs to have the bits that XLA gives them on this GPU, got"
            f" others in so many of {ROWS * COLUMNS} values with jaxlib {_jaxlib()} on {device.device_kind}: {counts}."
            " Turn row programs off with fuse_rows=False, which promises the documented bits, or install a jaxlib that"
            " this version of bijax supports."
        )


def _jaxlib() -> str:
    from jaxlib.version import __version__

    return __version__


_known: dict[str, dict[str, int]] = {}


def _differ(kind: str, device: jax.Device) -> dict[str, int]:
    """Returns the number of differing values of each function on a kind of GPU."""
    if kind not in _known:
        pieces, program = both(device)
        _known[kind] = {
            name: int(np.sum((a.view(np.uint32) != b.view(np.uint32)) & ~(np.isnan(a) & np.isnan(b))))
            for name, a, b in zip(FUNCTIONS, pieces, program, strict=True)
        }
    return _known[kind]


def both(device: jax.Device) -> tuple[Arrays, Arrays]:
    """Returns the results of the operations and of the row program for equal inputs, whatever the caller's settings."""
    arrays = numbers()
    with requested(OFF), own_settings(arrays), jax.default_device(device):
        # A jitted call here would become part of the program being traced.
        found = jax.jit(_compute).lower(*arrays).compile()(*arrays)
    pieces, program = (tuple(map(np.asarray, half)) for half in found)
    return pieces, program


def _compute(x: jax.Array, y: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    with tagged(_PIECES):
        pieces = jnp.exp(x), x / y, lax.rsqrt(y)
    with kernel_code():
        arrays: tuple[list[jax.Array], ...] = [x, y], [], [], []
        target = target_for("cuda")
        program = run_kernel("row_program", target, None, _PROGRAM, *arrays, rows=x.shape[0], orders=[None, None])
    return pieces, tuple(program)


@functools.cache
def numbers() -> tuple[np.ndarray, np.ndarray]:
    """Returns two arrays of numbers of every exponent and sign, half of them with a finite exponential."""
    count = ROWS * COLUMNS // 2
    patterns = np.arange(count, dtype=np.uint32) << np.uint32(16)
    mixed = patterns | (np.arange(count, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(16))
    usual = np.linspace(-104, 89, count, dtype=np.float32)
    x = np.concatenate([mixed.view(np.float32), usual]).reshape(ROWS, COLUMNS)
    return x, np.ascontiguousarray(x.reshape(COLUMNS, ROWS).T[::-1])

"""Matmul on the CPU: XLA's own dot on tiles of fixed shape, in candidate programs that all follow the same contract.

XLA:CPU dispatches a dot to a library that splits K depending on the number of rows. The candidate programs keep K in
the contract's blocks for any number of rows; which is fastest depends on the rows, so
`pallas_kernels.matmul.schedule.cpu` orders them. "gemv" with one row is the reference
(`pallas_kernels.matmul.cpu.verify`): a step is used only after it reproduced the reference's bits on this machine.
"""

import functools
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.contract import MatmulContract
from pallas_kernels.matmul.cpu.forms import Stack, each_row, in_blocks, panels, stack_columns, stack_rows, transposed
from pallas_kernels.matmul.cpu.narrow_weights import panel_width, widened_in_panels
from pallas_kernels.matmul.cpu.verify import expected, gives_expected, probe_rows, probe_weights, reference, trials
from pallas_kernels.matmul.schedule.cpu import Step, matmul_ladder, steps_by_preference
from pallas_kernels.parts.xla.tiles import isolate, isolated_dot, map_row_tiles, pad_columns, pad_rows, run_isolated
from pallas_kernels.runtime.ahead_of_time import ahead_of_time
from pallas_kernels.runtime.compiler_options import cached_for_options
from pallas_kernels.runtime.disk_cache import remembered

_REFERENCE = Step("gemv", 1)
_FEWEST_COLUMNS = 8

_STACKS: Final[dict[str, Stack]] = {"columns": stack_columns, "stacked": stack_rows}

_MOST_BLOCKS: Final = 16
"""Blocks that are added without a loop."""

_LONGEST_SHORT: Final = 64
"""Blocks of fewer elements are compared with all that is around them: XLA compiles short dots as element-wise code."""

_Matmul = Callable[[jax.Array, jax.Array], jax.Array]


def matmul(x: jax.Array, w: jax.Array, *, contract: MatmulContract, transpose_w: bool = False) -> jax.Array:
    """Multiplies rows by weights.

    Args:
        x: (M, K) float32, bfloat16 or float16. Narrow types are widened to float32, which is exact.
        w: (K, N), or (N, K) with `transpose_w`.
        contract: Order of the sum over K.
        transpose_w: Whether `w` is stored as (N, K). No transposed copy is made if XLA's dot honours the contract.

    Returns:
        (M, N) float32.

    Guarantee: row-invariant.

    Example:
        >>> from pallas_kernels.contract import matmul_contract
        >>> c = matmul_contract(2, transpose_w=False)
        >>> matmul(jnp.ones((3, 2)), jnp.ones((2, 1)), contract=c).tolist()
        [[2.0], [2.0], [2.0]]
    """
    (m, k), n = x.shape, w.shape[0 if transpose_w else 1]
    if 0 in (m, k, n):
        return jnp.zeros((m, n), jnp.float32)
    x, w = isolate(x, w)
    x = x.astype(jnp.float32)
    width = panel_width(k, n) if w.dtype.itemsize < x.dtype.itemsize else n
    if width < n:
        product = functools.partial(matmul, contract=contract, transpose_w=transpose_w)
        return widened_in_panels(product, x, w, width, transpose_w=transpose_w)
    w = w.astype(jnp.float32)
    if n < _FEWEST_COLUMNS:  # XLA compiles a dot with a single column as another operation
        w = pad_rows(w, _FEWEST_COLUMNS) if transpose_w else pad_columns(w, _FEWEST_COLUMNS)
        return matmul(x, w, contract=contract, transpose_w=transpose_w)[:, :n]
    ladder = matmul_ladder(k, contract.k_block, transpose_w=transpose_w)

    def step_for(rows: int) -> Step:
        for step in steps_by_preference(ladder, rows):
            if honours_contract(step, k, n, contract, transpose_w):
                return step
        return _REFERENCE  # for every number of rows, since no step has the bits of another order

    def program_for(rows: int) -> Callable[[jax.Array], tuple[jax.Array]]:
        dot = _form(step_for(rows), contract, transpose_w)
        return lambda tile: (dot(tile, w),)

    out = jax.ShapeDtypeStruct((n,), jnp.float32)
    return map_row_tiles(program_for, lambda rows: step_for(rows).rows, [x], [out])[0]


def _form(step: Step, contract: MatmulContract, transpose_w: bool) -> _Matmul:
    """Returns the program of a step."""
    if step == _REFERENCE:
        return lambda x, w: reference(x, w, contract.k_block, transpose_w=transpose_w)
    if step.form == "each":
        return lambda x, w: each_row(x, w, contract.k_block)
    if step.form == "whole":
        dims = (((1,), (1 if transpose_w else 0,)), ((), ()))
        return lambda x, w: isolated_dot(x, w, dims)
    if step.form in ("panels", "turned"):
        turned = step.form == "turned"
        return lambda x, w: panels(x, w, contract.k_block, transpose_w=transpose_w, turned=turned)
    stack = _STACKS[step.form]
    return lambda x, w: in_blocks(stack, x[None], (transposed(w) if transpose_w else w)[None], contract.k_block)[0]


@cached_for_options()
@remembered
def honours_contract(step: Step, k: int, n: int, contract: MatmulContract, transpose_w: bool) -> bool:
    """Returns whether a step gives the reference's bits on this machine, at every position of its tile.

    The comparison runs once per process and shape, on normal data, a huge dynamic range and `linspace(-100, 100)`. Its
    result depends only on the machine and the jaxlib version.

    Args:
        step: The step to try.
        k: Length of the contracted dimension, at least 1.
        n: Columns of the result, at least 1.
        contract: Order of the sum over K.
        transpose_w: Whether the weights are stored as (N, K).
    """
    run, stored = _compile(step, k, n, contract, transpose_w)

    def agrees(trial: int) -> bool:
        rows = probe_rows(k, trial=trial)
        first = trial % len(rows)
        kinds = (first + np.arange(step.rows)) % len(rows)
        weights = probe_weights(k, n, stored, trial)
        expected(k, n, contract, trial)  # computed while the step is still being compiled
        actual = run(rows[kinds], weights)
        return gives_expected(actual, k, contract, first=first, trial=trial)

    return all(map(agrees, range(trials(step.rows, k, n))))


def _compile(
    step: Step, k: int, n: int, contract: MatmulContract, transpose_w: bool
) -> tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], bool]:
    """Returns the function that is compared, and whether it takes weights (N, K)."""
    block = contract.k_block
    if step.form in _STACKS and not k % block and k <= _MOST_BLOCKS * block and block >= _LONGEST_SHORT:
        return _product_of_blocks(step, k // block, block, n), False
    dot = _form(step, contract, transpose_w)
    shapes = (
        jax.ShapeDtypeStruct((step.rows, k), jnp.float32),
        jax.ShapeDtypeStruct((n, k) if transpose_w else (k, n), jnp.float32),
    )
    compiled = ahead_of_time(lambda x, w: run_isolated(lambda t: (dot(t, w),), x)[0], *shapes)
    return lambda x, w: np.asarray(compiled(x, w)), transpose_w


def _product_of_blocks(step: Step, blocks: int, block: int, n: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Returns a product of which only the dot of all blocks is compiled, the part whose order depends on its shape.

    The rest of the program, which moves operands and adds a few partial sums one after the other, is exact or correctly
    rounded, in kernels that barriers separate from the dot, and takes five times as long to compile.
    """
    in_columns = step.form == "columns"
    stack = _STACKS[step.form]
    axes = (1, 2, 0) if in_columns else (1, 0, 2)
    left = jax.ShapeDtypeStruct((blocks, block, step.rows) if in_columns else (blocks, step.rows, block), jnp.float32)
    right = jax.ShapeDtypeStruct((blocks, block, n), jnp.float32)

    def dot(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = isolate(x, w)
        return isolate(stack(x, w, in_columns))[0]

    compiled = ahead_of_time(dot, left, right)

    def run(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        cut = x.reshape(step.rows, blocks, block).transpose(axes)
        partials = np.asarray(compiled(np.ascontiguousarray(cut), w.reshape(blocks, block, n)))
        return functools.reduce(np.add, partials)

    return run

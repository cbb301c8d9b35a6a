"""Stacks of products on the CPU: XLA's own dot over as many stack entries as fit in one program.

An entry has the contract of the single product. A program runs whole entries, so no operand is sliced or copied: for
the few rows of decoding, a loop over slices takes two to five times as long. Each program is compared with the
contract's reference before use, in exactly the shape in which it runs.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.contract import MatmulContract
from pallas_kernels.matmul.cpu.chain import chain
from pallas_kernels.matmul.cpu.forms import fold, in_blocks, stack_columns, stack_rows
from pallas_kernels.matmul.cpu.launch import matmul as matmul_one
from pallas_kernels.matmul.cpu.verify import gives_expected, probe_rows, probe_weights, reference, trials
from pallas_kernels.matmul.schedule.cpu import StackStep, stack_entries, stack_steps
from pallas_kernels.parts.xla.row_major import row_major
from pallas_kernels.parts.xla.tiles import Program, isolate, isolated_dot, map_row_tiles, run_isolated
from pallas_kernels.runtime.ahead_of_time import ahead_of_time
from pallas_kernels.runtime.compiler_options import cached_for_options
from pallas_kernels.runtime.disk_cache import remembered


class Storage(NamedTuple):
    """How the operands of a stack of products are stored.

    Attributes:
        transpose_x: Whether the rows are stored as (G, K, M).
        transpose_w: Whether the weights are stored as (G, N, K).
    """

    transpose_x: bool = False
    transpose_w: bool = False


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    contract: MatmulContract,
    transpose_x: bool = False,
    transpose_w: bool = False,
) -> jax.Array:
    """Multiplies the rows of every entry by the entry's weights.

    Args:
        x: (G, M, K) float32, bfloat16 or float16, or float64 if the contract's dtype is; (G, K, M) with `transpose_x`.
        w: (G, K, N), or (G, N, K) with `transpose_w`.
        contract: Order of the sum over K.
        transpose_x: Whether `x` is stored as (G, K, M).
        transpose_w: Whether `w` is stored as (G, N, K).

    Returns:
        (G, M, N) of the contract's dtype.

    Guarantee: row-invariant; the bits of an entry are those of `pallas_kernels.matmul.cpu.launch.matmul`.

    Example:
        >>> from pallas_kernels.contract import matmul_contract
        >>> c = matmul_contract(2, transpose_w=False)
        >>> matmul(jnp.ones((2, 3, 2)), jnp.ones((2, 2, 1)), contract=c).shape
        (2, 3, 1)
    """
    storage = Storage(transpose_x, transpose_w)
    g, m, k, n = _sizes(x, w, storage)
    if 0 in (g, m, k, n):
        return jnp.zeros((g, m, n), contract.dtype)
    x, w = (a.astype(contract.dtype) for a in isolate(x, w))
    if m == n == 1 and k > contract.k_block:
        return _inner_products(x.reshape(g, k), w.reshape(g, k), contract)

    def program_for(entries: int) -> Program:
        step, _ = _choose(entries, m, k, n, contract, storage)
        return _program(step, contract, storage)

    def tile_for(entries: int) -> int:
        return _choose(entries, m, k, n, contract, storage)[1]

    return map_row_tiles(program_for, tile_for, [x, w], [jax.ShapeDtypeStruct((m, n), contract.dtype)])[0]


def _inner_products(x: jax.Array, w: jax.Array, contract: MatmulContract) -> jax.Array:
    """(G, K) x (G, K): every block of K is a separate entry, so that the padded columns stay in the cache."""
    g, k = x.shape
    cut = k - k % contract.k_block

    def products(first: int, last: int, length: int) -> jax.Array:
        rows = (a[:, first:last].reshape(-1, 1, length) for a in (x, w))
        y = matmul(*rows, contract=contract, transpose_w=True)
        return y.reshape(g, (last - first) // length, 1, 1)

    parts = [products(0, cut, contract.k_block)]
    if cut < k:
        parts.append(products(cut, k, k - cut))
    return fold(isolate(jnp.concatenate(parts, axis=1))[0])


def _sizes(x: jax.Array, w: jax.Array, storage: Storage) -> tuple[int, int, int, int]:
    g, n, k = w.shape if storage.transpose_w else (w.shape[0], w.shape[2], w.shape[1])
    return g, x.shape[2 if storage.transpose_x else 1], k, n


def _choose(
    entries: int, m: int, k: int, n: int, contract: MatmulContract, storage: Storage
) -> tuple[StackStep | None, int]:
    """Returns a step and the entries per program; None means one product after another."""
    for step in stack_steps(m, k, n, contract.k_block, **storage._asdict()):
        tile = stack_entries(step, entries, k, contract.k_block)
        if tile and honours_contract(step, (tile, m, k, n), contract, storage):
            return step, tile
    return None, 1


def _program(step: StackStep | None, contract: MatmulContract, storage: Storage) -> Program:
    if step is None:
        return lambda x, w: (_one(x[0].T if storage.transpose_x else x[0], w[0], contract, storage.transpose_w)[None],)
    return lambda x, w: (_form(step, x, w, contract, storage),)


def _one(x: jax.Array, w: jax.Array, contract: MatmulContract, transpose_w: bool) -> jax.Array:
    """(M, K) x (K, N), when no program of one entry is valid."""
    if contract.dtype == "float32":
        return matmul_one(x, w, contract=contract, transpose_w=transpose_w)
    return lax.map(lambda row: reference(row[None], w, contract.k_block, transpose_w=transpose_w)[0], x)


def _form(step: StackStep, x: jax.Array, w: jax.Array, contract: MatmulContract, storage: Storage) -> jax.Array:
    """Runs a step on products zero-padded to its rows and columns."""
    if step.form == "chain":
        return chain(x, w, **storage._asdict())
    if step.form == "crossed":
        return _crossed(x[:, 0], w[:, 0], step.rows)[:, None, None]
    _, m, _, n = _sizes(x, w, storage)
    x = _pad_axis(x, 2 if storage.transpose_x else 1, step.rows)
    if step.form == "whole":
        w = _pad_axis(w, 1 if storage.transpose_w else 2, step.columns)
        dims = (((1 if storage.transpose_x else 2,), (2 if storage.transpose_w else 1,)), ((0,), (0,)))
        y = isolated_dot(x, w, dims)
    else:
        w = _pad_axis(isolate(row_major(w.transpose(0, 2, 1)))[0] if storage.transpose_w else w, 2, step.columns)
        stack = stack_columns if step.form == "columns" else stack_rows
        y = in_blocks(stack, x, w, contract.k_block, transpose_x=storage.transpose_x)
    return isolate(y)[0][:, :m, :n]


def _crossed(x: jax.Array, w: jax.Array, together: int) -> jax.Array:
    """(G, K) x (G, K): some rows times all their columns; only the diagonal is kept."""
    g, k = x.shape
    whole = -(-g // together) * together
    x, w = (_pad_axis(a[:, None], 0, whole).reshape(-1, together, k) for a in (x, w))
    y = isolated_dot(x, w, (((2,), (2,)), ((0,), (0,))))
    return isolate(y.reshape(-1, together * together)[:, :: together + 1].reshape(whole))[0][:g]


def _pad_axis(a: jax.Array, axis: int, size: int) -> jax.Array:
    if a.shape[axis] == size:
        return a
    return isolate(jnp.pad(a, [(0, size - a.shape[axis] if i == axis else 0) for i in range(3)]))[0]


@cached_for_options(maxsize=4096)
@remembered
def honours_contract(
    step: StackStep, shape: tuple[int, int, int, int], contract: MatmulContract, storage: Storage
) -> bool:
    """Returns whether a step gives the reference's bits on this machine, in every entry and at every row.

    Args:
        step: The step to try.
        shape: Entries, rows, K and columns of the stack, exactly as the step will run.
        contract: Order of the sum over K.
        storage: How the operands are stored.
    """
    g, m, k, n = shape
    compiled = _compile(step, shape, contract, storage)

    def agrees(start: int, trial: int) -> bool:
        rows = probe_rows(k, contract.dtype, trial)
        first = start % len(rows)
        kinds = ((first + np.arange(g * m)) % len(rows)).reshape(g, m)
        x = rows[kinds].swapaxes(1, 2) if storage.transpose_x else rows[kinds]
        weights = probe_weights(k, n, storage.transpose_w, trial).astype(contract.dtype, copy=False)
        actual = np.asarray(compiled(x, np.broadcast_to(weights, (g, *weights.shape))))
        return gives_expected(actual, k, contract, first=first, trial=trial)

    sets, kinds = trials(g * m, k, n), len(probe_rows(k))
    starts = range(max(sets, kinds if g * m < kinds else 1))
    return all(agrees(start, start % sets) for start in starts)


def _compile(
    step: StackStep, shape: tuple[int, int, int, int], contract: MatmulContract, storage: Storage
) -> Callable[..., jax.Array]:
    g, m, k, n = shape
    shapes = ((k, m) if storage.transpose_x else (m, k)), ((n, k) if storage.transpose_w else (k, n))
    operands = (jax.ShapeDtypeStruct((g, *s), contract.dtype) for s in shapes)
    return ahead_of_time(lambda x, w: run_isolated(_program(step, contract, storage), x, w)[0], *operands)

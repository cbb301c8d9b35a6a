"""Matmul on any NVIDIA GPU as a Triton kernel: a chain of fused multiply-adds for every element, in any tile.

Used where no other kernel supports the GPU: every dtype on GPUs other than Hopper, and float64 on all. XLA's own
products cannot be used: XLA autotunes the algorithm of each product at compile time.
"""

import functools
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.contract import ChunkContract, MatmulContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul import stacks
from pallas_kernels.matmul.schedule.pallas_triton import TritonTile, triton_tile
from pallas_kernels.parts.pallas_triton.launch import launch

_OP: Final = "pallas_kernels.matmul.pallas_triton.matmul"
_GRADIENT_OP: Final = "pallas_kernels.matmul.pallas_triton.weight_gradient"

_Start = Literal["first block", "zero", "array"]
"""Where the sum of the blocks of K starts."""


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    contract: MatmulContract,
    transpose_w: bool = False,
    tile: TritonTile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiplies rows by weights, or the rows of every entry of a stack by the entry's weights.

    Operands whose sizes are not multiples of the tile's are copied once and zero-padded.

    Args:
        x: (M, K) or (..., M, K), float32, bfloat16, float16 or float64. Any sizes, 0 included.
        w: (K, N) or (..., K, N), or (N, K), (..., N, K) with `transpose_w`; the leading dimensions equal those of `x`,
            unless `x` is (M, K) and shared by all entries.
        contract: Order of the sum over K, and its dtype.
        transpose_w: Whether `w` is stored as (N, K).
        tile: Chosen by the number of rows by default. The bits do not depend on it.
        interpret: Whether to run on a CPU.

    Returns:
        (M, N) or (..., M, N) of the contract's dtype.

    Raises:
        UnsupportedError: If the contract is of another kind, or the shapes do not fit.

    Guarantee: row-invariant; the bits depend on the row, the column of weights and the contract alone.

    Example:
        >>> from pallas_kernels.contract import matmul_contract
        >>> c = matmul_contract(2, transpose_w=False)
        >>> matmul(jnp.ones((3, 2)), jnp.ones((2, 1)), contract=c, interpret=True).tolist()
        [[2.0], [2.0], [2.0]]
    """
    if not isinstance(contract, MatmulContract):
        raise UnsupportedError(f"{_OP}: expected a MatmulContract, got {contract!r}.")
    (m, k), (depth, n) = x.shape[-2:], w.shape[-2:] if not transpose_w else w.shape[:-3:-1]
    lead = w.shape[:-2]
    if k != depth or x.shape[:-2] not in ((), lead):
        raise UnsupportedError(
            f"{_OP}: expected x (..., M, K) and w {'(..., N, K)' if transpose_w else '(..., K, N)'}, got x"
            f" {list(x.shape)} and w {list(w.shape)}."
        )
    if 0 in (*lead, m, k, n):
        return jnp.zeros((*lead, m, n), contract.dtype)
    x, w = (a.reshape(-1, *a.shape[-2:]) for a in (x, w))
    tile = triton_tile(m) if tile is None else tile
    y = _multiply(x, w, None, contract.dtype, contract.k_block, "first block", tile, interpret, transpose_w=transpose_w)
    return y.reshape(*lead, m, n)


def weight_gradient(
    x: jax.Array,
    g: jax.Array,
    *,
    contract: ChunkContract,
    accumulate: jax.Array | None = None,
    tile: TritonTile | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Sums the outer products of rows: the gradient of `w` in `x @ w`; or the gradients of every entry of a stack.

    Args:
        x: (M, K) or (..., M, K), float32, bfloat16 or float16. Any sizes, 0 included.
        g: (M, N) or (..., M, N), the cotangent of the product.
        contract: Chunks of rows. A chunk is one ascending chain of fused multiply-adds.
        accumulate: (K, N) or (..., K, N) float32, a previous sum, whose chain continues.
        tile: As in `matmul`.
        interpret: Whether to run on a CPU.

    Returns:
        (K, N) or (..., K, N) float32.

    Raises:
        UnsupportedError: If the contract is of another kind, or the shapes do not fit.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows.

    Example:
        >>> from pallas_kernels.contract import chunk_contract
        >>> x, g = jnp.ones((5, 2)), jnp.ones((5, 1))
        >>> weight_gradient(x, g, contract=chunk_contract(), interpret=True).tolist()
        [[5.0], [5.0]]
    """
    if not isinstance(contract, ChunkContract):
        raise UnsupportedError(f"{_GRADIENT_OP}: expected a ChunkContract, got {contract!r}.")
    if jnp.dtype("float64") in (x.dtype, g.dtype):
        raise UnsupportedError(
            f"{_GRADIENT_OP} adds in float32, got x {x.dtype} and g {g.dtype}; multiply x transposed by g with `matmul`"
            " under a MatmulContract of float64."
        )
    lead, m, (k, n) = x.shape[:-2], x.shape[-2], (x.shape[-1], g.shape[-1])
    shape = (*lead, k, n)
    if g.shape[:-1] != x.shape[:-1] or (accumulate is not None and accumulate.shape != shape):
        raise UnsupportedError(
            f"{_GRADIENT_OP}: expected x (..., M, K), g (..., M, N) and accumulate (..., K, N), got x {list(x.shape)},"
            f" g {list(g.shape)}" + ("." if accumulate is None else f" and accumulate {list(accumulate.shape)}.")
        )
    if 0 in (*shape, m):
        return jnp.zeros(shape, jnp.float32) if accumulate is None else accumulate
    x, g = (a.reshape(-1, *a.shape[-2:]) for a in (x, g))
    start: _Start = "zero" if accumulate is None else "array"
    total = None if accumulate is None else accumulate.reshape(-1, k, n)
    tile = triton_tile(k) if tile is None else tile
    y = _multiply(x, g, total, "float32", contract.rows, start, tile, interpret, transpose_x=True)
    return y.reshape(shape)


def product(
    x: jax.Array,
    w: jax.Array,
    *,
    contract: MatmulContract,
    transpose_w: bool = False,
    bias: jax.Array | None = None,
    out_dtype: Any = "float32",
) -> jax.Array:
    """Returns x @ w + bias by `matmul`, see `pallas_kernels.matmul.stacks.multiply`.

    Guarantee: row-invariant.
    """
    options: dict[str, Any] = {"contract": contract, "transpose_w": transpose_w}
    return stacks.multiply((matmul, matmul), x, w, bias=bias, out_dtype=out_dtype, **options)


def product_gradient(
    x: jax.Array,
    g: jax.Array,
    *,
    contract: ChunkContract,
    accumulate: jax.Array | None = None,
    out_dtype: Any = "float32",
) -> jax.Array:
    """Returns the gradient of `w` by `weight_gradient`, see `pallas_kernels.matmul.stacks.weight_gradient`.

    Guarantee: split-invariant, for cuts at multiples of `contract.rows` rows.
    """
    kernel = functools.partial(weight_gradient, contract=contract)
    return stacks.weight_gradient((kernel, kernel), x, g, accumulate=accumulate, out_dtype=out_dtype)


def _multiply(
    x: jax.Array,
    w: jax.Array,
    total: jax.Array | None,
    dtype: str,
    k_block: int,
    start: _Start,
    tile: TritonTile,
    interpret: bool,
    *,
    transpose_x: bool = False,
    transpose_w: bool = False,
) -> jax.Array:
    """(G, M, K) or (1, M, K) x (G, K, N), each possibly stored transposed, to (G, M, N)."""
    g, (m, k) = w.shape[0], x.shape[:0:-1] if transpose_x else x.shape[1:]
    n = w.shape[1 if transpose_w else 2]
    sizes = _Sizes(g, -(-m // tile.rows), -(-n // tile.columns), k, k_block, x.shape[0])
    padded_m, padded_n = sizes.row_tiles * tile.rows, sizes.column_tiles * tile.columns
    padded_k = sizes.read(tile.depth)
    x = _padded(x, (padded_k, padded_m) if transpose_x else (padded_m, padded_k))
    w = _padded(w, (padded_n, padded_k) if transpose_w else (padded_k, padded_n))
    totals = () if total is None else (_padded(total, (padded_m, padded_n)),)
    kernel = functools.partial(
        _kernel, sizes=sizes, tile=tile, start=start, transpose_x=transpose_x, transpose_w=transpose_w
    )
    (y,) = launch(
        kernel,
        x,
        w,
        *totals,
        blocks=g * sizes.row_tiles * sizes.column_tiles,
        out=[jax.ShapeDtypeStruct((g, padded_m, padded_n), dtype)],
        warps=tile.warps,
        stages=tile.stages,
        interpret=interpret,
    )
    return y[:, :m, :n]


class _Sizes:
    """The sizes of the kernel's loops.

    Attributes:
        entries: Entries of the stack.
        row_tiles: Tiles of rows in an entry.
        column_tiles: Tiles of columns.
        k: Length of the sum.
        k_block: Elements of K in a block.
        x_entries: Equal to `entries`, or 1 if all entries share their rows.
    """

    def __init__(self, entries: int, row_tiles: int, column_tiles: int, k: int, k_block: int, x_entries: int) -> None:
        self.entries, self.row_tiles, self.column_tiles = entries, row_tiles, column_tiles
        self.k, self.k_block, self.x_entries = k, min(k, k_block), x_entries

    @property
    def whole(self) -> int:
        """Number of full-length blocks."""
        return self.k // self.k_block

    def read(self, depth: int) -> int:
        """Returns the end of the reads along K of a kernel with steps of `depth`."""
        ends = [(self.whole - 1) * self.k_block + -(-self.k_block // depth) * depth]
        if self.k % self.k_block:
            ends.append(self.whole * self.k_block + -(-(self.k % self.k_block) // depth) * depth)
        return max(ends)


def _kernel(
    x_ref: Any,
    w_ref: Any,
    *refs: Any,
    sizes: _Sizes,
    tile: TritonTile,
    start: _Start,
    transpose_x: bool,
    transpose_w: bool,
) -> None:
    *total_ref, y_ref = refs
    index = pl.program_id(0)
    column = index % sizes.column_tiles * tile.columns
    row = index // sizes.column_tiles % sizes.row_tiles * tile.rows
    entry = index // (sizes.column_tiles * sizes.row_tiles)
    rows, columns = pl.ds(row, tile.rows), pl.ds(column, tile.columns)
    dtype = y_ref.dtype

    def operand(ref: Any, entry: Any, places: Any, depth: Any, transposed: bool) -> jax.Array:
        at = ref.at[entry, depth, places] if transposed else ref.at[entry, places, depth]
        return plt.load(at).astype(dtype)

    def block_sum(begin: Any, length: int) -> jax.Array:
        """Adds the products of `length` elements of K in order."""

        def step(i: Any, chain: jax.Array) -> jax.Array:
            depth = pl.ds(begin + i * tile.depth, tile.depth)
            x = operand(x_ref, entry % sizes.x_entries, rows, depth, transpose_x)
            w = operand(w_ref, entry, columns, depth, not transpose_w)
            if length % tile.depth:  # elements of the next block are masked
                x = _where_first(x, length - i * tile.depth, 0 if transpose_x else 1)
                w = _where_first(w, length - i * tile.depth, 1 if transpose_w else 0)
            dims = (((0 if transpose_x else 1,), (1 if transpose_w else 0,)), ((), ()))
            return chain + lax.dot_general(x, w, dims, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)

        steps = jnp.int32(-(-length // tile.depth))
        zero = jnp.zeros((tile.rows, tile.columns), dtype)
        return lax.fori_loop(jnp.int32(0), steps, step, zero)

    def block(i: Any, total: jax.Array) -> jax.Array:
        partial = block_sum(i * sizes.k_block, sizes.k_block)
        # Starting at zero would lose the sign of a first block of -0.
        return jnp.where(i == 0, partial, total + partial) if start == "first block" else total + partial

    total = jnp.zeros((tile.rows, tile.columns), dtype)
    if total_ref:
        total = plt.load(total_ref[0].at[entry, rows, columns])
    total = lax.fori_loop(jnp.int32(0), jnp.int32(sizes.whole), block, total)
    if sizes.k % sizes.k_block:
        total = total + block_sum(jnp.int32(sizes.whole * sizes.k_block), sizes.k % sizes.k_block)
    plt.store(y_ref.at[entry, rows, columns], total)


def _where_first(a: jax.Array, count: Any, axis: int) -> jax.Array:
    return jnp.where(lax.broadcasted_iota(jnp.int32, a.shape, axis) < count, a, jnp.zeros((), a.dtype))


def _padded(a: jax.Array, sizes: tuple[int, int]) -> jax.Array:
    """Returns the array zero-padded to (G, sizes...)."""
    if a.shape[1:] == sizes:
        return a
    return jnp.pad(a, [(0, 0), *((0, want - have) for want, have in zip(sizes, a.shape[1:], strict=True))])

"""Shared parts of the kernels: the rows and keys of a tile, the visible keys of a row, and operand access."""

from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.call import AttentionCall, AttentionOptions
from pallas_kernels.contract import eight_bit_contract

LEAST: Final = -3e38
"""The maximum before any key: finite, so that differences of maxima are never nan."""

POSITION_LIMIT: Final = 1 << 30

Parts = tuple[jax.Array, ...]

SUMS: Final = 8
"""Columns of a sum of rows that the tensor core adds."""

_PRODUCTS: Final = {1: [(0, 0)], 3: [(2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0)]}
"""Which parts of two operands are multiplied, in this order; what is left out is below the last bit of float32."""


@dataclass(frozen=True)
class Launch:
    """The static parameters of a launch.

    Attributes:
        dtype: Name of the operands' dtype.
        options: Scale and soft cap.
        key_block: Keys of a block of the contract.
        row_block: Rows of a block of the contract.
        queries: Number T of queries of a sequence.
        heads: Key heads K.
        group: Query heads per key head.
        size: Width H of a head, a multiple of 16.
        value_size: Width V of a head of the values, a multiple of 16.
        capacity: Key capacity of a sequence.
        page: Keys of a page; None for contiguous keys.
        stored: Dtype of 8-bit keys and values, "int8" or "float8_e4m3fn"; None for those of `dtype`.
        interpret: Whether the kernel runs on a CPU.
    """

    dtype: str
    options: AttentionOptions
    key_block: int
    row_block: int
    queries: int
    heads: int
    group: int
    size: int
    value_size: int
    capacity: int
    page: int | None
    stored: str | None
    interpret: bool

    @property
    def rows(self) -> int:
        """Rows of a sequence and a key head: one per query and head of the group, query-major."""
        return self.queries * self.group

    def pieces(self, size: int) -> list[tuple[int, int]]:
        """Offsets and widths of the pieces of a head: a Triton tensor has a power-of-two width."""
        found, start = [], 0
        while start < size:
            width = min(64 if self.dtype == "float32" else 128, 1 << (size - start).bit_length() - 1)
            found.append((start, width))
            start += width
        return found


@dataclass(frozen=True, eq=False)
class Refs(AttentionCall):
    """The whole arrays of a launch as references: the arrays of the call and arrays derived for the kernels.

    8-bit keys and values are int8, the mask is int8 (0 where a key is not seen), slopes and `value_scale` are
    float32, the latter (B or 1, K, V).

    Attributes:
        first: (B, T) int32, the first key that a query sees.
        last: (B, T) int32, the end of the keys that it sees.
        offsets: (B,) int32, present with slopes.
        cotangent: (B, T, N, V), in the backward pass, like the rest.
        lse: (B, T, N) float32.
        delta: (B, T, N) float32, the sum of cotangent * result.
        begin: (B, tiles of keys) int32, the first query that sees any key of a tile.
        end: (B, tiles of keys) int32, the end of these queries.
    """

    first: Any = None
    last: Any = None
    offsets: Any = None
    cotangent: Any = None
    lse: Any = None
    delta: Any = None
    begin: Any = None
    end: Any = None


@dataclass(frozen=True)
class Rows:
    """Rows of a sequence and a key head.

    Attributes:
        sequence: Their sequence.
        head: Their key head.
        query: (R,) int32, the query of each row.
        query_head: (R,) int32, its query head.
        first: (R,) int32.
        last: (R,) int32; both 0 if a row sees nothing.
    """

    sequence: Any
    head: Any
    query: jax.Array
    query_head: jax.Array
    first: jax.Array
    last: jax.Array


def rows_at(
    refs: Refs, launch: Launch, sequence: Any, head: Any, start: Any, count: int, *, repeat_last: bool = True
) -> Rows:
    """Returns rows from `start` on. Rows after the last are clamped to it; they see its keys, or nothing."""
    index = start + lax.iota(jnp.int32, count)
    exists = (index < launch.rows) | repeat_last
    index = jnp.minimum(index, launch.rows - 1)
    query = index // launch.group
    first, last = (jnp.where(exists, ref[sequence, query], 0) for ref in (refs.first, refs.last))
    return Rows(sequence, head, query, head * launch.group + index % launch.group, first, last)


def of_heads(ref: Any, sequence: Any, head: Any) -> Any:
    """Reads the elements of an array (B or 1, heads, ...) for heads of a sequence."""
    return ref[sequence if ref.shape[0] > 1 else 0, head]


def read_rows(ref: Any, rows: Rows, launch: Launch) -> list[jax.Array]:
    """Reads the pieces of the heads of (B, T, N, H): (R, width) float32 each."""
    at = (rows.sequence, rows.query, rows.query_head)
    return [ref[*at, start : start + width].astype(jnp.float32) for start, width in launch.pieces(ref.shape[3])]


def write_rows(ref: Any, rows: Rows, pieces: list[jax.Array], launch: Launch) -> None:
    """Writes the pieces of the heads of (B, T, N, H), rounded; a zero as +0."""
    for (start, width), piece in zip(launch.pieces(ref.shape[3]), pieces, strict=True):
        value = jnp.where(piece == 0, 0.0, piece).astype(ref.dtype)
        ref[rows.sequence, rows.query, rows.query_head, start : start + width] = value


@dataclass(frozen=True)
class Keys:
    """Keys of a sequence at neighbouring positions.

    Attributes:
        sequence: Their sequence.
        position: (n,) int32, their absolute positions.
        entry: Index into the first two axes of keys and values.
    """

    sequence: Any
    position: jax.Array
    entry: tuple[Any, Any]


def keys_at(refs: Refs, launch: Launch, sequence: Any, start: Any, count: int) -> Keys:
    """Returns the keys from the absolute position `start` on. Keys after the last are clamped to it."""
    position = start + lax.iota(jnp.int32, count)
    held = jnp.minimum(position, launch.capacity - 1)
    if launch.page is None:
        return Keys(sequence, position, (sequence, held))
    table: Any = refs.page_table
    return Keys(sequence, position, (table[sequence, held // launch.page], held % launch.page))


def read_values(refs: Refs, keys: Keys, head: Any, launch: Launch) -> list[jax.Array]:
    """Reads the pieces of values as `read_keys` does: from their own array, or the first columns of the keys."""
    return read_keys(refs.key if refs.value is None else refs.value, keys, head, launch, launch.value_size)


def read_keys(ref: Any, keys: Keys, head: Any, launch: Launch, size: int | None = None) -> list[jax.Array]:
    """Reads the pieces of keys or values: (n, width) float32 each.

    Args:
        ref: The keys or the values.
        keys: The keys to read.
        head: Their head.
        launch: The static parameters.
        size: How many columns to read, a multiple of 16; all by default.
    """
    found = []
    for start, width in launch.pieces(ref.shape[3] if size is None else size):
        stored = ref[*keys.entry, head, start : start + width]
        number = float_of_e4m3(stored) if launch.stored == "float8_e4m3fn" else stored.astype(jnp.float32)
        found.append(number if launch.stored is None else number * eight_bit_contract(launch.stored).unit)
    return found


def float_of_e4m3(bits: jax.Array) -> jax.Array:
    """Returns the float32 values of float8_e4m3fn numbers, passed as int8: not every GPU has instructions for them."""
    pattern = bits.astype(jnp.int32) & 0xFF
    size = pattern & 0x7F
    normal = lax.bitcast_convert_type((size + (120 << 3)) << 20, jnp.float32)
    small = size.astype(jnp.float32) * jnp.float32(2.0**-9)
    value = jnp.where(size < 8, small, jnp.where(size == 0x7F, jnp.nan, normal))
    return jnp.where(pattern > 0x7F, -value, value)


def finite(x: jax.Array) -> jax.Array:
    """Returns the array with zeros instead of nan and infinities, since 0 * inf and 0 * nan are nan."""
    return jnp.where(jnp.abs(x) < jnp.inf, x, 0.0)


def split_all(pieces: list[jax.Array], launch: Launch) -> list[Parts]:
    """Returns the limbs of each piece."""
    return [split(piece, launch) for piece in pieces]


def split(x: jax.Array, launch: Launch) -> Parts:
    """Returns the limbs that the tensor core multiplies: 16-bit values, or three bfloat16 that add up to a float32."""
    return three_parts(x) if launch.dtype == "float32" else (x.astype(launch.dtype),)


def three_parts(x: jax.Array) -> Parts:
    """Returns three bfloat16 arrays, the largest first, that add up to a float32 one."""
    high = x.astype(jnp.bfloat16)
    rest = x - high.astype(jnp.float32)
    middle = rest.astype(jnp.bfloat16)
    return high, middle, (rest - middle.astype(jnp.float32)).astype(jnp.bfloat16)


def dot(chain: jax.Array, a: Parts, b: Parts, contracted: tuple[int, int], *, swap: bool = False) -> jax.Array:
    """Continues the tensor core chains, 16 products at a time in ascending order, the small limb products first.

    Args:
        chain: (m, n) float32, or (n, m) with `swap`.
        a: Limbs of (m, k).
        b: Limbs of (n, k).
        contracted: Which axes of `a` and `b` are contracted.
        swap: Whether to multiply `b` by `a`. It does not affect the bits.
    """
    for i, j in _PRODUCTS[len(a)]:
        left, right, axes = (b[j], a[i], contracted[::-1]) if swap else (a[i], b[j], contracted)
        dims = (((axes[0],), (axes[1],)), ((), ()))
        chain = chain + lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)
    return chain


def add_rows(total: jax.Array, x: jax.Array) -> jax.Array:
    """Continues row sums (R, SUMS), whose columns are all equal, over (R, n).

    The tensor core adds them, times 1, in an order independent of the register layout.
    """
    ones = jnp.ones((x.shape[1], SUMS), jnp.bfloat16)
    for part in reversed(three_parts(x)):
        total = dot(total, (part,), (ones,), (1, 0))
    return total


def blocks_seen(rows: Rows, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns the range of key blocks that covers all keys seen by the rows."""
    some = rows.last > rows.first
    lowest = jnp.min(jnp.where(some, rows.first, POSITION_LIMIT))
    highest = jnp.max(jnp.where(some, rows.last, 0))
    return lowest // block, (highest + (block - 1)) // block

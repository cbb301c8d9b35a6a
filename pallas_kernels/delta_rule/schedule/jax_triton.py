"""Schedules of the kernels of the gated delta rule written in Triton. None changes a bit.

The tables were measured on an H100 (`benchmarks/notes/jax-triton.md`), those of few tokens on Hopper on an H200
(`hybrids-gpu.md`).
"""

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from pallas_kernels.target import HOPPER_MULTIPROCESSORS


@dataclass(frozen=True)
class Schedule:
    """What one program takes.

    Tiles of fewer than 64 columns, or of fewer than 4 warps, are multiplied by mma.sync on every GPU, others by wgmma
    on Hopper.

    Attributes:
        columns: Columns of the values.
        warps: Its warps.
        stages: Chunks that are read ahead.
        chunk_warps: Warps of a program that computes T of a chunk.
        pieces: With few tokens, how many times `columns` a program computes, one after another.
        rows_warps: With few tokens, warps of a kernel of its own for what does not need the state; 0 for a single
            kernel.
        mosaic: Whether the kernels are those for Hopper, which take 64 columns, or any of few tokens.
        workers: For Hopper, blocks of a single kernel that compute T of chunks while others walk; 0 for two kernels.
    """

    columns: int
    warps: int
    stages: int
    chunk_warps: int = 1
    pieces: int = 1
    rows_warps: int = 0
    mosaic: bool = False
    workers: int = 0


_NARROW: Final = Schedule(32, 4, 2)
_WIDE: Final = Schedule(64, 4, 2)
_HOPPER: Final = Schedule(64, 4, 3, mosaic=True)
_MEASURED: Final = ("bfloat16", 128, 128)  # dtype, D and V with which the kernels for Hopper have run
_FULL: Final = 128
"""Programs that use a whole GPU."""
_MOST_WALKS: Final = 64
"""Most blocks of a walk on Hopper that leave enough multiprocessors to compute T of chunks at the same time."""
_APART: Final = 512
"""Heads from which on several kernels for few tokens are faster than one."""
_ALONE: Final = 32
"""Most heads of which each block for few tokens on Hopper has a multiprocessor of its own, with 32 columns."""

EDGES: Final = Schedule(32, 4, 1, pieces=2)
"""For few tokens of sequences that go over the edge of a chunk. `pieces` programs share the sequences of a batch."""

CAREFUL: Final = Schedule(32, 4, 1)
"""For what is computed again because a number is not finite."""


class Sizes(NamedTuple):
    """What the schedule of whole sequences depends on.

    Attributes:
        dtype: Name of the dtype of the values.
        key_size: D.
        value_size: V.
        heads: Value heads of all sequences.
        tokens: T.
    """

    dtype: str
    key_size: int
    value_size: int
    heads: int
    tokens: int


def chunks_schedule(x: Sizes, features: frozenset[str]) -> Schedule:
    """Returns the schedule of whole sequences.

    Args:
        x: Dtype and sizes.
        features: The instruction families of the GPU.

    Example:
        >>> hopper, x = frozenset({"mma", "wgmma"}), Sizes("bfloat16", 128, 128, heads=32, tokens=8192)
        >>> [chunks_schedule(x._replace(tokens=tokens), hopper).mosaic for tokens in (40, 8192)]
        [False, True]
        >>> chunks_schedule(x, frozenset({"mma"})).columns
        32
        >>> [chunks_schedule(x._replace(heads=heads), hopper).workers for heads in (32, 64)]
        [68, 0]
    """
    if "wgmma" not in features:
        return _NARROW
    if x[:3] == _MEASURED and x.tokens >= _HOPPER.columns:
        blocks = x.heads * (x.value_size // _HOPPER.columns)
        return replace(_HOPPER, workers=HOPPER_MULTIPROCESSORS - blocks if blocks <= _MOST_WALKS else 0)
    return _WIDE if x.heads * (x.value_size // _WIDE.columns) >= _FULL else _NARROW


def parts_schedule(x: Sizes, features: frozenset[str]) -> Schedule:
    """Returns the schedule of parts of prompts.

    In Triton's kernels keys may be kept ones or new ones, and reach wgmma through stores of threads (`kernels`): their
    tiles are narrow.

    Args:
        x: Dtype and sizes.
        features: The instruction families of the GPU.

    Example:
        >>> hopper, x = frozenset({"mma", "wgmma"}), Sizes("bfloat16", 128, 128, heads=32, tokens=2048)
        >>> [parts_schedule(x._replace(dtype=dtype), hopper).mosaic for dtype in ("bfloat16", "float16")]
        [True, False]
    """
    return _HOPPER if "wgmma" in features and x[:3] == _MEASURED else _NARROW


def decode_schedule(x: Sizes, features: frozenset[str], *, in_slots: bool = False) -> Schedule:
    """Returns the schedule of at most 8 tokens of each sequence.

    Args:
        x: Dtype and sizes.
        features: The instruction families of the GPU.
        in_slots: Whether what is kept of sequences is in slots.

    Example:
        >>> hopper, x = frozenset({"mma", "wgmma"}), Sizes("bfloat16", 128, 128, heads=32, tokens=1)
        >>> [decode_schedule(x._replace(heads=heads), hopper).columns for heads in (32, 64, 2048)]
        [32, 64, 128]
        >>> [decode_schedule(x._replace(tokens=tokens), hopper, in_slots=True).columns for tokens in (1, 4)]
        [32, 32]
        >>> [decode_schedule(x._replace(heads=heads), frozenset({"mma"})).pieces for heads in (32, 64, 256)]
        [1, 2, 4]
        >>> decode_schedule(x._replace(heads=2048), frozenset({"mma"})).rows_warps
        4
    """
    if "wgmma" in features and x[:3] == _MEASURED:
        columns = x.value_size
        if x.heads <= _ALONE:
            columns = 32
        elif x.tokens == 1 and not in_slots and x.heads <= 2 * _ALONE:
            columns = 64
        return Schedule(columns, 4, 1, mosaic=True)
    if x.heads > _APART:
        return Schedule(_WIDE.columns, 4, 1, rows_warps=4)
    pieces = x.value_size // _NARROW.columns
    while pieces > 1 and 2 * x.heads * (x.value_size // (_NARROW.columns * pieces)) <= _FULL:
        pieces //= 2
    # A program alone on a multiprocessor is faster with more warps.
    return Schedule(_NARROW.columns, 8 if pieces == 1 else 4, 1, pieces=pieces)

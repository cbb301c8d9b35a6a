"""Shapes as HLO writes them."""

import dataclasses
import math
import re
from typing import Final

_ARRAY: Final = re.compile(r"\b([a-z][a-z0-9]*)\[([^\]]*)\]")
_LAYOUT: Final = re.compile(r"\{[^{}]*\}")
_FLOAT: Final = re.compile(r"(?:b?f\d|c\d)")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array.

    Attributes:
        dtype: As HLO names it: "f32", "bf16", "pred".
        dims: Its sizes; a bounded dynamic dimension counts with its bound.
    """

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def is_float(self) -> bool:
        """Whether sums of it are rounded: a real or complex floating type."""
        return bool(_FLOAT.match(self.dtype))


def shapes_in(text: str) -> tuple[Shape, ...]:
    """Returns the arrays of a shape, the leaves of a tuple in order.

    Example:
        >>> shapes_in("(f32[8,16]{1,0}, s32[])")
        (Shape(dtype='f32', dims=(8, 16)), Shape(dtype='s32', dims=()))
    """
    return tuple(
        Shape(
            dtype, tuple(int(size.strip().removeprefix("<=")) for size in sizes.split(",") if size.strip().strip("?"))
        )
        for dtype, sizes in _ARRAY.findall(without_layout(text))
    )


def without_layout(text: str) -> str:
    """Returns a shape without its memory layouts.

    Example:
        >>> without_layout("f32[8,16]{1,0:T(8,128)}")
        'f32[8,16]'
    """
    return _LAYOUT.sub("", text)

"""The description of a launch, without what only debuggers read.

The handler of jaxlib takes the whole description as the key of a table, each time that a program runs. Most of its
bytes were the kernel in Triton's intermediate language, and the lines of the source that instructions come from.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

VARINT, _BYTES = 0, 2
_FIXED: Final = {1: 8, 5: 4}
_BEST: Final = 9


def shortened(description: bytes) -> bytes:
    """Returns a compressed description without that; the same bytes if they are not compressed.

    The machine code stays the same. If Triton wrote no line information, it would compile some kernels to other
    instructions; so it is removed from the PTX.
    """
    try:
        message = zlib.decompress(description)
    except zlib.error:
        return description
    return zlib.compress(_edited(message, _CALL), _BEST)


def without_lines(ptx: bytes) -> bytes:
    """Returns PTX without the lines of the source, and without comments that are lines of their own."""
    code = ptx.partition(b"\n\t.section\t.debug")[0]
    lines = (line for line in code.split(b"\n") if not line.lstrip().startswith((b".loc", b".file", b"//")))
    return b"\n".join(lines).rstrip(b"\n") + b"\n"


_PTX, _TTIR = 4, 5
_CALL: Final = {1: {1: {_PTX: without_lines, _TTIR: None}}}
"""By numbers of fields in jaxlib's `triton.proto` (a call, its kernel): a function of a field, or None to drop it."""


def _edited(message: bytes, edits: Mapping[int, Any]) -> bytes:
    """Returns a message of Protocol Buffers with some fields left out or changed, in nested messages too."""
    kept = []
    for number, start, value, end in fields(message):
        if number not in edits:
            kept.append(message[start:end])
        elif (edit := edits[number]) is not None:
            inner = _edited(message[value:end], edit) if isinstance(edit, Mapping) else edit(message[value:end])
            kept.append(_varint(number << 3 | _BYTES) + _varint(len(inner)) + inner)
    return b"".join(kept)


def fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yields the number of each field, and where the field, its value, and what comes after it begin."""
    at = 0
    while at < len(message):
        start = at
        tag, at = number_at(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, (_, at) = at, number_at(message, at)
        elif kind == _BYTES:
            length, value = number_at(message, at)
            at = value + length
        else:
            value, at = at, at + _FIXED[kind]
        yield number, start, value, at


def number_at(message: bytes, at: int) -> tuple[int, int]:
    """Returns a number, seven bits in each byte, the lowest first, and where the next byte is."""
    number = shift = 0
    while True:
        byte = message[at]
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])

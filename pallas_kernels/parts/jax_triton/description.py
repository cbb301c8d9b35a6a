"""The description of a launch, without the source of the kernel in Triton's intermediate language.

The handler of jaxlib takes the whole description as the key of a table, each time that a program runs. Most of its bytes
were that source, which nothing reads.
"""

import zlib
from collections.abc import Iterator
from typing import Final

_SOURCE: Final = (1, 1, 5)
"""Numbers of nested fields in jaxlib's `triton.proto`: a call, its kernel, and that kernel's source."""

_VARINT, _BYTES = 0, 2
_FIXED: Final = {1: 8, 5: 4}
_BEST: Final = 9


def shortened(description: bytes) -> bytes:
    """Returns a compressed description without the source; the same bytes if they are not compressed."""
    try:
        message = zlib.decompress(description)
    except zlib.error:
        return description
    return zlib.compress(_without(message, _SOURCE), _BEST)


def _without(message: bytes, path: tuple[int, ...]) -> bytes:
    """Returns a message of Protocol Buffers without the field at the end of a path of nested messages."""
    kept = []
    for number, start, value, end in _fields(message):
        if number != path[0]:
            kept.append(message[start:end])
        elif path[1:]:
            inner = _without(message[value:end], path[1:])
            kept.append(_varint(number << 3 | _BYTES) + _varint(len(inner)) + inner)
    return b"".join(kept)


def _fields(message: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yields the number of each field, and where the field, its value, and what comes after it begin."""
    at = 0
    while at < len(message):
        start = at
        tag, at = _read_varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, (_, at) = at, _read_varint(message, at)
        elif kind == _BYTES:
            length, value = _read_varint(message, at)
            at = value + length
        else:
            value, at = at, at + _FIXED[kind]
        yield number, start, value, at


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
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

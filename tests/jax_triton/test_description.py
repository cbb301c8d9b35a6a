"""Descriptions of launches lose the source of the kernel, and nothing else."""

import zlib

from pallas_kernels.parts.jax_triton.description import shortened


def field(number: int, value: int | bytes) -> bytes:
    """Returns a field of a message of Protocol Buffers, with a tag of one byte."""
    if isinstance(value, int):
        return bytes([number << 3]) + varint(value)
    return bytes([number << 3 | 2]) + varint(len(value)) + value


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def described(source: bytes) -> bytes:
    """Returns the description of a launch: a kernel, a grid, and parameters."""
    kernel = field(1, b"a_kernel") + field(2, 4) + field(4, b"machine code " * 300) + source + field(6, 90)
    call = field(1, kernel) + field(2, 1 << 20) + field(5, field(1, field(1, 0))) + field(5, field(3, 300))
    fixed = b"\x1d1234" + b"\x219.876543"
    return field(1, call) + field(3, b"metadata") + field(4, b"a name") + fixed


def test_the_source_is_left_out() -> None:
    found = shortened(zlib.compress(described(field(5, b"tt.func " * 1000))))
    assert zlib.decompress(found) == described(b"")


def test_what_has_no_source_stays() -> None:
    tuned = field(2, field(1, b"another kind of call"))
    for message in (described(b""), tuned, b""):
        assert zlib.decompress(shortened(zlib.compress(message))) == message


def test_what_is_not_compressed_stays() -> None:
    assert shortened(b"a description") == b"a description"

"""Descriptions of launches lose the source of the kernel, and nothing else."""

import zlib

import jax
import pytest

from pallas_kernels.parts.jax_triton.description import shortened, without_lines
from pallas_kernels.target import Target
from tests.jax_triton.machine_code import assembled, compiled, launches_of, needs_triton
from tests.jax_triton.small_launch import X, multiply_add

PTX = """//
.version 8.7
.target sm_90a
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 x
)
{
	.loc	1 11 0
$L__tmp0:
	.loc	1 12 3                          // kernel.py:12:3
	// begin inline asm
	ld.global.b32 %r1, [%rd1];  // a comment
	ret;
}
	.file	1 "kernel.py"
	.section	.debug_abbrev
	{
.b8 1
	}
"""
BARE = """.version 8.7
.target sm_90a
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 x
)
{
$L__tmp0:
	ld.global.b32 %r1, [%rd1];  // a comment
	ret;
}
"""


def field(number: int, value: int | bytes) -> bytes:
    """Returns a field of a message of Protocol Buffers, with a tag of one byte."""
    if isinstance(value, int):
        return bytes([number << 3]) + varint(value)
    return bytes([number << 3 | 2]) + varint(len(value)) + value


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def described(ptx: str, source: bytes) -> bytes:
    """Returns the description of a launch: a kernel, a grid, and parameters."""
    kernel = field(1, b"a_kernel") + field(2, 4) + field(4, ptx.encode()) + source + field(6, 90)
    call = field(1, kernel) + field(2, 1 << 20) + field(5, field(1, field(1, 0))) + field(5, field(3, 300))
    fixed = b"\x1d1234" + b"\x219.876543"
    return field(1, call) + field(3, b"metadata") + field(4, b"a name") + fixed


def test_the_source_is_left_out() -> None:
    found = shortened(zlib.compress(described(PTX, field(5, b"tt.func " * 1000))))
    assert zlib.decompress(found) == described(BARE, b"")


def test_what_has_no_source_stays() -> None:
    tuned = field(2, field(1, b"another kind of call"))
    for message in (described(BARE, b""), tuned, b""):
        assert zlib.decompress(shortened(zlib.compress(message))) == message


def test_what_is_not_compressed_stays() -> None:
    assert shortened(b"a description") == b"a description"


@needs_triton
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_machine_code_stays(target: str) -> None:
    from pallas_kernels.topk.jax_triton.launch import largest

    gpu, rows = Target.parse(target), jax.ShapeDtypeStruct((8, 512), "float32")
    launches = launches_of(lambda x: largest(x, number=4, target=gpu), rows)
    launches += launches_of(lambda x, y: multiply_add(x, y, target, True), X, X)
    assert len(launches) == 2
    for launch in launches:
        code = compiled(launch)
        bare = without_lines(code.ptx.encode())
        assert b".loc" in code.ptx.encode()
        assert b".loc" not in bare
        assert len(bare) < 0.6 * len(code.ptx)
        assert assembled(bare, gpu) == code.sass

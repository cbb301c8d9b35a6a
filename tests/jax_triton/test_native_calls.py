"""Launches as kernels of XLA's own: what is read of a description, and how sizes become constants in PTX."""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_kernels.parts.jax_triton import native_calls, typed_calls
from pallas_kernels.parts.jax_triton.native_calls import Native, native, with_constants
from pallas_kernels.parts.jax_triton.typed_calls import make_typed
from pallas_kernels.target import Target
from tests.jax_triton.machine_code import assembled, needs_triton

PTX = """.version 8.7
.target sm_90a
.visible .entry scale(
	.param .u64 .ptr .global .align 1 scale_param_0,
	.param .u32 scale_param_1,
	.param .u64 .ptr .global .align 1 scale_param_2,
	.param .u64 .ptr .global .align 1 scale_param_3
)
.reqntid 128
{
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<10>;
	ld.param.b64 	%rd1, [scale_param_0];
	ld.param.b32 	%r1, [scale_param_1];
	ld.param.b64 	%rd2, [scale_param_2];
	ret;
}
"""


def field(number: int, value: int | bytes) -> bytes:
    def varint(n: int) -> bytes:
        found = bytearray()
        while n > 127:
            found.append(n & 127 | 128)
            n >>= 7
        return bytes([*found, n])

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def description(parameters: Sequence[bytes], ptx: str = PTX, **more: int) -> bytes:
    kernel = (
        field(1, b"scale") + field(2, 4) + field(3, 256) + field(4, ptx.encode()) + field(5, b"ttir") + field(6, 90)
    )
    kernel += b"".join(field(int(name[1:]), n) for name, n in more.items())
    call = field(1, kernel) + field(2, 7) + field(3, 2) + field(4, 1)
    return field(1, call + b"".join(field(5, p) for p in parameters)) + field(4, b"scale")


ARRAY, SIZE = field(1, field(2, 16)), field(3, 300)


def test_a_kernel_of_a_description() -> None:
    found = native(description([ARRAY, SIZE, ARRAY]), arrays=2)
    assert found is not None
    assert found._replace(ptx="") == Native("scale", "", (7, 2, 1), 128, 256)
    assert "mov.b32 \t%r1, 300;" in found.ptx.replace("mov.b32\t", "mov.b32 \t")
    entry = found.ptx.partition(".entry")[2].partition(")")[0]
    assert [name in entry for name in ("param_0", "param_1", "param_2", "param_3")] == [True, False, True, False]


@pytest.mark.parametrize(
    ("given", "arrays"),
    [
        (description([ARRAY, SIZE, ARRAY]), 3),  # an operand that the kernel does not have
        (description([field(1, field(1, 64)), SIZE, ARRAY]), 2),  # an array that is to be zeroed
        (description([ARRAY, field(7, 1), ARRAY]), 2),  # a parameter of another kind
        (description([ARRAY, SIZE, ARRAY], f7=2), 2),  # a cluster
        (description([ARRAY, SIZE, ARRAY], f20=1), 2),  # something that is not known
        (description([ARRAY, SIZE, ARRAY], PTX.replace("ret", "ld.param.b64 %rd3, [scale_param_3];")), 2),  # scratch
        (description([ARRAY, SIZE, ARRAY], PTX.replace("ld.param.b32", "ld.param.v2.b32")), 2),
        (description([ARRAY, SIZE, ARRAY], PTX.replace("scale(", "other(")), 2),
        (field(2, b"autotuned"), 2),
    ],
)
def test_what_stays_a_foreign_call(given: bytes, arrays: int) -> None:
    assert native(given, arrays) is None


def test_negative_and_wide_sizes() -> None:
    found = with_constants(PTX.replace("ld.param.b32 \t%r1", "ld.param.u64 \t%rd9"), "scale", [None, -5, None])
    assert found is not None
    assert "mov.b64 \t%rd9, -5;" in found


@needs_triton
@pytest.mark.parametrize(("load", "constant"), [("s32", -5), ("u32", 2**32 - 5), ("b32", 2**32 - 5)])
def test_a_size_in_a_wider_register(load: str, constant: int) -> None:
    """A load of 32 bits may fill a register of 64, by its sign or by zeros; a move may not."""
    wide = PTX.replace("ld.param.b32 \t%r1", f"ld.param.{load} \t%rd9")
    found = with_constants(wide, "scale", [None, -5, None])
    assert found is not None
    assert f"mov.b64 \t%rd9, {constant};" in found
    assert "EXIT" in assembled(found.encode(), Target.parse("sm_90"))


def test_a_register_of_no_known_width() -> None:
    assert with_constants(PTX.replace(".reg .b32", ".reg .v3"), "scale", [None, 300, None]) is None


@pytest.mark.parametrize(("newest", "is_native"), [((8, 7), True), ((8, 6), False), ((0, 0), False), ((9, 0), True)])
def test_drivers(newest: tuple[int, int], is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls stay foreign where the driver is older than the PTX, or there is none."""
    monkeypatch.setattr(native_calls, "newest_ptx", lambda: newest)
    monkeypatch.setattr(typed_calls, "_has_handler", lambda: True)
    primitive = Primitive("launch_of_a_test")
    primitive.def_abstract_eval(lambda x: x)
    rule = jax.ffi.ffi_lowering("triton_kernel_call_ffi", operand_output_aliases={0: 0})

    def lower(ctx: mlir.LoweringRuleContext, x: object) -> object:
        results = rule(ctx, x, opaque=zlib.compress(description([ARRAY, SIZE, ARRAY])))
        make_typed(results)
        return results

    mlir.register_lowering(primitive, lower, platform="cuda")
    program = jax.jit(lambda x: primitive.bind(x + 1) * 2).trace(jnp.ones(3))
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert (f"@{native_calls.TARGET}(" in text) == is_native
    assert ("@triton_kernel_call_ffi(" in text) == (not is_native)
    assert "output_operand_alias" in text


def test_other_versions_of_jax_have_foreign_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_calls, "_VERSIONS", ((99, 0), (99, 1)))
    call: Any = None
    assert not native_calls.make_native(call, b"")

"""The Triton kernel that turns heads and stores keys and values, under the interpreter, against XLA's program."""

import functools

import jax
import jax.numpy as jnp
import pytest

from bijax.core.architecture import lowering_for
from bijax.ops.rotary.heads import rotate_and_store
from bijax.testing import assert_bits_equal
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.rotary import pallas_triton as triton
from pallas_kernels.rotary import portable
from tests.rotary.cases import case
from tests.tiers import full_only

SHAPES = ((5, 4, 2, 16), full_only((4, 3, 1, 80)), full_only((1, 1, 1, 256)))


@pytest.mark.parametrize("to_rotate", [full_only(False), True])
@pytest.mark.parametrize("dtype", ["bfloat16", full_only("float32"), full_only("float16")])
@pytest.mark.parametrize("shape", SHAPES)
def test_interpreted(shape: tuple[int, int, int, int], dtype: str, to_rotate: bool) -> None:
    arrays = case(shape, dtype, to_rotate=to_rotate, exact=True)
    found = jax.jit(functools.partial(triton.rotate_and_store, interpret=True))(*arrays)
    for a, b in zip(found, jax.jit(portable.rotate_and_store)(*arrays), strict=True):
        assert_bits_equal(a, b)


def test_what_is_served() -> None:
    heads, cos, sin, rows, keys, values = case((5, 4, 2, 16), "bfloat16")
    serves = triton.rotate_and_store.serves
    assert serves(heads, cos, sin, rows, keys, values)
    assert not serves(heads, cos, sin, rows, keys.astype(jnp.float16), values)
    assert not serves(heads, cos.astype(jnp.bfloat16), sin, rows, keys, values)
    assert not serves(*case((5, 4, 2, 24), "bfloat16"))
    assert not serves(*case((5, 1, 1, 272), "bfloat16"))
    with pytest.raises(UnsupportedError, match="a multiple of 16"):
        triton.rotate_and_store(*case((5, 4, 2, 24), "bfloat16"))


@pytest.mark.parametrize(("width", "x64"), [(16, False), (16, True), (24, False)])
def test_lowered_for_gpus(width: int, x64: bool) -> None:
    """The kernel, in place, where it serves; XLA's program with fences where it does not."""
    heads, cos, sin, rows, keys, values = case((6, 4, 2, width), "bfloat16")
    arrays = [x.reshape(2, 3, *x.shape[1:]) for x in (heads, cos, sin)]
    arrays += [rows, *(x.reshape(3, 3, *x.shape[1:]) for x in (keys, values))]
    with jax.enable_x64(x64), lowering_for("sm_90"):
        text = jax.jit(rotate_and_store).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert ("triton" in text) == (width == 16)
    assert text.count("output_operand_alias<") == (2 if width == 16 else 0)

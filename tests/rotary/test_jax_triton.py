"""The Triton kernel that turns heads and stores keys and values: which calls it serves, and how it is lowered."""

import jax
import jax.numpy as jnp
import pytest

from bijax.core.architecture import lowering_for
from bijax.ops.rotary.heads import rotate_and_store
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.target import Target
from tests.jax_triton.packages import needs_jax_triton
from tests.rotary.cases import case


@needs_jax_triton
def test_what_is_served() -> None:
    from pallas_kernels.rotary.jax_triton.launch import rotate_and_store as kernel

    heads, cos, sin, rows, keys, values = case((5, 4, 2, 16), "bfloat16")
    serves = kernel.serves
    assert serves(heads, cos, sin, rows, keys, values)
    assert not serves(heads, cos, sin, rows, keys.astype(jnp.float16), values)
    assert not serves(heads, cos.astype(jnp.bfloat16), sin, rows, keys, values)
    assert not serves(*case((5, 4, 2, 24), "bfloat16"))
    assert not serves(*case((5, 1, 1, 272), "bfloat16"))
    with pytest.raises(UnsupportedError, match="a multiple of 16"):
        kernel(*case((5, 4, 2, 24), "bfloat16"), target=Target.parse("sm_90"))


@needs_jax_triton
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

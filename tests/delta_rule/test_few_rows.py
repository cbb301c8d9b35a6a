"""The Mosaic kernel for few tokens: its numbers lane by lane in NumPy, and programs for a GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.delta_rule.hopper.few import few_rows
from tests.jax_triton.interpreter_process import run_interpreted
from tests.jax_triton.machine_code import needs_triton


@needs_triton
@pytest.mark.tier("full", fast=("1-64-",))
@pytest.mark.parametrize(
    ("tokens", "columns", "slots"),
    [
        (1, 32, ""),
        (1, 32, "slots"),
        (1, 64, ""),
        (1, 128, "slots"),
        (3, 32, ""),
        (4, 128, ""),
        (8, 32, "slots"),
        (8, 128, "slots"),
    ],
)
def test_bits_are_those_of_the_triton_kernels(tokens: int, columns: int, slots: str) -> None:
    """In Triton's interpreter; an address outside the arrays is an error."""
    arguments = (str(x) for x in (tokens, columns, int(bool(slots))))
    output = run_interpreted("-m", "tests.delta_rule.interpreted_few_rows", *arguments)
    assert output.split()[-1] == "compared"


@pytest.mark.parametrize("columns", [32, 64, 128])
@pytest.mark.parametrize("in_slots", [False, True])
def test_the_kernel_lowers(columns: int, in_slots: bool) -> None:
    b, j, h, size, slots = 2, 2, 4, 128, 5 if in_slots else 2

    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    heads, line = shape(b, 3, j, size), shape(b, 3, h, dtype=jnp.float32)
    tokens = heads, heads, shape(b, 3, h, size), line, line
    triangle = (32, 65) if in_slots else (64, 64)
    wide = [shape(slots, h, *last, dtype=jnp.float32) for last in ((size, size), triangle, (64,))]
    kept = wide[0], shape(slots, j, 64, size), shape(slots, h, 64, size), *wide[1:]
    places = (shape(b, dtype=jnp.int32),) * 4

    def run(*arrays: Any) -> Any:
        return few_rows(*arrays, in_slots=in_slots, columns=columns, scale=0.1)

    text = jax.jit(run).trace(tokens, kept, places).lower(lowering_platforms=("cuda",)).as_text()
    assert "delta_rule_few_rows" in text
    assert "mma.sync" in text

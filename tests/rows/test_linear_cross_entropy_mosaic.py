"""The kernels of `linear_cross_entropy`'s gradients for Hopper, interpreted, and the program that a GPU gets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.dispatch.linear_cross_entropy import columns_at_once as steps
from bijax.testing import assert_bits_equal
from pallas_kernels.contract import PartsContract
from pallas_kernels.cross_entropy import hopper
from pallas_kernels.matmul.hopper import parts
from pallas_kernels.matmul.hopper.parts_in_turn import add_chains, chains_of_parts
from tests.mosaic import Races, interpreter
from tests.tiers import full_only

pytestmark = pytest.mark.usefixtures("hopper")

ROWS, COLUMNS = 16, 4300
"""Two blocks of a row's columns, the last of which is not whole."""


def given() -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32) * 3
    x[3, :7], x[4], x[5, 9] = np.inf, np.nan, -np.inf
    labels = rng.integers(0, COLUMNS, (ROWS, 1)).astype(np.int32)
    labels[:6, 0] = 0, COLUMNS - 1, -1, COLUMNS, -1, 4096
    m = np.max(x, 1, keepdims=True)
    with np.errstate(invalid="ignore"):
        log_sum = np.log(np.exp(x - m).sum(1, keepdims=True))
    return tuple(jnp.asarray(a) for a in (x, labels, m, log_sum, rng.standard_normal((ROWS, 1)).astype(np.float32)))


@pytest.mark.parametrize("count", [2, full_only(3)])
def test_limbs_of_the_gradient_of_some_columns(count: int, races: Races) -> None:
    """They are the limbs of the whole gradient's columns, wherever the labels are."""
    x, labels, *others = given()
    whole = hopper.cross_entropy_gradient(x, labels, *others, z_loss=0.01, interpret=interpreter())
    for first, last in ((0, COLUMNS), (0, 4096), (4096, COLUMNS)):
        found = hopper.cross_entropy_gradient_of_parts(
            x[:, first:last],
            labels,
            labels - first,
            *others,
            columns=COLUMNS,
            z_loss=0.01,
            contract=PartsContract(count),
            interpret=interpreter(),
        )
        assert_bits_equal(found, parts._interleaved(whole[:, first:last], count, ROWS), err_msg=f"{first} to {last}")
    assert not races()


@pytest.mark.parametrize("transpose_w", [full_only(False), True])
def test_chains_that_continue(transpose_w: bool, races: Races) -> None:
    """The interpreter adds the sum before last, so these bits are its own; tests/rows has those of a GPU."""
    rng, contract = np.random.default_rng(0), PartsContract(2)
    x = parts._interleaved(jnp.asarray(rng.standard_normal((32, 144)), jnp.float32), 2, 16)
    w = jnp.asarray(rng.standard_normal((72, 144) if transpose_w else (144, 72)), jnp.bfloat16)
    total, pieces = jnp.zeros((64, 72), jnp.float32), ((0, 80), (80, 144))
    for start, stop in pieces:
        part = w[:, start:stop] if transpose_w else w[start:stop]
        total = chains_of_parts(
            x[:, start:stop], part, total, contract=contract, transpose_w=transpose_w, interpret=interpreter()
        )
    found = add_chains(total, contract=contract, out_dtype=jnp.float32)
    expected = parts.matmul_of_parts(x, w, contract=contract, transpose_w=transpose_w, interpret=interpreter())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert not races()


@pytest.mark.parametrize("transpose_w", [False, True])
def test_a_gpu_adds_no_gradient_of_all_weights_in_float32(transpose_w: bool) -> None:
    """Only float32, of which no product continues a sum, is computed a few rows at a time."""
    rows, width, columns = 4096, 128, 131072

    def arrays_of(dtype: str) -> str:
        shape = (columns, width) if transpose_w else (width, columns)
        x, w, labels = ((rows, width), dtype), (shape, dtype), ((rows,), "int32")
        loss = jax.grad(lambda *a: bijax.linear_cross_entropy(*a, transpose_w=transpose_w).sum(), (0, 1))
        with bijax.lowering_for("sm_90"):
            program = jax.jit(loss).trace(*(jax.ShapeDtypeStruct(*a) for a in (x, w, labels)))
            text = program.lower(lowering_platforms=("cuda",)).as_text()
        return "yes" if f"tensor<{'x'.join(map(str, shape))}xf32>" in text else "no"

    assert (arrays_of("bfloat16"), arrays_of("float32")) == ("no", "yes")


def test_steps_over_columns() -> None:
    """They have whole rows of 128 bytes, and equal steps where a divisor is near."""
    assert steps(128256, 2048) == (2, 64128)
    assert steps(128256, 8192) == (6, 21376)
    assert steps(32000, 16384) == (4, 8000)
    assert steps(50257, 8192) == (3, 12608)
    assert steps(32000, 1024) == (0, 32000)
    for columns in (151936, 50257, 256000, 128256, 99):
        for rows in (1, 5000, 16384):
            count, wide = steps(columns, rows)
            assert wide % 64 == 0 or count == 0
            assert 0 <= columns - count * wide <= max(wide, columns if count == 0 else 0)

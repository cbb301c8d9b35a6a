"""Drawing tokens: the portable form, the bound by which the Triton kernel skips columns, what the kernel refuses."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax.sampling._arithmetic import Arithmetic
from bijax.sampling._draw import draw as draw_anywhere
from pallas_kernels.contract import GumbelContract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.target import Target
from tests.jax_triton.interpreter_process import run_interpreted
from tests.jax_triton.machine_code import needs_triton
from tests.sampling.draw_cases import given, wrong

if importlib.util.find_spec("triton"):
    from pallas_kernels.sampling.jax_triton.launch import draw

AMPERE = Target.parse("sm_80")


def test_the_portable_form_draws_the_same() -> None:
    """Where the two differ by rounding alone; they are not promised to."""
    arguments = given()
    tokens = np.asarray(draw_anywhere(*map(jnp.asarray, arguments), Arithmetic()))
    assert wrong(tokens, arguments) == []


@needs_triton
def test_no_score_is_above_its_bound() -> None:
    output = run_interpreted("-m", "tests.sampling.compare_bounds")
    assert output.split()[-1] == "compared"


@needs_triton
def test_no_rows() -> None:
    assert draw(*(jnp.asarray(a[:0]) for a in given()), target=AMPERE).shape == (0,)


@needs_triton
def test_another_contract_is_refused() -> None:
    other = functools.partial(draw, contract=GumbelContract(version=1), target=AMPERE)
    with pytest.raises(UnsupportedError, match="gumbel/v1"):
        jax.eval_shape(other, *map(jnp.asarray, given()))

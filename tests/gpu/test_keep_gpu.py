"""The evidence of `tests/transform/test_keep.py` on a GPU, where scatters and sorts are other programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.transform.rules._ordered import RACING
from tests.bitwise import scatter_cases
from tests.transform import choices

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("columns", [1, 7, 300, 5000])
@pytest.mark.parametrize("name", choices.CHOICES)
def test_choices(name: str, columns: int) -> None:
    """What is kept, as XLA's own; scatters that XLA:GPU leaves to a race, as they are replaced."""
    choice = choices.CHOICES[name]
    choices.check_choices(jax.jit(bijax.invariant(choice) if name in RACING else choice), columns)


@pytest.mark.parametrize("name", scatter_cases.CASES)
def test_scatters_have_the_bits_of_the_cpu(name: str) -> None:
    scatter_cases.check_bits(name, bijax.invariant)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "bool"])
def test_the_last_of_many_wins(dtype: str) -> None:
    """Thousands of updates for each place; NumPy writes them in order."""
    rng = np.random.default_rng(0)
    places = rng.integers(0, 8, 20000)
    rows = rng.integers(0, 2 if dtype == "bool" else 100, (20000, 33))
    expected = np.zeros((8, 33))
    expected[places] = rows
    written = jax.jit(bijax.invariant(lambda x, i, u: x.at[i].set(u)))
    for _ in range(3):
        actual = written(jnp.zeros((8, 33), dtype), jnp.asarray(places), jnp.asarray(rows).astype(dtype))
        assert (np.asarray(actual.astype("float32")) == expected).all()

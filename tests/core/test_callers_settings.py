"""What the library computes for itself does not depend on what its caller has set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from bijax.testing import assert_bits_equal
from tests import fake_devices
from tests.arrays import on_device
from tests.core.callers_settings import SETTINGS

TOGETHER = (
    *("set_mesh", "x64", "promotion", "rank_promotion", "precision", "checking_leaks", "nans", "key_reuse"),
    *("no_narrow_sums", "threefry"),
)


@pytest.mark.tier("full", fault=("together",))
@pytest.mark.parametrize("names", [["+".join(TOGETHER)], list(SETTINGS)], ids=["together", "each"])
def test_bits_under_settings(names: list[str]) -> None:
    """The first product of its shape inside of the settings, later ones outside, and one that never saw them."""
    assert fake_devices.run("tests.core.callers_settings", *names) == names


@pytest.mark.tier("full", fault=("few",))
@pytest.mark.parametrize("which", ["few", "everything"])
def test_arrays_of_explicit_meshes(which: str) -> None:
    assert fake_devices.run("tests.core.explicit_meshes", which) == ["held"]


def test_checks_for_nans_and_infinities() -> None:
    """A kernel cannot be taken to pieces: what has no such value passes, and what has one raises as JAX does."""
    x, w = jnp.ones((2, 24)), jnp.ones((24, 8))
    query = on_device(np.random.default_rng(0).standard_normal((1, 3, 2, 8)), jnp.float32)
    expected = bijax.dot_product_attention(query, query, query, is_causal=True)
    with jax.debug_infs(True):
        assert_bits_equal(bijax.dot_product_attention(query, query, query, is_causal=True), expected)
        with pytest.raises(FloatingPointError, match="inf"):
            bijax.matmul(x.at[0, 0].set(3e38), w * 1e10)
    bad = x.at[1, 2].set(jnp.nan)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        bijax.matmul(bad, w)

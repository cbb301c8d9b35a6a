"""The comparison of lowered programs: names and lines do not count, arithmetic does, inside of kernels too."""

import jax.numpy as jnp
import numpy as np
import pytest

import bijax
from tests.goldens.lowered import TARGETS, digest

X = np.zeros((40, 128), np.float32)


def first(x):
    return bijax.matmul(x, x.T) * 2.0


def second(x):
    # The same program at another place.
    return bijax.matmul(x, x.T) * 2.0


@pytest.mark.parametrize("target", TARGETS)
def test_names_and_places_do_not_count(target):
    assert digest((first, (X,), False), target) == digest((second, (X,), False), target)


@pytest.mark.parametrize("target", TARGETS)
def test_arithmetic_counts(target):
    """The control: a constant, and the contract of the kernel alone."""
    others = lambda x: bijax.matmul(x, x.T) * 3.0, lambda x: bijax.matmul(x, x.T, split_k=2) * 2.0
    found = {digest((f, (X,), False), target) for f in (first, *others)}
    assert len(found) == 3


def test_kernels_count():
    """The control: programs that differ inside of a kernel alone."""
    x = jnp.zeros((40, 128), jnp.bfloat16)
    found = {digest((lambda x, e=e: bijax.rms_norm(x, eps=e), (x,), False), "sm_90") for e in (1e-5, 1e-6)}
    assert len(found) == 2


def test_errors_are_told_apart():
    assert digest((lambda x: bijax.matmul(x, x), (X,), False), "cpu") == "ValueError"

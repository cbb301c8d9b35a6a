"""Fused chains in NumPy, with which forms of products are compared: rounded once, wherever the sum lies."""

from fractions import Fraction

import jax
import numpy as np
import pytest

from bijax.testing import assert_bits_equal
from pallas_kernels.contract import MatmulContract
from pallas_kernels.matmul.cpu import verify
from pallas_kernels.matmul.cpu.exact import fused_chains, rounded_sum


def nearest(exact: Fraction) -> np.float32:
    """Rounds to the nearest float32, ties to the even one."""
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(s * np.inf)) for s in (-1, 1)] + [guess]
    return min(around, key=lambda y: (abs(Fraction(float(y)) - exact), int(y.view(np.uint32)) & 1))


def test_a_sum_beside_the_middle_is_rounded_once() -> None:
    """Rounded to float64 first, 1 + 2**-24 + 2**-60 lies in the middle, and would go to the even number 1."""
    terms = [(s * a, s * b) for s in (1, -1) for a in (1.0, 1 + 2.0**-23) for b in _beside_the_middle()]
    a, b = (np.array(x) for x in zip(*terms, strict=True))
    wanted = np.array([nearest(Fraction(x) + Fraction(y)) for x, y in terms])
    assert_bits_equal(rounded_sum(a, b), wanted)
    # The control: rounded twice.
    assert ((a + b).astype(np.float32).view(np.uint32) != wanted.view(np.uint32)).any()


def _beside_the_middle() -> list[float]:
    middle = 2.0**-24
    return [middle, middle + 2.0**-70, middle - 2.0**-70, middle + 2.0**-60, middle + 2.0**-52, 0.0, 2.0**-30]


def test_chains_are_rounded_once_at_each_step() -> None:
    rows, weights = verify.probe_rows(7), verify.probe_weights(7, 5, False)
    wanted = np.zeros((3, 5), np.float32)
    for (i, j), _ in np.ndenumerate(wanted):
        blocks = []
        for start in (0, 3, 6):
            total = np.float32(0)
            for k in range(start, min(7, start + 3)):
                total = nearest(Fraction(float(rows[i, k])) * Fraction(float(weights[k, j])) + Fraction(float(total)))
            blocks.append(total)
        wanted[i, j] = (blocks[0] + blocks[1]) + blocks[2]
    assert_bits_equal(fused_chains(rows, weights, 3), wanted)


@pytest.mark.parametrize("k_block", [33, 192])
def test_the_compiled_reference_makes_the_same_chains(k_block: int) -> None:
    contract = MatmulContract(k_block)
    rows, weights = verify.probe_rows(333), verify.probe_weights(333, 40, False)
    assert verify._compiler_fuses()
    assert_bits_equal(verify._compiled_products(rows, weights, contract), fused_chains(rows, weights, k_block))


def test_a_compiler_that_does_not_fuse_is_found_out() -> None:
    """Then the compiled reference says what all shapes have to give."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        verify._compile_reference.cache_clear()
        assert not verify._compiler_fuses.__wrapped__()
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
        verify._compile_reference.cache_clear()


def test_one_wrong_row_or_column_is_seen() -> None:
    k, contract = 40, MatmulContract(40)
    for n, rows in ((5, 7), (verify.KINDS_OF_COLUMNS + 9, 8)):
        kinds = (1 + np.arange(rows)) % 3
        good = fused_chains(verify.probe_rows(k)[kinds], verify.probe_weights(k, n, False), 40)
        assert verify.gives_expected(good, k, contract, first=1)
        assert not verify.gives_expected(good, k, contract, first=2)
        for place in ((0, 0), (rows - 1, 0), (0, n - 1), (rows - 1, n - 1)):
            wrong = good.copy()
            wrong[place] = np.nextafter(wrong[place], np.float32(np.inf))
            assert not verify.gives_expected(wrong, k, contract, first=1)

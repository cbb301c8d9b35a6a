"""The products of attention on a CPU are the chains that its contract names, whatever their sizes."""

import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax import lax

from bijax.testing import assert_bits_equal, bits
from pallas_kernels.attention.programs import WITH_KEYS, WITH_VALUES
from pallas_kernels.contract import SCORE_BLOCK
from pallas_kernels.matmul.cpu.exact import fused_chains
from pallas_kernels.parts.xla.fused_chain import fused_dot
from pallas_kernels.parts.xla.tiles import DimensionNumbers, isolate
from tests.tiers import tiered

Product = Callable[[jax.Array, jax.Array, DimensionNumbers], jax.Array]

# Rows, length of the sum, columns. XLA runs some sizes of each kind in another order.
OF_VALUES = [
    (rows, keys, columns)
    for keys in (1, 7, 33, 64, 128)
    for columns in (1, 8, 16, 33, 48, 80, 128, 200, 512)
    for rows in (2, 3, 16, 32, 33, 64, 256)
]
OF_SCORES = [
    (rows, size, keys)
    for size in (1, 8, 24, 80, 256, 320, 512, 576)
    for keys in (64, 128)
    for rows in (2, 16, 33, 64, 1024)
]


def differing(product: Product, sizes: tuple[int, int, int], dimensions: DimensionNumbers) -> int:
    """Returns how many numbers of a compiled product are not those of fused chains."""
    rng = np.random.default_rng(sizes)
    (rows, length, columns), heads = sizes, 2
    x = rng.standard_normal((1, heads, rows, length)).astype(np.float32)
    y = rng.standard_normal((1, heads, length, columns)).astype(np.float32)
    axes = (0, 2, 1, 3) if dimensions == WITH_VALUES else (0, 3, 1, 2)
    found = jax.jit(lambda x, y: product(*isolate(x, y), dimensions))(x, y.transpose(axes))
    wanted = np.stack([fused_chains(a, b, SCORE_BLOCK) for a, b in zip(x[0], y[0], strict=True)])
    return int(np.count_nonzero(bits(np.asarray(found)[0]) != bits(wanted)))


ours = functools.partial(fused_dot, block=SCORE_BLOCK)


@pytest.mark.parametrize("sizes", tiered(OF_VALUES, fast=[(2, 128, 8), (64, 128, 80), (16, 128, 512)]))
def test_products_with_values(sizes: tuple[int, int, int]) -> None:
    assert differing(ours, sizes, WITH_VALUES) == 0


@pytest.mark.parametrize("sizes", tiered(OF_SCORES, fast=[(16, 80, 128), (2, 576, 128)]))
def test_scores(sizes: tuple[int, int, int]) -> None:
    assert differing(ours, sizes, WITH_KEYS) == 0


def test_control_plain_products_are_no_chains() -> None:
    """The sizes of the tests above are among those that XLA sums in another order, (2, 128, 8) on some processors."""
    plain = functools.partial(lax.dot_general, precision=lax.Precision.HIGHEST)
    for sizes in ((64, 128, 80), (16, 128, 512)):
        assert differing(plain, sizes, WITH_VALUES) > 0


def test_sizes_without_elements() -> None:
    for shapes in (((0, 3), (3, 2)), ((2, 0), (0, 3)), ((2, 3), (3, 0))):
        x, y = (np.ones(shape, np.float32) for shape in shapes)
        assert_bits_equal(ours(x, y, (((1,), (0,)), ((), ()))), x @ y)

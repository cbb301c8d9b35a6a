"""Chains of fused multiply-adds in NumPy, bit for bit, without a compiler.

A product of two float32 numbers is exact in float64, and so, for nearly every sum, is rounding it to float32
afterwards: double rounding differs only where the float64 sum lies halfway between two float32 numbers.
"""

import numpy as np

_BELOW_FLOAT32 = (1 << 29) - 1
_HALF_WAY = 1 << 28


def fused_chains(rows: np.ndarray, weights: np.ndarray, k_block: int) -> np.ndarray:
    """Multiplies rows by weights in a contract's order: a fused chain per block of K, blocks added in ascending order.

    Args:
        rows: (M, K) float32.
        weights: (K, N) float32. No nonzero sum may be subnormal.
        k_block: Elements of K per block; the last one may be shorter.

    Returns:
        (M, N) float32.

    Example:
        >>> fused_chains(np.float32([[3, 1]]), np.float32([[2], [0.5]]), 2).tolist()
        [[6.5]]
    """
    (m, k), n = rows.shape, weights.shape[1]
    cut = k - k % k_block
    total = None
    for first, last, length in ((0, cut, k_block), (cut, k, k - cut)):
        if first == last:
            continue
        left = rows[:, first:last].reshape(m, -1, length).transpose(2, 1, 0)[..., None]
        right = weights[first:last].reshape(-1, length, n).transpose(1, 0, 2)[:, :, None]
        for partial in _chains(left, right):
            total = partial if total is None else total + partial
    return np.zeros((m, n), np.float32) if total is None else total


def _chains(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(K, blocks, M, 1), (K, blocks, 1, N): the chains (blocks, M, N), all advanced step by step."""
    total = np.zeros(np.broadcast_shapes(left.shape, right.shape)[1:], np.float32)
    for x, w in zip(left, right, strict=True):
        product = x.astype(np.float64) * w
        total = rounded_sum(product, total.astype(np.float64))
    return total


def rounded_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the float64 sum rounded to float32 once.

    Args:
        a: float64.
        b: float64 of the same shape; no nonzero sum may be a subnormal float32 number.
    """
    total = a + b
    pattern = total.view(np.int64)
    doubtful = (pattern & _BELOW_FLOAT32) == _HALF_WAY
    if doubtful.any():
        rest = total - a
        error = (a - (total - rest)) + (b - rest)
        # One step towards the exact sum leaves the midpoint on the correct side.
        step = np.where((error > 0) == (total > 0), 1, -1)
        pattern += np.where(doubtful & (error != 0), step, 0)
    return total.astype(np.float32)

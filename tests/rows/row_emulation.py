"""The row operations in numpy, to the bit: float32 operations in the order of `RowContract`."""

import numpy as np

LANES = 128
ONE = np.float32(1)


def add_row(x: np.ndarray) -> np.ndarray:
    """Adds the rows of x (M, C) float32; returns (M, 1)."""
    m, c = x.shape
    width = LANES if c < 1024 else min(8192, 2 ** (c.bit_length() - 1))
    blocks = np.zeros((m, -(-c // width), width), np.float32)
    blocks.reshape(m, -1)[:, :c] = x
    lanes = blocks[:, 0]
    for i in range(1, blocks.shape[1]):
        lanes = lanes + blocks[:, i]
    return halve(halve(lanes.reshape(m, -1, LANES))[..., 0])


def halve(x: np.ndarray) -> np.ndarray:
    """Adds along the last axis by the halving tree."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def mean_row(x: np.ndarray) -> np.ndarray:
    return add_row(x) / np.float32(x.shape[1])


def variance(x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float32)
    d = wide - mean_row(wide)
    return mean_row(d * d).astype(x.dtype)


def rms_norm(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    wide = x.astype(np.float32)
    factor = ONE / np.sqrt(mean_row(wide * wide) + np.float32(eps))
    return (wide * factor * w.astype(np.float32)).astype(x.dtype)


def rms_norm_gradient(x: np.ndarray, w: np.ndarray, eps: float, g: np.ndarray) -> np.ndarray:
    wide, gw = x.astype(np.float32), g.astype(np.float32) * w.astype(np.float32)
    factor = ONE / np.sqrt(mean_row(wide * wide) + np.float32(eps))
    normal = wide * factor
    return (factor * (gw - normal * mean_row(gw * normal))).astype(x.dtype)


def layer_norm(x: np.ndarray, w: np.ndarray, b: np.ndarray, eps: float) -> np.ndarray:
    wide = x.astype(np.float32)
    d = wide - mean_row(wide)
    factor = ONE / np.sqrt(mean_row(d * d) + np.float32(eps))
    return (d * factor * w.astype(np.float32) + b.astype(np.float32)).astype(x.dtype)


def layer_norm_gradient(x: np.ndarray, w: np.ndarray, eps: float, g: np.ndarray) -> np.ndarray:
    wide, gw = x.astype(np.float32), g.astype(np.float32) * w.astype(np.float32)
    d = wide - mean_row(wide)
    factor = ONE / np.sqrt(mean_row(d * d) + np.float32(eps))
    normal = d * factor
    return (factor * (gw - mean_row(gw) - normal * mean_row(gw * normal))).astype(x.dtype)


def softmax_gradient(y: np.ndarray, g: np.ndarray) -> np.ndarray:
    wide, g = y.astype(np.float32), g.astype(np.float32)
    return (wide * (g - add_row(wide * g))).astype(y.dtype)

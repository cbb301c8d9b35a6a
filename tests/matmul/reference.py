"""The contract of matmul on a CPU, in NumPy."""

import numpy as np

from pallas_kernels.contract import MatmulContract


def emulate(x: np.ndarray, w: np.ndarray, contract: MatmulContract) -> np.ndarray:
    """The contract in numpy: fused chains over the blocks of K, folded upwards.

    The float64 product of two float32 is exact and its sum with a float32 rounds only in the 54th bit; rounding that
    to float32 gives the fused result but for rare double roundings, which the fixed data below do not meet.
    """
    total = None
    for start in range(0, x.shape[1], contract.k_block):
        chain = np.zeros((x.shape[0], w.shape[1]), np.float32)
        for k in range(start, min(x.shape[1], start + contract.k_block)):
            chain = (x[:, k : k + 1].astype(np.float64) * w[k] + chain).astype(np.float32)
        total = chain if total is None else total + chain
    assert total is not None
    return total

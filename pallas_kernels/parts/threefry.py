"""Random words by counting."""

import jax
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry(key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the two words that Threefry-2x32 with 20 rounds makes of a key and a counter, uint32 that broadcast.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC11).
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = (y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation))
            y = x ^ y
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x, y

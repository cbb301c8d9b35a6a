"""Sampling as SGLang's deterministic inference does it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.checks import describe, float_array, integer_array
from bijax.sampling._arithmetic import Arithmetic, element
from bijax.sampling._order import first_largest

_OP = "bijax.sampling.multinomial_with_seed"
_BITS = 24
_EPSILON = np.float32(1e-9)


def multinomial_with_seed(inputs: Any, seed: Any, positions: Any) -> jax.Array:
    """Samples one column of each row of probabilities, with the hash of SGLang's function of this name.

    For a row with seed s and position p, in integers of 64 bits that wrap around::

        step = (s * 19349663) ^ (p * 73856093)
        u[c] = (((step * 8589934591) ^ (c * 479001599)) mod 2**24) / 2**24
        column = first argmax of log(inputs[c] + 1e-9) - log(-log(u[c] + 1e-9) + 1e-9)

    The remainder is not negative, as in PyTorch and NumPy. It needs only the low 24 bits of every product, so 32 bits
    with wrap-around give the same, whatever the integer types of seed and position (SGLang's seeds are of 32 bits),
    and so do seeds that differ by a multiple of 2**24.

    This is here for comparison; `bijax.sampling.sample` has the better random numbers: in this hash the bits of
    u[c] ^ u[d] are the same for all seeds and positions, so that the noise of two columns is not independent and
    samples do not follow the distribution.

    Args:
        inputs: (n, m) float32, bfloat16 or float16 probabilities; computed with as float32.
        seed: (n,) integers.
        positions: (n,) integers.

    Returns:
        (n, 1) int32, the lower column among equals; -1 for a row with a nan.

    Raises:
        TypeError: If a dtype is unsupported.
        ValueError: If a shape does not fit.

    Guarantee: row-invariant.

    Source: "multinomial_with_seed" of SGLang (https://github.com/sgl-project/sglang/pull/10678).

    Example:
        >>> multinomial_with_seed(jnp.array([[0.0, 1.0, 0.0]]), [42], [7]).tolist()
        [[1]]
    """
    probabilities = float_array(_OP, "inputs", inputs)
    if probabilities.ndim != 2 or probabilities.shape[1] < 1:
        raise ValueError(f"{_OP}: inputs must have the shape (n, m), got {describe(probabilities)}.")
    rows, columns = probabilities.shape
    step = _low(_words("seed", seed, rows), 19349663) ^ _low(_words("positions", positions, rows), 73856093)
    index = jnp.arange(columns, dtype=jnp.uint32)
    words = (_low(step, 8589934591)[:, None] ^ _low(index, 479001599)[None]) & np.uint32(2**_BITS - 1)
    scores = Arithmetic().each(_perturb, probabilities.astype(jnp.float32), words)
    return first_largest(scores)[:, None]


def _low(x: jax.Array, factor: int) -> jax.Array:
    return x * np.uint32(factor % 2**32)


def _words(name: str, value: Any, rows: int) -> jax.Array:
    array = integer_array(_OP, name, value, on_host=False)
    if array.shape != (rows,):
        raise ValueError(f"{_OP}: {name} must have the shape ({rows},), got {describe(array)}.")
    # NumPy wraps around where JAX would refuse an integer of 64 bits.
    return jnp.asarray(array.astype(np.uint32))


@element
def _perturb(probability: jax.Array, word: jax.Array) -> jax.Array:
    uniform = word.astype(jnp.float32) * np.float32(2**-_BITS)
    gumbel = -jnp.log(-jnp.log(uniform + _EPSILON) + _EPSILON)
    return jnp.log(probability + _EPSILON) + gumbel

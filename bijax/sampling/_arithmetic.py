"""The floating-point arithmetic that sampling is built on; all else in it is integers, comparisons and choices."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from bijax.ops.elementwise.call import elementwise
from bijax.ops.rows.reductions import sum as invariant_sum
from bijax.ops.rows.softmax import log_softmax


@dataclass(frozen=True)
class Arithmetic:
    """Element-wise functions, sums and log-softmax over the last axis.

    Attributes:
        invariant: Whether the bits of a row depend on that row alone.
    """

    invariant: bool = True

    def each(self, fn: Callable[..., Any], *arrays: Any) -> Any:
        """Calls an element-wise function of arrays that broadcast."""
        return (_ELEMENTWISE[fn] if self.invariant else fn)(*arrays)

    def sum(self, x: jax.Array) -> jax.Array:
        """Returns the sums of rows (R, V), (R, 1)."""
        return invariant_sum(x, axis=-1, keepdims=True) if self.invariant else jnp.sum(x, axis=-1, keepdims=True)

    def log_softmax(self, x: jax.Array) -> jax.Array:
        """Returns the log-probabilities of rows (R, V)."""
        return log_softmax(x) if self.invariant else jax.nn.log_softmax(x)


_ELEMENTWISE: dict[Callable[..., Any], Callable[..., Any]] = {}


def element[F: Callable[..., Any]](fn: F) -> F:
    """Marks a function passed to `Arithmetic.each`, so that its program is cached."""
    _ELEMENTWISE[fn] = elementwise(fn)
    return fn

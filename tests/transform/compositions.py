"""Programs in which the transform meets JAX's other transforms, and how their batches are compared."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import bijax
from bijax.testing import bits
from tests.transform.lowered import unmarked_sums

Function = Callable[..., Any]
Transform = Callable[[Function], Function]

BATCH = 33
"""Size of the batch that the others are compared with."""

SIZES = (1,)
"""Sizes that are compared with it."""

EXAMPLES = 5
"""Number of examples in a padded batch."""


@dataclasses.dataclass(frozen=True)
class Composition:
    """A program with the transform somewhere in it.

    Attributes:
        build: Makes the program, given the transform.
        params: Its first argument.
        data: Rows for its second argument, `BATCH` of them.
        padded: Whether the result is a sum over the examples, of which there are always `EXAMPLES` in padded batches;
            otherwise its leaves have one row for each example.
        no_control: Why plain JAX may have the same bits for all batch sizes, or "" where it changes some.
    """

    build: Callable[[Transform], Function]
    params: Any
    data: jax.Array
    padded: bool = False
    no_control: str = ""

    def arguments(self, size: int) -> tuple[Any, ...]:
        """Returns the program's arguments for a batch size."""
        if not self.padded:
            return self.params, self.data[:size]
        size = max(size, EXAMPLES)
        mask = jnp.arange(size) < EXAMPLES
        rows = jnp.where(mask.reshape(-1, *[1] * (self.data.ndim - 1)), self.data[:size], 0)
        return self.params, rows, mask.astype(jnp.float32)

    def differing_sizes(self, program: Function) -> list[int]:
        """Returns the batch sizes at which a bit differs from the batch of `BATCH` examples."""
        reference = [bits(x) for x in jax.tree.leaves(program(*self.arguments(BATCH)))]
        if not self.padded:
            assert all(len(x) == BATCH for x in reference)
        found = []
        for size in SIZES:
            leaves = [bits(x) for x in jax.tree.leaves(program(*self.arguments(size)))]
            same = (np.array_equal(x, r if self.padded else r[:size]) for x, r in zip(leaves, reference, strict=True))
            if not all(same):
                found.append(size)
        return found

    def check(self, transform: Transform) -> None:
        """Asserts that the transform leaves no sum to the compiler, and that no batch size changes a bit."""
        program = self.build(transform)
        assert unmarked_sums(program, *self.arguments(BATCH)) == []
        assert self.differing_sizes(program) == []

    def check_with_control(self) -> None:
        """Asserts that the transform keeps all bits, and that the program without it does not."""
        self.check(bijax.invariant)
        self.check_control()

    def check_control(self) -> None:
        """Asserts that the same program, not transformed, leaves sums to the compiler and changes bits."""
        program = self.build(lambda f: f)
        assert unmarked_sums(program, *self.arguments(BATCH))
        assert self.no_control or self.differing_sizes(program)


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    """Returns normally distributed numbers."""
    return jnp.asarray((np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32))


DIM, HIDDEN = 300, 77
PARAMS = {
    "w1": normal(1, DIM, HIDDEN, scale=0.1),
    "b1": normal(2, HIDDEN),
    "w2": normal(3, HIDDEN, DIM, scale=0.1),
    "g": normal(4, DIM),
}
X = normal(5, BATCH, DIM)


def mlp(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Layer norm, two products and a softmax, of lengths for which plain JAX changes bits."""
    mean = x.mean(-1, keepdims=True)
    y = (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6) * p["g"]
    return x + jax.nn.softmax(y @ p["w1"] + p["b1"], -1) @ p["w2"]


def squares(fn: Function) -> Function:
    """Returns the sum of the squares of a function's results, a loss."""
    return lambda params, x: (fn(params, x) ** 2).sum()


def masked_squares(fn: Function) -> Function:
    """Returns the same with a weight for each example."""
    return lambda params, x, mask: ((fn(params, x) ** 2).reshape(len(mask), -1).sum(-1) * mask).sum()


def forward(fn: Function, params: Any, data: jax.Array) -> Composition:
    return Composition(lambda transform: jax.jit(transform(fn)), params, data)


def dx_outside(fn: Function, params: Any, data: jax.Array) -> Composition:
    return Composition(lambda transform: jax.jit(jax.grad(squares(transform(fn)), argnums=1)), params, data)


def dx_inside(fn: Function, params: Any, data: jax.Array) -> Composition:
    return Composition(lambda transform: jax.jit(transform(jax.grad(squares(fn), argnums=1))), params, data)


def dw_outside(fn: Function, params: Any, data: jax.Array) -> Composition:
    return Composition(lambda transform: jax.jit(jax.grad(masked_squares(transform(fn)))), params, data, padded=True)


def dw_inside(fn: Function, params: Any, data: jax.Array) -> Composition:
    return Composition(lambda transform: jax.jit(transform(jax.grad(masked_squares(fn)))), params, data, padded=True)

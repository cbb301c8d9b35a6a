"""The operations of `bench_rows`: ours, and the same in plain JAX."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import bijax

ROWS = (1, 8, 64, 512, 4096, 16384)
GRADIENT_ROWS = (8, 512, 4096)

Function = Callable[..., Any]
Shape = tuple[int, int, str]


def rms_norm(x: jax.Array, w: jax.Array) -> jax.Array:
    h = x.astype(jnp.float32)
    return (h * jax.lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6) * w).astype(x.dtype)


def layer_norm(x: jax.Array, w: jax.Array) -> jax.Array:
    h = x.astype(jnp.float32)
    d = h - jnp.mean(h, axis=-1, keepdims=True)
    return (d * jax.lax.rsqrt(jnp.mean(d * d, axis=-1, keepdims=True) + 1e-5) * w + w).astype(x.dtype)


def cross_entropy(x: jax.Array, labels: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(x, labels[:, None], axis=1)[:, 0].astype(jnp.float32)
    return jax.nn.logsumexp(x.astype(jnp.float32), axis=-1) - picked


def with_gradients(f: Function) -> Function:
    """Returns a function of x, w and g: the result of f(x, w) and the gradients of both for the cotangent g."""

    def both(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        y, pull = jax.vjp(f, x, w)
        return y, pull(g)

    return both


def with_gradient_of_total(f: Function) -> Function:
    return lambda x, labels: jax.value_and_grad(lambda x: f(x, labels).sum())(x)


@dataclass(frozen=True)
class Operation:
    """One line of the benchmark.

    Attributes:
        ours: The operation of bijax.
        theirs: The same in plain JAX.
        arguments: Names of what both take: x and g (rows, columns), w (columns,), labels (rows,).
        passes: Arrays of the size of x that must be read or written at least.
        rows: Numbers of rows to measure.
    """

    ours: Function
    theirs: Function
    arguments: tuple[str, ...]
    passes: int
    rows: tuple[int, ...] = ROWS


OPERATIONS = {
    "rms_norm": Operation(bijax.rms_norm, rms_norm, ("x", "w"), 2),
    "layer_norm": Operation(lambda x, w: bijax.layer_norm(x, w, w), layer_norm, ("x", "w"), 2),
    "softmax": Operation(bijax.softmax, jax.nn.softmax, ("x",), 2),
    "log_softmax": Operation(bijax.log_softmax, jax.nn.log_softmax, ("x",), 2),
    "mean": Operation(lambda x: bijax.mean(x, -1), lambda x: jnp.mean(x, -1), ("x",), 1),
    "cross_entropy": Operation(bijax.softmax_cross_entropy, cross_entropy, ("x", "labels"), 1),
    "rms_norm_gradient": Operation(
        with_gradients(bijax.rms_norm), with_gradients(rms_norm), ("x", "w", "g"), 4, GRADIENT_ROWS
    ),
    "cross_entropy_gradient": Operation(
        with_gradient_of_total(bijax.softmax_cross_entropy),
        with_gradient_of_total(cross_entropy),
        ("x", "labels"),
        2,
        GRADIENT_ROWS,
    ),
}


def operands(operation: Operation, shape: Shape) -> tuple[jax.ShapeDtypeStruct, ...]:
    m, c, dtype = shape
    structs = {
        "x": jax.ShapeDtypeStruct((m, c), dtype),
        "g": jax.ShapeDtypeStruct((m, c), dtype),
        "w": jax.ShapeDtypeStruct((c,), dtype),
        "labels": jax.ShapeDtypeStruct((m,), jnp.int32),
    }
    return tuple(structs[name] for name in operation.arguments)

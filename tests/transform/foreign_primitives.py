"""Primitives as other libraries register them: JAX code in rules of several shapes, and rules of their own."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import ad, batching, mlir

from tests.arrays import on_device

Function = Callable[..., jax.Array]
Rule = Callable[..., Any]

W = on_device(np.random.default_rng(7).standard_normal((250, 250)) / 16, jnp.float32)


def product(x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ W)


def softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x * 3, -1) * x.std(-1, keepdims=True)


def scan(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, w: (jnp.sin(c + c * w), None), x, W[:5])[0]


def by_lower_fun(function: Function) -> Rule:
    return mlir.lower_fun(function, multiple_results=False)


def by_partial(function: Function) -> Rule:
    return functools.partial(mlir.lower_fun(lambda x, scale: function(x) * scale, multiple_results=False), scale=0.75)


def by_a_rule_around(function: Function) -> Rule:
    def rule(ctx: Any, x: Any) -> Any:
        return mlir.lower_fun(function, multiple_results=False)(ctx, x)

    return rule


def by_two_programs(function: Function) -> Rule:
    def rule(ctx: Any, x: Any) -> Any:
        (first,) = mlir.lower_fun(function, multiple_results=False)(ctx.replace(), x)
        return mlir.lower_fun(lambda x: x * x - x, multiple_results=False)(ctx, first)

    return rule


RULES = {f.__name__: f for f in (by_lower_fun, by_partial, by_a_rule_around, by_two_programs)}
FUNCTIONS: dict[str, Function] = {f.__name__: f for f in (product, softmax, scan)}


def primitive(name: str, function: Function, rule: Rule | None = None) -> Primitive:
    """Returns a primitive of a function of rows, with rules for vmap and derivatives that are made of primitives."""
    found = Primitive(name)
    found.def_impl(function)
    found.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
    mlir.register_lowering(found, by_lower_fun(function) if rule is None else rule)
    batching.primitive_batchers[found] = lambda args, axes: (found.bind(jnp.moveaxis(args[0], axes[0], 0)), 0)
    ad.primitive_jvps[found] = lambda primals, tangents: jax.jvp(function, primals, tangents)
    return found


def emitting(name: str) -> Primitive:
    """Returns a primitive whose rule emits a sum of rows by itself, next to JAX code."""

    def rule(ctx: Any, x: Any) -> Any:
        (first,) = by_lower_fun(softmax)(ctx, x)
        return [hlo.multiply(first, first)]

    return primitive(name, lambda x: softmax(x) ** 2, rule)


def moving(name: str) -> Primitive:
    """Returns a primitive whose rule hands on what a program returns, after a barrier of its own."""

    def rule(ctx: Any, x: Any) -> Any:
        (first,) = by_lower_fun(product)(ctx, x)
        return hlo.optimization_barrier([first])

    return primitive(name, product, rule)

"""The results of an invariant function, which code around it must not be fused with."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def fenced(tree: Any) -> Any:
    """Returns the same values, with a barrier around traced floating-point arrays.

    Without it XLA could contract a product computed inside with a sum outside. What enters a function is separated when
    it is lowered (`crossing.py`). Mutable modules are left alone: rebuilding one would break the references that others
    hold to it.

    Args:
        tree: Arrays in tuples, lists, dicts and frozen dataclasses; anything else passes.
    """
    if isinstance(tree, jax.core.Tracer):
        # Other types, such as those of `jax.experimental.hijax`, need no barrier: they have no dtype.
        is_inexact = isinstance(tree.aval, jax.core.ShapedArray) and jnp.issubdtype(tree.dtype, jnp.inexact)
        return lax.optimization_barrier((tree,))[0] if is_inexact else tree
    if isinstance(tree, tuple) and (type(tree) is tuple or hasattr(tree, "_fields")):
        parts = [fenced(value) for value in tree]
        return tree if _same(parts, tree) else type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if type(tree) is list:
        parts = [fenced(value) for value in tree]
        return tree if _same(parts, tree) else parts
    if type(tree) is dict:
        values = [fenced(value) for value in tree.values()]
        return tree if _same(values, tree.values()) else dict(zip(tree, values, strict=True))
    if _is_frozen(tree):
        leaves, structure = jax.tree.flatten(tree)
        parts = leaves if leaves == [tree] else [fenced(leaf) for leaf in leaves]
        return tree if _same(parts, leaves) else jax.tree.unflatten(structure, parts)
    return tree


def _same(parts: Any, values: Any) -> bool:
    return all(a is b for a, b in zip(parts, values, strict=True))


def _is_frozen(tree: Any) -> bool:
    parameters = getattr(type(tree), "__dataclass_params__", None)
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type) and bool(getattr(parameters, "frozen", False))

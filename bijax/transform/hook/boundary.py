"""The boundary between an invariant function and the code around it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Copies = list[tuple[Any, Any]]


def fenced(tree: Any, copies: Copies) -> Any:
    """Returns the same values, with a barrier around traced floating-point arrays.

    Without it XLA:CPU could contract a product computed outside with a sum inside, or vice versa; in reverse mode, the
    barriers separate the cotangents in the same way. Mutable modules are left alone: rebuilding
    one would break the references that others hold to it.

    Args:
        tree: Arrays in tuples, lists, dicts and frozen dataclasses; anything else passes.
        copies: Receives a pair (original, copy) for each list and dict that holds such an array.
    """
    if isinstance(tree, jax.core.Tracer):
        return lax.optimization_barrier((tree,))[0] if jnp.issubdtype(tree.dtype, jnp.floating) else tree
    if isinstance(tree, tuple) and (type(tree) is tuple or hasattr(tree, "_fields")):
        parts = [fenced(value, copies) for value in tree]
        return tree if _same(parts, tree) else type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if type(tree) is list:
        parts = [fenced(value, copies) for value in tree]
        return tree if _same(parts, tree) else _noted(tree, parts, copies)
    if type(tree) is dict:
        values = [fenced(value, copies) for value in tree.values()]
        same = _same(values, tree.values())
        return tree if same else _noted(tree, dict(zip(tree, values, strict=True)), copies)
    if _is_frozen(tree):
        leaves, structure = jax.tree.flatten(tree)
        parts = leaves if leaves == [tree] else [fenced(leaf, copies) for leaf in leaves]
        return tree if _same(parts, leaves) else jax.tree.unflatten(structure, parts)
    return tree


def write_back(copies: Copies) -> None:
    """Applies a function's changes of the copies to the original lists and dicts."""
    for original, copy in copies:
        if type(original) is list:
            original[:] = copy
        else:
            original.clear()
            original.update(copy)


def _noted(original: Any, copy: Any, copies: Copies) -> Any:
    copies.append((original, copy))
    return copy


def _same(parts: Any, values: Any) -> bool:
    return all(a is b for a, b in zip(parts, values, strict=True))


def _is_frozen(tree: Any) -> bool:
    parameters = getattr(type(tree), "__dataclass_params__", None)
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type) and bool(getattr(parameters, "frozen", False))

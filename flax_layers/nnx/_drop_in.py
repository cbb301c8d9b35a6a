"""How an nnx class becomes invariant."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from flax import nnx

from .._mode import check_method, invariant_mode
from .._signature import ConstructorSignature

_MARK = "_is_invariant_layer"


def invariant_layer[M: nnx.Module](cls: type[M]) -> type[M]:
    """Makes the methods of an nnx class run as under `bijax.invariant`; a class decorator.

    These are `__call__` and the public methods, without those named `init...`: what makes parameters, carries and
    caches keeps the bits that it has without the decorator.

    Args:
        cls: A class of modules; a subclass, so that the original stays as it is.

    Returns:
        The same class.

    Raises:
        TypeError: If it is not a class of nnx modules, or a method is a generator or coroutine function, whose
            body would run later, without effect.

    Guarantee: row-invariant, for every operation of the methods by itself, see `bijax.invariant`.

    Example:
        >>> import jax.numpy as jnp
        >>> @invariant_layer
        ... class Linear(nnx.Linear):
        ...     pass
        >>> Linear(3, 2, rngs=nnx.Rngs(0))(jnp.ones((1, 3))).shape
        (1, 2)
    """
    if not (isinstance(cls, type) and issubclass(cls, nnx.Module)):
        raise TypeError(f"invariant_layer: expected a subclass of flax.nnx.Module, got {cls!r}.")
    methods = computing_methods(cls)
    for name in methods:
        check_method(cls, name)
    for name in methods:
        setattr(cls, name, _invariant_method(getattr(cls, name)))
    setattr(cls, _MARK, True)
    setattr(cls, "__signature__", ConstructorSignature())  # noqa: B010  # no attribute that a type checker knows
    return cls


def is_invariant_layer(cls: type) -> bool:
    """Returns whether `invariant_layer` was applied to a class, or to one whose methods it has."""
    marked = next((base for base in cls.__mro__ if _MARK in vars(base)), None)
    if marked is None or not issubclass(marked, nnx.Module):
        return False
    return all(getattr(cls, name) is getattr(marked, name, None) for name in computing_methods(cls))


def computing_methods(cls: type[nnx.Module]) -> list[str]:
    """Returns the names of the methods of a class that compute on inputs."""
    kept = (property, staticmethod, classmethod, type, functools.partial)
    return [
        name
        for name in dir(cls)
        if (name == "__call__" or not name.startswith(("_", "init")))
        and name not in dir(nnx.Module)
        and callable(member := inspect.getattr_static(cls, name))
        and hasattr(type(member), "__get__")  # others are called without the module
        and not isinstance(member, kept)
    ]


def _invariant_method(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def invariant(self: Any, *args: Any, **kwargs: Any) -> Any:
        with invariant_mode():
            return method(self, *args, **kwargs)

    return invariant

"""Tracing any callable: a function, a jitted one of JAX or of a library around it, a module."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.stages import Traced, Wrapped


def traced(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Traces a callable with its arguments.

    Args:
        fn: A function, jitted or not, by JAX or by Flax, or a callable module.
        args: Its arguments: arrays or `jax.ShapeDtypeStruct`.
        kwargs: Its keyword arguments.
    """
    # A module may have a method `trace` of its own, so the name alone says nothing.
    if isinstance(fn, Wrapped):
        # Flax's jit hands JAX's object out inside of its own.
        found = fn.trace(*args, **kwargs)
        for stage in (found, getattr(found, "traced", None)):
            if isinstance(stage, Traced):
                return stage

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:  # a module need not be hashable, and one that has changed is new
        return fn(*args, **kwargs)

    call.__name__ = getattr(fn, "__name__", type(fn).__name__)
    return jax.jit(call).trace(*args, **kwargs)

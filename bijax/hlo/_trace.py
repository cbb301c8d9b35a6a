"""Traces any callable: a function, one jitted by JAX or a library on top of it, a module."""

import functools
from collections.abc import Callable
from typing import Any, Final

import jax
from jax.stages import Traced, Wrapped

_CHANGES_ITSELF: Final = (
    "The model changes its own state when it is called, as dropout and batch normalisation do. Pass it as an argument"
    " of a function under flax.nnx.jit: bijax.audit(nnx.jit(lambda model, x: model(x)), model, x)"
)


def traced(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Traces a callable with its arguments.

    Args:
        fn: A function, optionally jitted by JAX or Flax, or a callable module.
        args: Its arguments: arrays or `jax.ShapeDtypeStruct`.
        kwargs: Its keyword arguments.
    """
    # A module may define its own method `trace`, so the name alone is not enough.
    if isinstance(fn, Wrapped):
        # Flax's jit wraps JAX's object.
        found = fn.trace(*args, **kwargs)
        for stage in (found, getattr(found, "traced", None)):
            if isinstance(stage, Traced):
                return stage

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:  # a module may be unhashable, and a changed one must be traced again
        return fn(*args, **kwargs)

    call.__name__ = getattr(fn, "__name__", type(fn).__name__)
    try:
        return jax.jit(call).trace(*args, **kwargs)
    except Exception as error:
        if type(error).__name__ == "TraceContextError":  # Flax's, which may not be installed
            error.add_note(_CHANGES_ITSELF)
        raise

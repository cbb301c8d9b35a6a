"""How a linen class becomes invariant."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from flax import linen

import bijax

from .._mode import check_method, invariant_mode

_CALL = "_call_wrapped_method"  # private: all wrapped methods, `setup` and unbound ones too, are called through it


def invariant_layer[M: linen.Module](cls: type[M]) -> type[M]:
    """Makes the methods of a linen class run as under `bijax.invariant`; a class decorator.

    Parameters start with the same bits as without it: initializers run as they are.

    Args:
        cls: A class of modules; a subclass, so that the original stays as it is.

    Returns:
        The same class.

    Raises:
        TypeError: If it is not a class of linen modules, or a public method is a generator or coroutine function, whose
            body would run later, without effect.
        ImportError: If this version of Flax calls methods in a way that is not known.

    Guarantee: row-invariant, for every operation of the methods by itself, see `bijax.invariant`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> @invariant_layer
        ... class Dense(linen.Dense):
        ...     pass
        >>> Dense(2).init(jax.random.key(0), jnp.ones((1, 3)))["params"]["kernel"].shape
        (3, 2)
    """
    if not (isinstance(cls, type) and issubclass(cls, linen.Module)):
        raise TypeError(f"invariant_layer: expected a subclass of flax.linen.Module, got {cls!r}.")
    call = getattr(cls, _CALL, None)
    if call is None:
        raise ImportError(f"invariant_layer: flax.linen.Module has no {_CALL}; use a version of Flax that has it.")
    for name in sorted(set(dir(cls)) - set(dir(linen.Module))):
        if (name == "__call__" or not name.startswith("_")) and inspect.isfunction(inspect.getattr_static(cls, name)):
            check_method(cls, name)

    @functools.wraps(call)
    def call_invariantly(self: M, *args: Any, **kwargs: Any) -> Any:
        with invariant_method(self):
            return call(self, *args, **kwargs)

    setattr(cls, _CALL, call_invariantly)
    return cls


def is_invariant_layer(cls: type) -> bool:
    """Returns whether `invariant_layer` was applied to a class, or to one that it is derived from."""
    return getattr(cls, _CALL, None) is not getattr(linen.Module, _CALL, None)


@contextlib.contextmanager
def invariant_method(module: linen.Module) -> Iterator[None]:
    """Makes a method of a module invariant that is called inside, but for the initializers of parameters."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(invariant_mode())
        if module.scope is not None and module.is_mutable_collection("params"):
            _initialize_plainly(module)
            stack.enter_context(linen.intercept_methods(_initialize_inner_plainly))
        yield


def _initialize_plainly(module: linen.Module) -> None:
    """Takes the mode off whenever a module declares, and so may initialize, a parameter."""
    if "param" in vars(module):
        return
    declare = module.param

    def param(*args: Any, **kwargs: Any) -> Any:
        with bijax.set_batch_invariant_mode(False):
            return declare(*args, **kwargs)

    # Modules are frozen. This one is bound to the variables of a single call and discarded after it.
    object.__setattr__(module, "param", param)


def _initialize_inner_plainly(
    next_method: Callable[..., Any], args: Any, kwargs: Any, context: linen.module.InterceptorContext
) -> Any:
    _initialize_plainly(context.module)
    return next_method(*args, **kwargs)

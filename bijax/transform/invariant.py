"""`bijax.invariant`: makes a function batch-invariant."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol, overload

from bijax.core.checks import check_callable, flag
from bijax.transform.hook.allowed import allowed_names
from bijax.transform.hook.boundary import fenced
from bijax.transform.hook.lowering import install
from bijax.transform.hook.state import Request, requested

_STAGES = ("lower", "trace", "eval_shape")


class Decorator(Protocol):
    """What `bijax.invariant` returns without a function."""

    def __call__[**P, R](self, fn: Callable[P, R], /) -> Callable[P, R]:
        """Makes a function batch-invariant."""
        ...


@overload
def invariant[**P, R](fn: Callable[P, R], *, allow: Iterable[str] = ..., fuse_rows: bool = ...) -> Callable[P, R]: ...


@overload
def invariant(*, allow: Iterable[str] = ..., fuse_rows: bool = ...) -> Decorator: ...


def invariant(fn: Callable[..., Any] | None = None, *, allow: Iterable[str] = (), fuse_rows: bool = True) -> Any:
    """Makes a function batch-invariant.

    Inside, every operation that would choose its order of summation by the batch is replaced by one whose bits depend
    only on its own inputs: products, reductions, convolutions, scatters, sums over devices, and on the CPU
    element-wise code too. The function is not rewritten: autodiff, `vmap`, `scan`, `remat`, custom rules, Flax and
    Equinox see the usual operations. It composes in every order: `jit(invariant(f))`, `invariant(jit(f))`,
    `grad(invariant(f))`, `invariant(grad(f))`.

    The order of a sum depends on the length of the reduced axes, so padding *along them* (not along the batch) may
    change bits. The order of a product also depends on how the program stores its operands, by rows or by columns;
    `vmap` over leading axes keeps it, `vmap` over the last axis of a vector may not.

    This covers what `fn` computes while it runs, what JAX derives from that (gradients, `vmap`), and the jitted
    functions that it calls. Values that are computed outside enter as they are, as arguments or from a closure.

    Args:
        fn: A function of arrays, jitted or not, or a callable module. Without it a decorator is returned:
            `@bijax.invariant(allow=("pure_callback",))`.
        allow: Names of primitives that would be refused and should be left to XLA: their results, and everything
            computed from them, may then depend on the batch, and the promise is the caller's. It has no effect on what
            is made invariant, such as JAX code inside such a primitive; only the rest is allowed. `bijax.audit` lists
            what it lets pass as "believed", `bijax.contracts` as `allowed`.

        fuse_rows: Whether one kernel may compute a softmax, a norm or their gradients written as separate operations
            (on Hopper GPUs; see the guide's page "GPUs"). No bit depends on it. When such a kernel is first lowered
            for a GPU of this process, it is compared with XLA's code for the operations.

    Returns:
        A function with the signature of `fn`, and with `lower`, `trace` and `eval_shape` if `fn` has them.

    Raises:
        TypeError: If `fn` is not callable, is a generator or coroutine function (its body would run later, without
            effect), or a program that was lowered or compiled already, `allow` does not hold names, or
            `fuse_rows` is not a bool.
        ValueError: If `allow` holds a name that no primitive has.
        UnsupportedError: When it is lowered, if the bits of row programs differ from XLA's functions in this jaxlib.

    A primitive of another library is made invariant if its lowering is JAX code (`mlir.lower_fun`). A callback may
    be in a branch of `jax.lax.cond` to raise an error, as in `equinox.error_if`.

    The result raises `NotInvariantError` when it is lowered if the program contains an operation that is neither known
    to be invariant nor can be made so, with the operation's name and line; `bijax.audit` lists them before running. It
    raises the same when it runs, if a callback in a branch returns, or if it calls a program that was compiled
    earlier without being made invariant, which would run unchanged: its name for `allow` is "call_compiled". A compiled
    program that is run through its `runtime_executable()`, and NumPy computations, are not detected.

    Guarantee: row-invariant, for every operation by itself: each element of a result depends on the inputs that it
    mathematically depends on and on the length of its own reductions, never on the number of other results, on its
    own position, or on the values of the others. Subnormal numbers and the signs of zeros are among the bits; the sign
    and payload of a nan are not, so what is computed from these (`jnp.signbit` of a nan) is not invariant.

    Source: the project's design; issues 26308, 26795, 34080 and 31919 of JAX ask for it.

    Example:
        >>> import jax.numpy as jnp
        >>> w = jax.random.normal(jax.random.key(0), (300, 64))
        >>> f = jax.jit(invariant(lambda x: jax.nn.softmax(x @ w)))
        >>> x = jax.random.normal(jax.random.key(1), (8, 300))
        >>> bool((f(x)[:1] == f(x[:1])).all())
        True
    """
    if fn is not None:
        _check(fn)
    request = Request(True, allowed_names(allow), flag("bijax.invariant", "fuse_rows", fuse_rows))
    install()
    return functools.partial(_decorated, request) if fn is None else _covered(fn, request)


def _decorated(request: Request, fn: Callable[..., Any]) -> Callable[..., Any]:
    _check(fn)
    return _covered(fn, request)


def _covered(fn: Callable[..., Any], request: Request) -> Callable[..., Any]:
    def covered(method: Callable[..., Any]) -> Callable[..., Any]:
        # A function's attributes are marks, such as Flax's `compact`; a module has its own attributes.
        @functools.wraps(method, updated=functools.WRAPPER_UPDATES if inspect.isfunction(method) else ())
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            install()
            with requested(request):
                return fenced(method(*args, **kwargs))

        return wrapper

    result = covered(fn)
    for stage in _STAGES:
        if hasattr(fn, stage):
            setattr(result, stage, covered(getattr(fn, stage)))
    return result


def _check(fn: Any) -> None:
    check_callable("bijax.invariant", fn)
    body = inspect.unwrap(fn)
    called = body if inspect.isroutine(body) else type(body).__call__
    if any(
        test(f)
        for f in (body, called)
        for test in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    ):
        raise TypeError(
            f"bijax.invariant: expected a function that returns its results, got {fn!r}, whose body runs after the"
            " call; apply invariant to the functions that it calls."
        )

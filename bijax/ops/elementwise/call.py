"""Element-wise functions with the same bits at any batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.core.checks import FLOATS, check_callable, check_sizes, describe
from bijax.core.derivative import custom_vjp
from bijax.core.explicit_axes import gathered, gathered_once
from bijax.core.primitive import Arrays, define_kernel, in_front
from bijax.dispatch.kernels import backend_of
from bijax.ops.elementwise._broadcast import sum_to_shape
from bijax.ops.elementwise._straight_line import StraightLine, straight_line
from pallas_kernels.runtime.own_settings import without_mesh

_OP = "bijax.elementwise"


def elementwise(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an element-wise function compute the same bits for an element wherever it is and whatever is next to it.

    XLA compiles element-wise code differently for different shapes. The function returned computes `fn` on whole
    vectors alone: its arguments are broadcast against each other, laid out flat, and padded to rows of 128 elements.

    Args:
        fn: Function of arrays of one shape (its arguments, already broadcast) that returns an array of that shape or a
            pytree of them. It is traced; each operation has the dtype that jax.numpy gives it. It must be element-wise:
            arithmetic, comparisons, `jnp.where`, `jnp.exp`, `jax.nn.silu`, ... It may close over numbers, not arrays.

    Returns:
        A function of arrays (or numbers) of shapes that broadcast against each other; float32, bfloat16, float16,
        integers or bool. It can be differentiated in reverse mode, any number of times, with respect to its floating
        arguments.

    Raises:
        TypeError: When it is called, if a dtype is unsupported.
        UnsupportedError: When it is called, if the size of an axis is symbolic.
        ValueError: When it is called, if the shapes do not broadcast, or `fn` does something that is not element-wise
            (the message names the primitive), changes the shape, or closes over an array.

    Guarantee: row-invariant, each element being a row; the gradients too. The gradient of an argument that
    was broadcast is a sum: over leading axes it is split-invariant for cuts at multiples of 128 rows, over others and
    for arguments of one element it is `bijax.sum`, with a fixed order for its length.

    Example:
        >>> swiglu = elementwise(lambda gate, up: jax.nn.silu(gate) * up)
        >>> swiglu(jnp.array([[0.0, 1.0]]), jnp.array([2.0, 0.0])).tolist()
        [[0.0, 0.0]]
        >>> elementwise(jnp.cumsum)(jnp.ones(3))
        Traceback (most recent call last):
            ...
        ValueError: bijax.elementwise: the function must be element-wise, but it calls the primitive 'cumsum' ...
    """
    check_callable("bijax.elementwise", fn)
    program = _Program(fn)

    @functools.wraps(fn)
    def wrapped(*arguments: Any) -> Any:
        return program(*map(_argument, gathered_once(*arguments)))

    return wrapped


class _Program:
    """A function of arrays that broadcast; calling it traces it, checks it and runs it as a kernel."""

    def __init__(self, fn: Callable[..., Any]):
        self._fn = fn
        # jit keeps the traces, and lets go of them with this object.
        self._traced = jax.jit(fn)
        self._gradients: dict[tuple[bool, ...], _Program] = {}

    def __call__(self, *arguments: jax.Array) -> Any:
        if not arguments:
            raise ValueError(f"{_OP}: the function must be called with at least one array, got none.")
        result_shape = _common_shape(arguments)
        # Arrays without dimensions are traced as one element, so that a reduction of them is found too.
        shape = result_shape or (1,)
        given = (jax.ShapeDtypeStruct(shape, a.dtype, weak_type=_is_weak(a)) for a in arguments)
        # Under a mesh JAX traces reshapes that change nothing but a sharding.
        with without_mesh():
            traced = self._traced.trace(*given)
        if len(traced.jaxpr.jaxpr.invars) != len(arguments):
            raise ValueError(f"{_OP}: the function must not close over traced values; pass them as arguments.")
        line = straight_line(_OP, traced.jaxpr, shape)
        results = self._differentiable(line, shape)(*arguments)
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), [r.reshape(result_shape) for r in results])

    def _differentiable(self, line: StraightLine, shape: tuple[int, ...]) -> Callable[..., Arrays]:
        @custom_vjp()
        def apply(*arguments: jax.Array) -> Arrays:
            return _kernel(*(jnp.broadcast_to(a, shape) for a in arguments), program=line)

        def forward(*arguments: jax.Array) -> tuple[Arrays, Arrays]:
            return apply(*arguments), arguments

        def backward(arguments: Arrays, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
            floating = tuple(_is_floating(a) for a in arguments)
            # An integer result has a cotangent without values.
            given = [g for g in cotangents if _is_floating(g)]
            full = iter(self._gradient(floating)(*arguments, *given) if any(floating) and given else ())
            return tuple(
                sum_to_shape(next(full, jnp.zeros(shape, a.dtype)), a.shape)
                if is_floating
                else np.zeros(a.shape, jax.dtypes.float0)
                for a, is_floating in zip(arguments, floating, strict=True)
            )

        apply.defvjp(forward, backward)
        return apply

    def _gradient(self, floating: tuple[bool, ...]) -> "_Program":
        """Returns the program of the cotangents of the floating arguments, given arguments and cotangents."""

        def gradient(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            arguments, cotangents = arrays[: len(floating)], arrays[len(floating) :]

            def of(*varied: jax.Array) -> tuple[jax.Array, ...]:
                left = iter(varied)
                merged = (next(left) if v else a for a, v in zip(arguments, floating, strict=True))
                return tuple(leaf for leaf in jax.tree.leaves(self._fn(*merged)) if _is_floating(leaf))

            _, pull = jax.vjp(of, *(a for a, v in zip(arguments, floating, strict=True) if v))
            return tuple(pull(cotangents))

        return self._gradients.setdefault(floating, _Program(gradient))


def _argument(x: Any) -> jax.Array:
    try:
        array = gathered(jnp.asarray(x))
    except TypeError as error:
        raise TypeError(f"{_OP}: arguments must be arrays or numbers, got {type(x).__name__}.") from error
    check_sizes(_OP, "arguments", array)
    if array.dtype.name in FLOATS or array.dtype == bool or jnp.issubdtype(array.dtype, jnp.integer):
        return array
    if array.dtype == jnp.float64 and _is_weak(array):  # a Python number with jax_enable_x64
        return array
    raise TypeError(
        f"{_OP}: arguments must be {', '.join(FLOATS)}, integers or bool, got {array.dtype}{array.shape};"
        " convert it first, for example with .astype(jnp.float32)."
    )


def _is_weak(x: jax.Array) -> bool:
    return bool(getattr(jax.typeof(x), "weak_type", False))


def _common_shape(arrays: tuple[jax.Array, ...]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*(a.shape for a in arrays))
    except ValueError as error:
        came = " and ".join(describe(a) for a in arrays)
        raise ValueError(f"{_OP}: the arguments must broadcast to one shape, got {came}.") from error


def _is_floating(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _fold(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays:
    """More elements are just more elements."""
    return _kernel(*in_front(size, arrays, axes), **parameters)


def _shapes(*arrays: jax.Array, program: StraightLine) -> Arrays:
    return program(*arrays)


# There can be many user programs, and they are short: their lowered modules are not cached.
_kernel = define_kernel("elementwise", backend_of("elementwise", _shapes), _fold, _shapes, lowered_once=False)

"""Norms over the last axis."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from bijax.core.checks import describe, float_array, row_vector, same_dtype
from bijax.core.contracts import is_recording, recorded_as
from bijax.core.derivative import custom_vjp
from bijax.core.primitive import Arrays, define_kernel
from bijax.dispatch.kernels import run_found
from bijax.dispatch.rows import as_rows, define_row_kernel, row_backend
from bijax.ops.norm._arguments import check_eps, check_offset
from bijax.ops.rows.sum_rows import sum_rows
from pallas_kernels.contract import chunk_contract
from pallas_kernels.parts.xla.tiles import isolate
from pallas_kernels.registry import find_or_none
from pallas_kernels.target import Target


def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    eps: float = 1e-6,
    residual: ArrayLike | None = None,
    weight_offset: float = 0.0,
) -> Any:
    """Divides rows by their root mean square: h / sqrt(mean(h * h) + eps) * weight, with h = x + residual.

    Computed in float32 and rounded once; only h is rounded to the dtype of `x` before it is normalized.

    Args:
        x: (..., C) float32, bfloat16 or float16.
        weight: (C,) of any of these dtypes, for example float32 with a bfloat16 `x`.
        eps: Added to the mean square; at least 0.
        residual: Of the shape and dtype of `x`, added to it first.
        weight_offset: Added to the weight in float32; 1 for models that store weight - 1, as Gemma does.

    Returns:
        An array of the shape and dtype of `x`, or, with a residual, the pair of it and h.

    Raises:
        TypeError: If a dtype is unsupported or differs between `x` and `residual`, or `eps` or `weight_offset` is
            not a number known at tracing time.
        ValueError: If the shapes do not fit, `eps` is negative or not finite, or `weight_offset` is not finite or
            comes without a weight.

    Guarantee: row-invariant; the gradients of `x` and `residual` too. The gradient of `weight` is split-invariant for
    cuts of the rows at multiples of 128 (`pallas_kernels.contract.ROW_CHUNK`).

    Source: "rms_norm" of xpu-perf (https://github.com/bytedance/xpu-perf).

    Example:
        >>> import jax.numpy as jnp
        >>> rms_norm(jnp.array([3.0, 3.0]), eps=0.0).tolist()
        [1.0, 1.0]
        >>> y, h = rms_norm(jnp.array([3.0, 3.0]), jnp.array([1.0, 2.0]), eps=0.0, residual=jnp.array([1.0, 1.0]))
        >>> y.tolist(), h.tolist()
        ([1.0, 2.0], [4.0, 4.0])
        >>> rms_norm(jnp.array([3.0, 3.0]), jnp.array([0.0, 1.0]), eps=0.0, weight_offset=1.0).tolist()
        [1.0, 2.0]
    """
    arrays, back, numbers = _checked("bijax.rms_norm", x, weight, residual, eps, weight_offset)
    if residual is None:
        return back(_rms_norm(*arrays, numbers))
    y, h = _rms_norm(*arrays, numbers)
    return back(y), back(h)


def add_rms_norm(
    x: Any, residual: Any, weight: Any = None, *, eps: float = 1e-6, weight_offset: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Returns h = x + residual and `rms_norm` of it, in one pass, with the bits and the gradients of the two apart.

    Unlike in the gradient of `rms_norm` with a residual, the norm's contribution is rounded to the dtype of `x` before
    h's is added to it.

    Args:
        x: (..., C) float32, bfloat16 or float16.
        residual: Of the shape of `x` and its dtype, or float32: then it is rounded to the dtype of `x` first.
        weight: As for `rms_norm`.
        eps: As for `rms_norm`.
        weight_offset: As for `rms_norm`.

    Raises:
        TypeError: As `rms_norm`.
        ValueError: As `rms_norm`.

    Guarantee: row-invariant; the gradients as those of `rms_norm`.

    Example:
        >>> import jax.numpy as jnp
        >>> h, y = add_rms_norm(jnp.array([3.0, 3.0]), jnp.array([1.0, 1.0]), eps=0.0)
        >>> h.tolist(), y.tolist()
        ([4.0, 4.0], [1.0, 1.0])
    """
    arrays, back, numbers = _checked("bijax.add_rms_norm", x, weight, residual, eps, weight_offset, or_float32=True)
    y, h = _add_rms_norm(*arrays, numbers._replace(residual=arrays[2].dtype.name))
    return back(h), back(y)


def rms_norm_times(x: jax.Array, scale: float, *, eps: float) -> jax.Array:
    """Returns `rms_norm` with a weight that is `scale` in all columns, without an array of it. No checks.

    Guarantee: row-invariant; the gradient too.
    """
    rows, back = as_rows(x, (x.ndim - 1,))
    return back(_rms_norm(rows, None, None, Numbers(eps, float(np.float32(scale)))))


def wide_rms_norm(op: str, x: jax.Array, weight: Any, *, eps: float) -> jax.Array:
    """Returns `rms_norm` of x (..., C) in float32, with the bits and gradients of that of `x` as float32.

    Raises:
        TypeError: As `rms_norm`, for the operation `op`.
        ValueError: As `rms_norm`.

    Guarantee: row-invariant; the gradients as those of `rms_norm`.
    """
    (rows, weight, _), back, numbers = _checked(op, x, weight, None, eps, 0.0)
    return back(_rms_norm(rows, weight, None, numbers._replace(dtype="float32")))


def _checked(
    op: str, x: Any, weight: Any, residual: Any, eps: float, weight_offset: float, *, or_float32: bool = False
) -> tuple[tuple[jax.Array, jax.Array | None, Any], Callable[[jax.Array], jax.Array], "Numbers"]:
    """Returns rows, weight and rows of the residual, what gives rows the shape of `x`, and the numbers of the norm."""
    x = float_array(op, "x", x)
    residual = None if residual is None else float_array(op, "residual", residual)
    if not (or_float32 and residual is not None and residual.dtype == jnp.float32):
        same_dtype(op, x=x, residual=residual)
    weight = row_vector(op, "weight", weight, x)
    numbers = Numbers(check_eps(op, eps), check_offset(op, weight, weight_offset))
    if residual is not None and residual.shape != x.shape:
        raise ValueError(
            f"{op}: residual must have the shape of x, got x {describe(x)} and residual {describe(residual)}."
        )
    rows, back = as_rows(x, (x.ndim - 1,))
    return (rows, weight, None if residual is None else residual.reshape(rows.shape)), back, numbers


def layer_norm(
    x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, *, eps: float = 1e-5
) -> jax.Array:
    """Normalises rows: d / sqrt(mean(d * d) + eps) * weight + bias, with d = x - mean(x).

    Computed in float32 and rounded once. The variance is computed in a second pass over the row, so that it stays
    accurate when the mean is large.

    Args:
        x: (..., C) float32, bfloat16 or float16.
        weight: (C,) of any of these dtypes.
        bias: (C,) of any of these dtypes.
        eps: Added to the variance; at least 0.

    Returns:
        An array of the shape and dtype of `x`.

    Raises:
        TypeError: If a dtype is unsupported, or `eps` is not a number that is known when the program is traced.
        ValueError: If the shapes do not fit or `eps` is negative or not finite.

    Guarantee: row-invariant; the gradient of `x` too. The gradients of `weight` and `bias` are split-invariant for
    cuts of the rows at multiples of 128 (`pallas_kernels.contract.ROW_CHUNK`).

    Example:
        >>> import jax.numpy as jnp
        >>> layer_norm(jnp.array([1.0, 3.0]), eps=0.0).tolist()
        [-1.0, 1.0]
    """
    op = "bijax.layer_norm"
    x = float_array(op, "x", x)
    weight, bias = row_vector(op, "weight", weight, x), row_vector(op, "bias", bias, x)
    rows, back = as_rows(x, (x.ndim - 1,))
    return back(_layer_norm(rows, weight, bias, check_eps(op, eps)))


class Numbers(NamedTuple):
    """What is known of an RMSNorm when a program is traced.

    Attributes:
        eps: Added to the mean square.
        offset: Added to the weight, or the weight of all columns if there is none and it is not 0.
        dtype: Dtype of the result; that of the rows by default.
        residual: Dtype of the residual, if it may differ from that of the rows.
    """

    eps: float
    offset: float = 0.0
    dtype: str | None = None
    residual: str | None = None

    @property
    def of_forward(self) -> dict[str, Any]:
        """The parameters of the forward kernel; those that have their default are left out."""
        return {"eps": self.eps, **self.of_weight, **({} if self.dtype is None else {"dtype": self.dtype})}

    @property
    def of_weight(self) -> dict[str, float]:
        """The kernels' parameter for the offset; kernels without it serve weights without one."""
        return {"offset": self.offset} if self.offset else {}


@custom_vjp(nondiff_argnums=(3,))
def _rms_norm(x: jax.Array, weight: jax.Array | None, residual: jax.Array | None, numbers: Numbers) -> Any:
    return _rms_norm_forward(x, weight, residual, numbers)[0]


def _rms_norm_forward(
    x: jax.Array, weight: jax.Array | None, residual: jax.Array | None, numbers: Numbers
) -> tuple[Any, tuple[jax.Array | None, ...]]:
    arrays = {"x": x, "weight": weight, "residual": residual}
    y, factor, *rest = rms_norm_kernel(arrays, **numbers.of_forward)
    if residual is None:
        return y, (x, factor, weight)
    return (y, rest[0]), (rest[0], factor, weight)


def _rms_norm_backward(numbers: Numbers, saved: Any, g: Any) -> tuple[jax.Array | None, ...]:
    h, factor, weight = saved
    g, g_sum = g if isinstance(g, tuple) else (g, None)
    arrays = {"h": h, "factor": factor, "g": g, "weight": weight, "g_sum": g_sum}
    dh, dw = rms_norm_gradients(arrays, numbers)
    return dh, dw, None if g_sum is None else dh


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@custom_vjp(nondiff_argnums=(3,))
def _add_rms_norm(x: jax.Array, weight: jax.Array | None, residual: jax.Array | None, numbers: Numbers) -> Any:
    return _rms_norm_forward(x, weight, residual, numbers)[0]


def _add_rms_norm_backward(numbers: Numbers, saved: Any, g: Any) -> tuple[jax.Array | None, ...]:
    g, g_sum = g
    of_norm, of_weight, _ = _rms_norm_backward(numbers, saved, g)
    dh = of_norm + g_sum
    if dh.dtype == numbers.residual:
        return dh, of_weight, dh
    (dh,) = isolate(dh)  # XLA would leave out a rounding before a conversion to float32
    return dh, of_weight, dh.astype(numbers.residual)


_add_rms_norm.defvjp(_rms_norm_forward, _add_rms_norm_backward)


@custom_vjp(nondiff_argnums=(3,))
def _layer_norm(x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, eps: float) -> jax.Array:
    return _layer_norm_forward(x, weight, bias, eps)[0]


def _layer_norm_forward(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, eps: float
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    arrays = {"x": x, "weight": weight, "bias": bias}
    y, mean, factor = _layer_norm_kernel(arrays, eps=eps)
    return y, (x, mean, factor, weight, bias)


def _layer_norm_backward(eps: float, saved: Any, g: jax.Array) -> tuple[jax.Array | None, ...]:
    x, mean, factor, weight, bias = saved
    arrays = {"x": x, "mean": mean, "factor": factor, "g": g, "weight": weight}
    (dx,) = _layer_norm_gradient_kernel(arrays)
    db = None if bias is None else sum_rows(g).astype(bias.dtype)
    return dx, norm_weight_gradient(weight, x, factor, g, mean), db


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def rms_norm_gradients(arrays: dict[str, jax.Array | None], numbers: Numbers) -> tuple[jax.Array, jax.Array | None]:
    """Returns the gradients of the rows and of the weight from the arguments of the kernel `rms_norm_gradient`."""
    weight = arrays["weight"]
    if weight is None:
        return rms_norm_gradient_kernel(arrays, **numbers.of_weight)[0], None
    given = {name: a for name, a in arrays.items() if a is not None}
    names, dtype = tuple(given), weight.dtype.name
    dh, dw = _gradients_kernel(*given.values(), names=names, dtype=dtype, **numbers.of_weight)
    return dh, dw


def norm_weight_gradient(weight: jax.Array | None, *arrays: jax.Array) -> jax.Array | None:
    """Returns the gradient of a norm's weight from its rows, their scales, the cotangent, and their means if any."""
    if weight is None:
        return None
    return _weight_gradient_kernel(*arrays, dtype=weight.dtype.name)[0]


def _rms_norm_shapes(
    *, x: jax.Array, residual: jax.Array | None = None, dtype: str | None = None, **_: Any
) -> tuple[jax.Array, ...]:
    y = x if dtype is None else x.astype(dtype)
    factor = jnp.zeros((x.shape[0], 1), jnp.float32)
    return (y, factor) if residual is None else (y, factor, x)


_backend: Final = row_backend("rms_norm", _rms_norm_shapes)


def _rms_norm_backend(target: Target, *arrays: jax.Array, names: tuple[str, ...], **parameters: Any) -> Arrays:
    """Runs rms_norm; one that rounds its residual is recorded as one whose residual has been rounded before.

    Which of the two runs depends on the number of devices, which the contracts of a model do not name.
    """
    given: dict[str, Any] = dict(zip(names, arrays, strict=True))
    x, residual = given["x"], given.get("residual")
    if not is_recording() or residual is None or residual.dtype == x.dtype:
        return _backend(target, *arrays, names=names, **parameters)
    given["residual"] = residual.astype(x.dtype)
    results = _rms_norm_shapes(**given, dtype=parameters.get("dtype"))
    came, found = (",".join(str(a.dtype) for a in some) for some in (given.values(), results))
    with recorded_as(f"{came} -> {found}"):
        return _backend(target, *given.values(), names=names, **parameters)


def _layer_norm_shapes(*, x: jax.Array, **_: Any) -> tuple[jax.Array, ...]:
    statistic = jnp.zeros((x.shape[0], 1), jnp.float32)
    return x, statistic, statistic


def _gradients(target: Target, *arrays: jax.Array, names: tuple[str, ...], dtype: str, **numbers: float) -> Arrays:
    """Returns both gradients of rms_norm: by one kernel, which reads the rows once, or by two."""
    given = dict(zip(names, arrays, strict=True))
    h, factor, g = given["h"], given["factor"], given["g"]
    columns = h.shape[1]
    options = {**given, **numbers, "dtype": dtype, "chunks": chunk_contract()}
    # The two kernels say which contracts there are, and a preferred backend may have them alone.
    found = None if is_recording() else find_or_none("rms_norm_gradients", target, columns, **options)
    if found is not None and target.backend in ("", found.kernel.backend):
        return tuple(run_found(found, (), options))
    dh = row_backend("rms_norm_gradient", _row_gradient_like)(target, *arrays, names=names, **numbers)
    return *dh, *row_backend("norm_weight_gradient")(target, h, factor, g, dtype=dtype)


def _fold_gradients(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays:
    """Adds the gradients of the weight up for each entry of the mapped axis; the rows of all entries are one call."""
    del size
    names, dtype = parameters["names"], parameters["dtype"]
    numbers = {name: value for name, value in parameters.items() if name not in ("names", "dtype")}

    def separate(*arrays: jax.Array) -> Arrays:
        given = dict(zip(names, arrays, strict=True))
        (dh,) = rms_norm_gradient_kernel(given, **numbers)
        return dh, _weight_gradient_kernel(given["h"], given["factor"], given["g"], dtype=dtype)[0]

    return jax.vmap(separate, in_axes=tuple(axes))(*arrays)


def _row_gradient_like(*, h: jax.Array, **_: Any) -> Arrays:
    return (h,)


def _gradients_shapes(*arrays: jax.Array, names: tuple[str, ...], dtype: str, **_: Any) -> Arrays:
    given = dict(zip(names, arrays, strict=True))
    return given["h"], given["weight"].astype(dtype)


rms_norm_kernel = define_row_kernel("rms_norm", like=_rms_norm_shapes, backend=_rms_norm_backend)
rms_norm_gradient_kernel = define_row_kernel("rms_norm_gradient", like=_row_gradient_like)
_gradients_kernel = define_kernel("rms_norm_gradients", _gradients, _fold_gradients, _gradients_shapes)
_layer_norm_kernel = define_row_kernel("layer_norm", like=_layer_norm_shapes)
_layer_norm_gradient_kernel = define_row_kernel("layer_norm_gradient", like=lambda x, **_: (x,))
_weight_gradient_kernel = define_kernel("norm_weight_gradient", row_backend("norm_weight_gradient"))

"""Matmul fused with an activation, a residual or a second product: one differentiable primitive, without checks.

A platform with a kernel for it runs that kernel; every other one computes the product in float32 and the rest as an
element-wise program. The derivative uses the same invariant pieces as a plain matmul's. It saves only the operands and
recomputes the products, so that no float32 activation is held for the backward pass.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from bijax.core.contracts import run
from bijax.core.derivative import custom_vjp
from bijax.core.primitive import Arrays, define_kernel, fold_rows, unfold_rows
from bijax.dispatch.kernels import run_if_served
from bijax.dispatch.matmul import Product, multiply, products_like
from bijax.ops.elementwise.call import elementwise
from bijax.ops.matmul._derivatives import differentiable_matmul, matmul_gradients
from pallas_kernels.contract import XLA_FUNCTIONS
from pallas_kernels.elementwise import portable
from pallas_kernels.matmul.activations import activate
from pallas_kernels.target import Target

Optional = jax.Array | None


@dataclass(frozen=True)
class Fusion:
    """The computation: activation(x @ w + bias) + residual, or activation(x @ w) * (x @ up).

    Attributes:
        product: The product or both products; `out_dtype` is the result's dtype.
        activation: A name that `pallas_kernels.matmul.activations.activate` takes, or None.
        given: Which of `up`, `bias` and `residual` are present.
    """

    product: Product
    activation: str | None
    given: tuple[bool, bool, bool]

    @property
    def wide(self) -> Product:
        """The product before anything is done to it."""
        return replace(self.product, out_dtype="float32")


@custom_vjp(nondiff_argnums=(5,))
def fused_matmul(
    x: jax.Array, w: jax.Array, up: Optional, bias: Optional, residual: Optional, fusion: Fusion
) -> jax.Array:
    """(M, K) x (K, N) and its epilogue, rounded once."""
    return fused_matmul_kernel(x, w, *(a for a in (up, bias, residual) if a is not None), fusion=fusion)[0]


def _forward(
    x: jax.Array, w: jax.Array, up: Optional, bias: Optional, residual: Optional, fusion: Fusion
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Optional, Optional]]:
    return fused_matmul(x, w, up, bias, residual, fusion), (x, w, up, bias)


def _backward(
    fusion: Fusion, saved: tuple[jax.Array, jax.Array, Optional, Optional], g: jax.Array
) -> tuple[Optional, ...]:
    x, w, up, bias = saved
    to_residual = g if fusion.given[2] else None
    if up is None and fusion.activation is None:
        dx, dw, db = matmul_gradients(fusion.product, (x, w, bias), g)
        return dx, dw, None, db, to_residual
    first = differentiable_matmul(x, w, bias, fusion.wide)
    # The cotangents of the products have the dtype of the result, as in a plain matmul.
    if up is None:
        d_first = _pull_back(fusion.activation)(first, g).astype(g.dtype)
        dx, dw, db = matmul_gradients(fusion.product, (x, w, bias), d_first)
        return dx, dw, None, db, to_residual
    second = differentiable_matmul(x, up, None, fusion.wide)
    d_first, d_second = (d.astype(g.dtype) for d in _pull_back_gated(fusion.activation)(first, second, g))
    through_first, dw, _ = matmul_gradients(fusion.product, (x, w, None), d_first)
    through_second, d_up, _ = matmul_gradients(fusion.product, (x, up, None), d_second)
    return through_first + through_second, dw, d_up, None, to_residual


fused_matmul.defvjp(_forward, _backward)


@functools.cache
def _pull_back(activation: str | None) -> Callable[..., jax.Array]:
    """Returns the map of (z, cotangent) to the cotangent of z, for activation(z)."""

    @elementwise
    def pull_back(z: jax.Array, g: jax.Array) -> jax.Array:
        _, pull = jax.vjp(lambda z: activate(z, activation), z)
        return pull(g.astype(jnp.float32))[0]

    return pull_back


@functools.cache
def _pull_back_gated(activation: str | None) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns the map of (gate, up, cotangent) to the cotangents of both, for activation(gate) * up."""

    @elementwise
    def pull_back(gate: jax.Array, up: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, pull = jax.vjp(lambda gate, up: activate(gate, activation) * up, gate, up)
        return pull(g.astype(jnp.float32))

    return pull_back


def _fused(target: Target, x: jax.Array, w: jax.Array, *others: jax.Array, fusion: Fusion) -> Arrays:
    """Runs the kernel where there is one."""
    product = fusion.product
    up, bias, residual = _name(others, fusion)
    operation, operands = "fused_matmul", [x, w]
    options = {
        "transpose_w": product.transpose_w,
        "out_dtype": product.out_dtype,
        "activation": fusion.activation,
    }
    if up is None:
        options |= {"bias": bias, "residual": residual}
    else:
        operation, operands = "gated_matmul", [x, w, up]
    spec = product.spec(x, w, fusion.activation)
    y = run_if_served(operation, target, spec, *operands, like=products_like, **options)
    return _compose(target, x, w, *others, fusion=fusion) if y is None else (y,)


def _compose(target: Target, x: jax.Array, w: jax.Array, *others: jax.Array, fusion: Fusion) -> Arrays:
    """Computes it from plain products."""
    up, bias, residual = _name(others, fusion)
    products = [multiply(target, x, w, bias, product=fusion.wide)[0]]
    if up is not None:
        products += multiply(target, x, up, product=fusion.wide)
    last = () if residual is None else (residual,)

    def finish(first: jax.Array, *rest: jax.Array) -> Arrays:
        y = activate(first, fusion.activation)
        if up is not None:
            y = y * rest[0]
        if residual is not None:
            y = y + rest[-1].astype(jnp.float32)
        return (y.astype(fusion.product.out_dtype),)

    return run(portable.elementwise, *products, *last, program=finish, functions=XLA_FUNCTIONS)


def _name(others: Sequence[jax.Array], fusion: Fusion) -> tuple[Optional, Optional, Optional]:
    """Returns `up`, `bias` and `residual`, None for what there is not."""
    left = iter(others)
    up, bias, residual = (next(left) if given else None for given in fusion.given)
    return up, bias, residual


def _fold(size: int, arrays: Arrays, axes: Sequence[int | None], parameters: dict[str, Any]) -> Arrays | None:
    """Rows of a mapped x (and of its residual) are more rows; other mapped operands are not folded."""
    last = len(arrays) - 1 if parameters["fusion"].given[2] else None
    if any(d is not None for i, d in enumerate(axes) if i not in (0, last)):
        return None
    rows = [0] if last is None else [0, last]
    folded = dict(zip(rows, fold_rows(size, tuple(arrays[i] for i in rows), [axes[i] for i in rows]), strict=True))
    return unfold_rows(size, fused_matmul_kernel(*(folded.get(i, a) for i, a in enumerate(arrays)), **parameters))


def _shape(x: jax.Array, w: jax.Array, *_: jax.Array, fusion: Fusion) -> Arrays:
    n = w.shape[-2 if fusion.product.transpose_w else -1]
    return (jnp.zeros((x.shape[0], n), fusion.product.out_dtype),)


fused_matmul_kernel = define_kernel("fused_matmul", _fused, _fold, _shape)
"""(M, K) x (K, N), or (N, K) with `transpose_w`, then `up`, `bias`, `residual` if present; parameter `fusion`."""

"""The backends of matmul: for each platform the kernels and the contract under which they sum.

A backend's functions take matrices or stacks of them, and choose their contract themselves, from the length of the
sum, the storage of the weights, the dtype and the architecture; never from the number of rows.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from bijax.core.architecture import HOPPER, cuda_architecture
from bijax.core.contracts import note, run
from bijax.core.on_first_use import on_first_use
from pallas_kernels.contract import (
    ChunkContract,
    MatmulContract,
    PartsChunkContract,
    PartsContract,
    ShardContract,
    SplitChunkContract,
    SplitWgmmaContract,
    Tf32Contract,
    WgmmaChunkContract,
    WgmmaContract,
    add_as_tree,
    chunk_contract,
    matmul_contract,
    shard_length,
    split_contract,
)
from pallas_kernels.ops.matmul import cpu
from pallas_kernels.ops.matmul.cpu import gradient, stacked

if TYPE_CHECKING:
    from pallas_kernels.ops.matmul import hopper, triton
    from pallas_kernels.ops.matmul.hopper import bf16x6, parts, tf32
else:
    hopper = on_first_use("pallas_kernels.ops.matmul.hopper.launch")
    bf16x6 = on_first_use("pallas_kernels.ops.matmul.hopper.bf16x6")
    parts = on_first_use("pallas_kernels.ops.matmul.hopper.parts")
    tf32 = on_first_use("pallas_kernels.ops.matmul.hopper.tf32")
    triton = on_first_use("pallas_kernels.ops.matmul.triton")

Kernel = Callable[..., jax.Array]
Matmul = Callable[[jax.Array, jax.Array, jax.Array | None, "Product"], jax.Array]

_WIDE: Final = MatmulContract(128, dtype="float64")

IN_TF32: Final = {
    "default",
    "high",
    "tf32_tf32_f32",
    "f16_f16_f32",
    "f16_f16_f16",
    "bf16_bf16_f32",
    "bf16_bf16_bf16",
}
"""The precisions for which JAX multiplies float32 operands in TF32 on a GPU, or in less; every other is float32."""


@dataclass(frozen=True)
class Product:
    """What a backend is told of a product besides its operands.

    Attributes:
        out_dtype: Dtype of the result, to which the sum is rounded once.
        transpose_w: Whether the weights are stored as (N, K).
        precision: See `bijax.dispatch.precision.precision_name`.
        as_columns: Whether weights stored as (N, K) stand for their transpose: the sum has the order of `x @ w` then.
        shards: Shards into which K is cut, each summed under the backend's contract and the sums added as a tree
            (`pallas_kernels.contract.add_as_tree`); 1 leaves K whole. Gradients of weights have none.
    """

    out_dtype: str
    transpose_w: bool = False
    precision: str = "default"
    as_columns: bool = False
    shards: int = 1


class Backend(NamedTuple):
    """The functions of a backend.

    Attributes:
        matmul: Maps x (M, K), w (K, N) or (N, K), a bias (N,) or None, and the product to (M, N). Or a stack of
            weights, with a stack of x or one x, to a stack.
        weight_gradient: Maps x (M, K), g (M, N), a float32 sum to continue or None, and the product of which it is the
            gradient to (K, N), or (N, K) with `transpose_w`. Or a stack of x, of g or of both, to a stack.
    """

    matmul: Matmul
    weight_gradient: Callable[[jax.Array, jax.Array, jax.Array | None, Product], jax.Array]


def _by_shards(matmul: Matmul) -> Matmul:
    """Returns a backend's matmul that also takes K cut into shards: products of the parts, and a tree of additions."""

    def by_shards(x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product) -> jax.Array:
        k = x.shape[-1]
        length = shard_length(k, product.shards)
        if length >= k or product.shards == 1:
            return matmul(x, w, bias, replace(product, shards=1))
        note(add_as_tree, ShardContract(product.shards), arrays=(x, w))
        part = replace(product, shards=1, out_dtype="float32")
        k_axis = w.ndim - (1 if product.transpose_w else 2)

        def shard(index: int) -> jax.Array:
            start, stop = index * length, min(k, (index + 1) * length)
            return matmul(x[..., start:stop], lax.slice_in_dim(w, start, stop, axis=k_axis), None, part)

        total: jax.Array = add_as_tree(shard, -(-k // length))
        return (total if bias is None else total + bias.astype(jnp.float32)).astype(product.out_dtype)

    return by_shards


def _cpu_matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product) -> jax.Array:
    return _fold_matmul((cpu.matmul, stacked.matmul), x, w, bias, product)


def _cpu_weight_gradient(x: jax.Array, g: jax.Array, total: jax.Array | None, product: Product) -> jax.Array:
    kernels = gradient.weight_gradient, gradient.stacked_weight_gradient
    return _fold_gradient(kernels, chunk_contract(), x, g, total, product)


def _triton_matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product) -> jax.Array:
    return _fold_matmul((triton.matmul, triton.matmul), x, w, bias, product)


def _triton_weight_gradient(x: jax.Array, g: jax.Array, total: jax.Array | None, product: Product) -> jax.Array:
    kernels = triton.weight_gradient, triton.weight_gradient
    return _fold_gradient(kernels, chunk_contract(), x, g, total, product)


def _fold_matmul(
    kernels: tuple[Kernel, Kernel], x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product
) -> jax.Array:
    """Multiplies by a kernel for matrices or by one for stacks, under a `MatmulContract`."""
    if "float64" in (x.dtype.name, w.dtype.name, product.out_dtype):
        contract = _WIDE
    else:
        contract = matmul_contract(x.shape[-1], transpose_w=product.transpose_w and not product.as_columns)
    single, stack = kernels
    if w.ndim == 2:
        y = run(single, x, w, like=sums_like, contract=contract, transpose_w=product.transpose_w)
    else:
        x = jnp.broadcast_to(x, (*w.shape[:-2], *x.shape[-2:]))
        y = run(stack, x, w, like=sums_like, contract=contract, transpose_w=product.transpose_w)
    return (y if bias is None else y + bias.astype(jnp.float32)).astype(product.out_dtype)


def _fold_gradient(
    kernels: tuple[Kernel, Kernel],
    contract: ChunkContract | SplitChunkContract,
    x: jax.Array,
    g: jax.Array,
    total: jax.Array | None,
    product: Product,
) -> jax.Array:
    """The same for gradients, under a contract of chunks."""
    left, right = (g, x) if product.transpose_w else (x, g)
    single, stack = (functools.partial(run, kernel, like=_gradient_sums, contract=contract) for kernel in kernels)
    lead = x.shape[:-2] or g.shape[:-2]
    left, right = (jnp.broadcast_to(a, (*lead, *a.shape[-2:])) for a in (left, right))
    if not lead:
        y = single(left, right, accumulate=total)
    elif total is None:
        y = stack(left, right)
    else:
        y = lax.map(lambda entry: single(*entry[:2], accumulate=entry[2]), (left, right, total))
    return y.astype(product.out_dtype)


def _hopper_matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product) -> jax.Array:
    if product.shards > 1 and w.ndim > 2:
        x = jnp.broadcast_to(x, (*w.shape[:-2], *x.shape[-2:]))
        stack: jax.Array = lax.map(lambda entry: _hopper_matmul(entry[0], entry[1], bias, product), (x, w))
        return stack
    return run(
        hopper.matmul,
        x,
        w,
        like=sums_like,
        contract=hopper_contract(product),
        transpose_w=product.transpose_w,
        bias=bias,
        out_dtype=product.out_dtype,
    )


def hopper_contract(product: Product) -> WgmmaContract | SplitWgmmaContract:
    """Returns the contract under which wgmma sums a product."""
    return WgmmaContract() if product.shards == 1 else SplitWgmmaContract(product.shards)


def _hopper_weight_gradient(x: jax.Array, g: jax.Array, total: jax.Array | None, product: Product) -> jax.Array:
    left, right = (g, x) if product.transpose_w else (x, g)
    return run(
        hopper.weight_gradient,
        left,
        right,
        like=_gradient_sums,
        contract=WgmmaChunkContract(),
        accumulate=total,
        out_dtype=product.out_dtype,
    )


def _hopper_float32_matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product) -> jax.Array:
    bias = None if bias is None else bias.astype(jnp.float32)
    options: dict[str, Any] = {"transpose_w": product.transpose_w, "bias": bias, "out_dtype": product.out_dtype}
    if product.precision in IN_TF32:
        return run(tf32.matmul, x, w, like=sums_like, contract=Tf32Contract(), **options)
    return run(bf16x6.matmul, x, w, like=sums_like, contract=split_contract(x.shape[-1]), **options)


def _hopper_float32_weight_gradient(x: jax.Array, g: jax.Array, total: jax.Array | None, product: Product) -> jax.Array:
    def stack(x: jax.Array, g: jax.Array, *, contract: SplitChunkContract) -> jax.Array:
        entries: jax.Array = lax.map(lambda e: bf16x6.weight_gradient(*e, contract=contract), (x, g))
        return entries

    return _fold_gradient((bf16x6.weight_gradient, stack), SplitChunkContract(), x, g, total, product)


def parts_of(product: Product) -> int:
    """Returns the bfloat16 parts of a float32 operand beside a bfloat16 one: as exact as JAX's product, or more."""
    return 2 if product.precision in IN_TF32 else 3


def _hopper_mixed_matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product) -> jax.Array:
    return run(
        parts.matmul,
        x,
        w,
        like=sums_like,
        contract=PartsContract(parts_of(product)),
        transpose_w=product.transpose_w,
        bias=bias,
        out_dtype=product.out_dtype,
    )


def _hopper_mixed_weight_gradient(x: jax.Array, g: jax.Array, total: jax.Array | None, product: Product) -> jax.Array:
    left, right = (g, x) if product.transpose_w else (x, g)
    return run(
        parts.weight_gradient,
        left,
        right,
        like=_gradient_sums,
        contract=PartsChunkContract(parts_of(product)),
        accumulate=total,
        out_dtype=product.out_dtype,
    )


def sums_like(
    x: jax.Array, w: jax.Array, *, transpose_w: bool = False, out_dtype: Any = jnp.float32, **_: Any
) -> jax.Array:
    """Returns an array of the shape of a product."""
    return jnp.zeros((*w.shape[:-2], x.shape[-2], w.shape[-2 if transpose_w else -1]), out_dtype)


def _gradient_sums(x: jax.Array, g: jax.Array, *, out_dtype: Any = jnp.float32, **_: Any) -> jax.Array:
    """Returns an array of the shape of a weight gradient."""
    lead = x.shape[:-2] or g.shape[:-2]
    return jnp.zeros((*lead, x.shape[-1], g.shape[-1]), out_dtype)


CPU: Final = Backend(_by_shards(_cpu_matmul), _cpu_weight_gradient)
PORTABLE: Final = Backend(_by_shards(_triton_matmul), _triton_weight_gradient)
HOPPER_16_BIT: Final = Backend(_hopper_matmul, _hopper_weight_gradient)
HOPPER_FLOAT32: Final = Backend(_by_shards(_hopper_float32_matmul), _hopper_float32_weight_gradient)
HOPPER_MIXED: Final = Backend(_by_shards(_hopper_mixed_matmul), _hopper_mixed_weight_gradient)

CUDA: Final[dict[tuple[str, str], Backend]] = {
    (HOPPER, "bfloat16"): HOPPER_16_BIT,
    (HOPPER, "float16"): HOPPER_16_BIT,
    (HOPPER, "float32"): HOPPER_FLOAT32,
}
"""The backend for an architecture and the dtype of the operands; `PORTABLE` serves every other pair."""


def _cuda_matmul(x: jax.Array, w: jax.Array, bias: jax.Array | None, product: Product) -> jax.Array:
    backend, x, w = for_operands(x, w, product)
    return backend.matmul(x, w, bias, product)


def _cuda_weight_gradient(x: jax.Array, g: jax.Array, total: jax.Array | None, product: Product) -> jax.Array:
    backend, x, g = for_operands(x, g, product)
    return backend.weight_gradient(x, g, total, product)


def for_operands(a: jax.Array, b: jax.Array, product: Product) -> tuple[Backend, jax.Array, jax.Array]:
    """Returns the backend for two operands, and the operands in a dtype that it takes and that holds their values."""
    mixed = {a.dtype.name, b.dtype.name} == {"bfloat16", "float32"} and product.out_dtype != "float64"
    if mixed and cuda_architecture() == HOPPER:
        return HOPPER_MIXED, a, b
    dtype = jnp.promote_types(a.dtype, b.dtype)
    if product.out_dtype == "float64":
        dtype = jnp.dtype("float64")
    return CUDA.get((cuda_architecture(), dtype.name), PORTABLE), a.astype(dtype), b.astype(dtype)


def storage_is_free(a: jax.Array, b: jax.Array, product: Product) -> bool:
    """Returns whether a GPU's products of two operands have one order of the sum, whatever their storage and place."""
    return for_operands(a, b, product)[0] in (HOPPER_16_BIT, HOPPER_MIXED)


PLATFORMS: Final = {"cpu": CPU, "cuda": Backend(_cuda_matmul, _cuda_weight_gradient)}
"""The backend that a platform's lowering calls."""

"""Helpers shared by the Hopper matmuls: argument checks, padding, empty sums."""

import math
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.errors import UnsupportedError
from pallas_kernels.matmul.schedule.hopper.chain import ChainSchedule
from pallas_kernels.schedule.hopper.tiles import SHARED_BYTES

_CAPABILITY: Final = "9.0"
_FLOAT32: Final = jnp.dtype(jnp.float32)
_RESULTS: Final = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), _FLOAT32)


def check_contract(op: str, contract: Any, kind: type) -> None:
    """Raises `UnsupportedError` unless the contract is of the kind that a backend supports."""
    if not isinstance(contract, kind):
        raise UnsupportedError(
            f"{op}: expected a {kind.__name__}, the one order that this backend sums in, got {contract!r}; ask the"
            " backend of that contract instead."
        )


def check_operands(
    op: str, x: Any, w: Any, bias: Any, transpose_w: bool, out_dtype: Any, dtypes: tuple[Any, ...]
) -> None:
    """Raises `UnsupportedError` unless the operands are matrices, or stacks, of compatible shapes and one dtype.

    Args:
        op: Name of the operation.
        x: The rows.
        w: The weights.
        bias: The bias, or None.
        transpose_w: Whether the weights are stored as (N, K).
        out_dtype: Dtype of the result.
        dtypes: Allowed dtypes of the operands.
    """
    came = f"got x {x.dtype}{list(x.shape)}, w {w.dtype}{list(w.shape)}, {transpose_w=}, out_dtype={out_dtype.name}"
    if x.ndim < 2 or w.ndim < 2 or x.shape[:-2] not in ((), w.shape[:-2]):
        raise UnsupportedError(
            f"{op}: expected x (..., M, K) and w (..., K, N) with equal leading dimensions, or x (M, K), {came}; fold"
            " the leading dimensions of x into its rows where they share the weights."
        )
    if x.shape[-1] != w.shape[-1 if transpose_w else -2]:
        raise UnsupportedError(
            f"{op}: expected equal contracted lengths, {came}; pass transpose_w={not transpose_w} if w is stored the"
            " other way."
        )
    if x.dtype != w.dtype or x.dtype not in dtypes:
        names = " or ".join(dtype.name for dtype in dtypes)
        raise UnsupportedError(
            f"{op}: expected x and w of one dtype, {names}, {came}; cast them, or use another backend."
        )
    check_result(op, out_dtype, came)
    n = w.shape[-2 if transpose_w else -1]
    if bias is not None and (bias.shape != (n,) or bias.dtype not in (x.dtype, _FLOAT32)):
        names = " or ".join(dict.fromkeys((x.dtype.name, _FLOAT32.name)))
        raise UnsupportedError(
            f"{op}: expected a bias ({n},) of {names}, got bias {bias.dtype}{list(bias.shape)}, {came}; give one value"
            " for each column of the result."
        )


def check_result(op: str, out_dtype: Any, came: str) -> None:
    """Raises `UnsupportedError` unless a kernel can write results of the dtype; `came` describes the argument."""
    if out_dtype not in _RESULTS:
        raise UnsupportedError(f"{op}: expected out_dtype bfloat16, float16 or float32, {came}; cast the result.")


def check_shared_memory(op: str, schedule: Any, needed: int) -> None:
    """Raises `UnsupportedError` if a schedule needs more shared memory than available."""
    if needed > SHARED_BYTES:
        raise UnsupportedError(
            f"{op}: expected a schedule that fits into {SHARED_BYTES} bytes of shared memory, got one that needs"
            f" {needed}: {schedule}; lower its stages or its tile."
        )


def check_chain(op: str, schedule: ChainSchedule, itemsize: int, transpose_w: bool) -> None:
    """Raises `UnsupportedError` if a schedule of few rows does not suit operands of a size."""
    if not schedule.fits(itemsize, transpose_w):
        raise UnsupportedError(
            f"{op}: expected a ChainSchedule with rows of (K, N) weights of at least 32 bytes, with (N, K) weights for"
            f" others than registers, and a k_step of 128 to 1024 bytes, got {schedule}, {transpose_w=} and {itemsize}"
            " bytes an element; use a MatmulSchedule."
        )
    check_shared_memory(op, schedule, schedule.shared_bytes(itemsize))


def check_device(op: str) -> None:
    """Refuses a GPU without wgmma in this process; a process without a GPU may lower for a Hopper one elsewhere."""
    if jax.default_backend() != "gpu":
        return
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", "unknown")
    if capability != _CAPABILITY:
        raise UnsupportedError(
            f"{op}: expected a Hopper GPU (compute capability {_CAPABILITY}), got {device.device_kind} with"
            f" {capability}; use `bijax.matmul`, which chooses a kernel for this GPU."
        )


def empty(shape: tuple[int, ...], bias: jax.Array | None, out_dtype: Any) -> jax.Array:
    """Returns an empty sum (zero) plus the bias."""
    value = jnp.zeros(shape[-1:], jnp.float32) if bias is None else bias
    return jnp.broadcast_to(value.astype(out_dtype), shape)


def one_axis(a: jax.Array) -> jax.Array:
    """Returns a stack with one leading axis; a matrix is returned unchanged."""
    return a.reshape(math.prod(a.shape[:-2]), *a.shape[-2:]) if a.ndim > 2 else a


def pad(a: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Returns `a` zero-padded along `axis`, or `a` itself if its size is already a multiple."""
    missing = -a.shape[axis] % multiple
    if not missing:
        return a
    return jnp.pad(a, [(0, missing if d == axis % a.ndim else 0) for d in range(a.ndim)])


def pad_weights(w: jax.Array, transpose_w: bool, k_multiple: int, n_multiple: int) -> jax.Array:
    """Returns weights, (K, N) or (N, K) with `transpose_w`, with both dimensions padded to a multiple."""
    k_axis, n_axis = (-1, -2) if transpose_w else (-2, -1)
    return pad(pad(w, k_axis, k_multiple), n_axis, n_multiple)


def unpad(out: jax.Array, *shape: int) -> jax.Array:
    """Returns the first rows and columns of padded matrices, with the leading dimensions of `shape`."""
    m, n = shape[-2:]
    return (out if out.shape[-2:] == (m, n) else out[..., :m, :n]).reshape(shape)

"""Embedding and sampling with a vocabulary that is cut over devices.

Nothing is added over devices: rows move as they are, and each is computed by one device under the contract of one
device.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.core.checks import describe, float_array, integer_array
from bijax.ops.embed import embed
from bijax.ops.rows.softmax import log_softmax
from bijax.parallel._axes import Axis, check_differentiable, devices_of, names_of, vary_over
from bijax.parallel._sums import gathered
from bijax.sampling import Sampled, sample

_EMBED, _ARGMAX, _LOGPROBS, _SAMPLE = (
    f"bijax.parallel.vocab_parallel_{name}" for name in ("embed", "argmax", "logprobs", "sample")
)
_BITS = 16
_FEW: Final = 1 << 16
"""Elements up to which a sum of float32 over GPUs is one kernel of XLA's, where a sum of integers is NCCL's."""


def vocab_parallel_embed(table: Any, tokens: Any, axis: Axis) -> jax.Array:
    """Looks up rows of a table whose rows are cut over devices, as `bijax.embed` does.

    The device that has a token's row sends its bits; they are not added as numbers, so that -0.0 stays -0.0.

    Args:
        table: (V / D, C) float32, bfloat16 or float16, this device's rows.
        tokens: (...) integers, the same on all devices. A token outside the whole table gets nan and has no gradient.
        axis: Name of the mesh axis, or a tuple of names; None for one device.

    Returns:
        (..., C) of the dtype of `table`, the same on all devices.

    Raises:
        TypeError: If a dtype or the axis is invalid.
        ValueError: If `table` does not have two dimensions, the axis is unknown, or its number of devices is not a
            power of two.
        UnsupportedError: When differentiated, if `jax.shard_map` has `check_vma=False`.

    Guarantee: the result and the gradient have the bits of `bijax.embed` with the whole table.

    Example:
        >>> vocab_parallel_embed(jnp.arange(6.0).reshape(3, 2), jnp.array([2, 0]), None).tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """
    table, tokens = float_array(_EMBED, "table", table), integer_array(_EMBED, "tokens", tokens, on_host=False)
    if table.ndim != 2:
        raise ValueError(f"{_EMBED}: table must have two dimensions (tokens, features), got {describe(table)}.")
    count, rows = devices_of(_EMBED, axis), table.shape[0]
    if axis is None:
        return embed(table, tokens)
    inside = (tokens >= 0) & (tokens < rows * count)
    places = jnp.where(inside, tokens, -1).astype(jnp.int32) - lax.axis_index(names_of(axis)) * rows
    mine = (places >= 0) & (places < rows)
    return _from_owner(axis)(embed(vary_over(axis, table), places), mine, inside)


def _from_owner(axis: Axis) -> Callable[..., jax.Array]:
    """Returns a function that gives each token its row from the device that has it, and nan if none has."""

    @jax.custom_vjp
    def from_owner(rows: jax.Array, mine: jax.Array, inside: jax.Array) -> jax.Array:
        bits = _bits(rows)
        moved = _numbers(lax.psum(jnp.where(mine[..., None], bits, bits.dtype.type(0)), names_of(axis)), rows)
        return jnp.where(inside[..., None], moved, jnp.full((), jnp.nan, rows.dtype))

    def forward(rows: jax.Array, mine: jax.Array, inside: jax.Array) -> tuple[jax.Array, None]:
        check_differentiable(_EMBED, axis)
        return from_owner(rows, mine, inside), None

    def backward(_: None, g: jax.Array) -> tuple[jax.Array, None, None]:
        # A token outside of this device's rows has no gradient here: `embed` drops it.
        return vary_over(axis, g), None, None

    from_owner.defvjp(forward, backward)
    return from_owner


def _bits(rows: jax.Array) -> jax.Array:
    """Returns numbers as what can be added to zeros: uint32, two of 16 bits in one where their number is even.

    The bits of few numbers of 16 are integers below 2**16 in float32, which adds them to zeros exactly.
    """
    if rows.dtype.itemsize * 8 > _BITS:
        return lax.bitcast_convert_type(rows, jnp.uint32)
    if rows.size <= _FEW:
        return lax.bitcast_convert_type(rows, jnp.uint16).astype(jnp.float32)
    if rows.shape[-1] % 2:
        return lax.bitcast_convert_type(rows, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(rows.reshape(*rows.shape[:-1], rows.shape[-1] // 2, 2), jnp.uint32)


def _numbers(bits: jax.Array, like: jax.Array) -> jax.Array:
    """Undoes `_bits`."""
    if like.dtype.itemsize * 8 > _BITS:
        return lax.bitcast_convert_type(bits, like.dtype)
    if like.size <= _FEW or like.shape[-1] % 2:
        return lax.bitcast_convert_type(bits.astype(jnp.uint16), like.dtype)
    return lax.bitcast_convert_type(bits, like.dtype).reshape(like.shape)


def vocab_parallel_argmax(logits: Any, axis: Axis) -> jax.Array:
    """Returns the first of the largest logits of each row, where the columns are cut over devices.

    No row moves: each device sends its largest logit and its place.

    Args:
        logits: (..., V / D) float32, bfloat16 or float16, this device's columns.
        axis: As for `vocab_parallel_embed`.

    Returns:
        (...) int32, as `jnp.argmax` of the whole rows, the same on all devices.

    Raises:
        TypeError: If a dtype or the axis is invalid.
        ValueError: If there are no columns, the axis is unknown, or its number of devices is not a power of two.

    Guarantee: the result of one device. It is exact.

    Example:
        >>> vocab_parallel_argmax(jnp.array([[1.0, 3.0, 3.0]]), None).tolist()
        [1]
    """
    logits = _logits(_ARGMAX, logits)
    devices_of(_ARGMAX, axis)
    place = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if axis is None:
        return place
    value = jnp.take_along_axis(logits, place[..., None], axis=-1)[..., 0]
    place = place + lax.axis_index(names_of(axis)) * logits.shape[-1]
    values, places = (lax.all_gather(vary_over(axis, x), names_of(axis), to="invarying") for x in (value, place))
    # Of equal values, and of nans, the first device has the lower columns.
    best = jnp.argmax(values, axis=0)
    return jnp.take_along_axis(places, best[None], axis=0)[0]


def vocab_parallel_logprobs(logits: Any, tokens: Any, axis: Axis) -> jax.Array:
    """Returns the log-probabilities of tokens, from logits whose columns are cut over devices.

    Each device gets whole rows, as many as the others, and computes `bijax.log_softmax` of them; the gradients return
    the same way.

    Args:
        logits: (..., V / D) float32, bfloat16 or float16, this device's columns.
        tokens: (...) integers in [0, V), the same on all devices; nan for others.
        axis: As for `vocab_parallel_embed`.

    Returns:
        (...) of the dtype of `logits`, the same on all devices.

    Raises:
        TypeError: If a dtype or the axis is invalid.
        ValueError: If the shapes do not fit, the axis is unknown, or its number of devices is not a power of two.

    Guarantee: the result and the gradient have the bits of one device, those of `bijax.log_softmax`.

    Example:
        >>> vocab_parallel_logprobs(jnp.zeros((1, 4)), jnp.array([2]), None).tolist()
        [-1.3862943649291992]
    """
    logits, tokens = _logits(_LOGPROBS, logits), integer_array(_LOGPROBS, "tokens", tokens, on_host=False)
    if tokens.shape != logits.shape[:-1]:
        raise ValueError(
            f"{_LOGPROBS}: tokens must have the shape {logits.shape[:-1]} of the rows, got {describe(tokens)} for"
            f" logits {describe(logits)}."
        )
    devices_of(_LOGPROBS, axis)
    count = math.prod(tokens.shape)
    rows = _whole_rows(logits.reshape(count, logits.shape[-1]), axis)
    mine = _own_rows(jnp.asarray(tokens).reshape(count), axis, rows.shape[0])
    found = jnp.take_along_axis(log_softmax(rows), mine[:, None], axis=-1, mode="fill", fill_value=jnp.nan)[:, 0]
    return _of_all_rows(found, axis, count).reshape(tokens.shape)


def vocab_parallel_sample(
    logits: Any, axis: Axis, *, seeds: Any, positions: Any, num_top: int = 0, **options: Any
) -> Sampled:
    """Samples a token from each row of logits whose columns are cut over devices, as `bijax.sampling.sample` does.

    Each device gets whole rows, as many as the others, and samples from them.

    Args:
        logits: (R, V / D) float32, bfloat16 or float16, this device's columns.
        axis: As for `vocab_parallel_embed`.
        seeds: (R,) or (R, 2), as for `sample`; like all arguments that follow, the same on all devices.
        positions: (R,) integers.
        num_top: Number of top log-probabilities.
        **options: The other arguments of `sample`: numbers or (R,), and (R, V) with all columns.

    Returns:
        A `Sampled`, the same on all devices.

    Raises:
        TypeError: If a dtype or the axis is invalid.
        ValueError: If a shape does not fit, the axis is unknown, or its number of devices is not a power of two.

    Guarantee: the result has the bits of one device.

    Example:
        >>> logits = jnp.array([[0.0, 3.0, 1.0]])
        >>> vocab_parallel_sample(logits, None, seeds=[1], positions=[7], temperature=0.0).tokens.tolist()
        [1]
    """
    logits = _logits(_SAMPLE, logits)
    if logits.ndim != 2:
        raise ValueError(f"{_SAMPLE}: logits must have two dimensions (rows, tokens), got {describe(logits)}.")
    devices_of(_SAMPLE, axis)
    count = logits.shape[0]
    rows = _whole_rows(logits, axis)

    def own(value: Any) -> Any:
        array = None if value is None else _array(value)
        is_of_rows = array is not None and array.ndim and array.shape[0] == count
        return _own_rows(array, axis, rows.shape[0]) if array is not None and is_of_rows else value

    flags = {name: options.pop(name) for name in ("need_logprobs", "batch_invariant") if name in options}
    others = {name: own(value) for name, value in options.items()}
    found = sample(rows, seeds=own(seeds), positions=own(positions), num_top=num_top, **others, **flags)
    return Sampled(*(_of_all_rows(field, axis, count) for field in found))


def _logits(op: str, logits: Any) -> jax.Array:
    logits = float_array(op, "logits", logits)
    if not logits.ndim or not logits.shape[-1]:
        raise ValueError(f"{op}: logits must have columns, got {describe(logits)}.")
    return logits


def _array(value: Any) -> jax.Array:
    """Returns an argument of `sample` as an array; NumPy's and Python's integers of 32 bits keep their values."""
    if not isinstance(value, jax.Array):
        value = np.asarray(value)
        if value.dtype.kind in "iu" and value.size and np.iinfo(np.int32).max < value.max() <= np.iinfo(np.uint32).max:
            value = value.astype(np.uint32)
    return jnp.asarray(value)


def _whole_rows(logits: jax.Array, axis: Axis) -> jax.Array:
    """Exchanges the columns (R, V / D) of all rows for all columns (R / D, V) of this device's rows, R rounded up."""
    if axis is None:
        return logits
    padded = jnp.pad(logits, ((0, -logits.shape[0] % devices_of("", axis)), (0, 0)))
    return lax.all_to_all(vary_over(axis, padded), names_of(axis), split_axis=0, concat_axis=1, tiled=True)


def _own_rows(x: jax.Array, axis: Axis, rows: int) -> jax.Array:
    """Returns this device's rows of an array that all devices have."""
    if axis is None:
        return x
    missing = rows * devices_of("", axis) - x.shape[0]
    padded = jnp.concatenate([x, jnp.broadcast_to(x[:1], (missing, *x.shape[1:]))])
    return lax.dynamic_slice_in_dim(padded, lax.axis_index(names_of(axis)) * rows, rows)


def _of_all_rows(x: jax.Array, axis: Axis, count: int) -> jax.Array:
    """Returns the first rows of those that the devices have."""
    return gathered(x if axis is None else vary_over(axis, x), axis, 0, to="invarying")[:count]

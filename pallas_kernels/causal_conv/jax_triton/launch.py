"""Causal convolution on NVIDIA GPUs from Ampere on: activation, lengths of heads and stored tokens in one kernel."""

from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp

from pallas_kernels.causal_conv.heads import Heads
from pallas_kernels.causal_conv.jax_triton.kernels import (
    extend_heads_kernel,
    extend_kernel,
    whole_heads_kernel,
    whole_kernel,
)
from pallas_kernels.causal_conv.schedule.jax_triton import ConvSchedule, conv_schedule
from pallas_kernels.contract import XLA_FUNCTIONS, ElementwiseContract, RowContract, honour, row_contract
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.parts.served import served_if
from pallas_kernels.parts.xla.tiles import next_power_of_two
from pallas_kernels.target import Target

Arrays = tuple[jax.Array, ...]
_TAPS: Final = 4
_WIDTH: Final = 128
_DTYPES: Final = frozenset({"float32", "bfloat16", "float16"})
_MOST_OF_GRID: Final = 65535
_FEW: Final = 8
"""Tokens of a sequence for which a transposed weight is not made."""

_NEEDS: Final = f"{_TAPS} taps of float32, bfloat16 or float16, and heads of {_WIDTH} channels"


@dataclass(frozen=True)
class ConvForm:
    """What a kernel knows of its convolution when it is compiled.

    Attributes:
        source: Columns of a token; the channels are the first ones.
        channels: Channels that are convolved.
        taps: Tokens of a window.
        biased: Whether there is a bias.
        silu: Whether silu is applied.
        keys: Heads of queries, and of keys; 0 if there is one result, not one for each kind of heads.
        values: Heads of values.
        eps: Added to the mean square of a head of queries or keys.
        scale: Factor of a head after that.
        kept: Tokens that the state of a sequence holds, 0 without one.
        slots: Whether sequences say where their tokens are in the state; else they are there in their own order.
        last: The most tokens of a call that are stored, or more: a power of two.
        rows: Rows of a program.
        phases: Tokens of a row.
        width: Channels of a block.
        apart: Whether the first program of a sequence has code of its own.
        turned: Whether the weight has the taps as rows, not as columns.
        rows_of_weights: Whether each row of tokens reads the weights, which is faster in bfloat16.
    """

    source: int
    channels: int
    taps: int
    biased: bool
    silu: bool
    keys: int
    values: int
    eps: float
    scale: float
    kept: int
    slots: bool
    last: int
    rows: int
    phases: int
    width: int
    apart: bool
    turned: bool
    rows_of_weights: bool


def _serves(x: Any, weight: Any, *, heads: Heads | None, contract: RowContract | None = None, **others: Any) -> bool:
    arrays = [x, weight, *(others[name] for name in ("bias", "before", "state") if others.get(name) is not None)]
    (batch, tokens, _), (channels, taps) = x.shape, weight.shape
    there = 0 < batch <= _MOST_OF_GRID and tokens > 0 and channels > 0 and tokens < 1 << 20
    known = {a.dtype.name for a in arrays} <= _DTYPES and taps == _TAPS
    fits = heads is None or (heads.width == heads.value_width == _WIDTH and contract == row_contract())
    return bool(there and known and fits)


@served_if(_serves, _NEEDS)
@in_32_bits
def causal_conv(
    x: jax.Array,
    weight: jax.Array,
    *,
    bias: jax.Array | None = None,
    before: jax.Array | None = None,
    activation: str | None,
    heads: Heads | None,
    functions: ElementwiseContract,
    contract: RowContract | None = None,
    target: Target,
    schedule: ConvSchedule | None = None,
) -> Arrays:
    """Bit-identical to `portable.causal_conv`, or to that and the norms of heads.

    Guarantee: row-invariant.
    """
    honour("causal_conv", functions, XLA_FUNCTIONS)
    kept = 0 if before is None else before.shape[1]
    schedule = schedule or conv_schedule(x.shape[1])
    return launch(
        whole_kernel if heads is None else whole_heads_kernel,
        *(x, _turned(x, weight), x if bias is None else bias, x if before is None else before, x.shape[1]),
        target=target,
        out=_results(x, weight, heads),
        **_options(x, weight, bias, activation, heads, kept, schedule),
    )


@served_if(_serves, _NEEDS)
@in_32_bits
def causal_conv_extend(
    x: jax.Array,
    weight: jax.Array,
    *,
    bias: jax.Array | None = None,
    state: jax.Array,
    first: jax.Array,
    count: jax.Array,
    slot: jax.Array | None = None,
    activation: str | None,
    heads: Heads | None,
    functions: ElementwiseContract,
    contract: RowContract | None = None,
    target: Target,
    schedule: ConvSchedule | None = None,
) -> Arrays:
    """Bit-identical to `portable.causal_conv_extend`, or to that and the norms of heads. The state is updated in place.

    Guarantee: row-invariant.
    """
    honour("causal_conv_extend", functions, XLA_FUNCTIONS)
    schedule = schedule or conv_schedule(x.shape[1])
    out = _results(x, weight, heads)
    return launch(
        extend_kernel if heads is None else extend_heads_kernel,
        *(
            x,
            _turned(x, weight),
            x if bias is None else bias,
            state,
            first,
            count,
            count if slot is None else slot,
            x.shape[1],
        ),
        target=target,
        out=[*out, jax.ShapeDtypeStruct(state.shape, state.dtype)],
        aliases={3: len(out)},
        **_options(x, weight, bias, activation, heads, state.shape[1], schedule, slots=slot is not None),
    )


def _turned(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the weight as the kernel reads it: for many tokens an own array is worth its time.

    Weights and tokens in bfloat16 come into the same registers.
    """
    if x.shape[1] <= _FEW:
        return weight
    return weight.T if x.dtype == weight.dtype == jnp.bfloat16 else weight.T.astype(jnp.float32)


def _results(x: jax.Array, weight: jax.Array, heads: Heads | None) -> list[jax.ShapeDtypeStruct]:
    batch, tokens, _ = x.shape
    if heads is None:
        return [jax.ShapeDtypeStruct((batch, tokens, weight.shape[0]), x.dtype)]
    of_keys = jax.ShapeDtypeStruct((batch, tokens, heads.keys, _WIDTH), x.dtype)
    return [of_keys, of_keys, jax.ShapeDtypeStruct((batch, tokens, heads.values, _WIDTH), x.dtype)]


def _options(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    activation: str | None,
    heads: Heads | None,
    kept: int,
    schedule: ConvSchedule,
    *,
    slots: bool = False,
) -> dict[str, Any]:
    (batch, tokens, source), (channels, taps) = x.shape, weight.shape
    of_norm = {"eps": 0.0, "offset": 0.0} if heads is None else heads.of_norm
    form = ConvForm(
        source,
        channels,
        taps,
        biased=bias is not None,
        silu=activation == "silu",
        keys=0 if heads is None else heads.keys,
        values=0 if heads is None else heads.values,
        eps=of_norm["eps"],
        scale=of_norm["offset"],
        kept=kept,
        slots=slots,
        last=next_power_of_two(min(tokens, kept)) if kept else 1,
        rows=schedule.rows,
        phases=schedule.phases,
        width=schedule.width,
        apart=taps - 1 <= schedule.rows * schedule.phases < tokens,
        turned=tokens > _FEW,
        rows_of_weights=x.dtype == jnp.bfloat16,
    )
    units = -(-channels // _WIDTH)
    return {
        "grid": (units, -(-tokens // (schedule.rows * schedule.phases)), batch),
        "warps": schedule.warps,
        "stages": 1,
        "fuses": False,
        "constants": {"form": form},
    }

"""The operations of a block whose experts are cut over devices, by the names that strategies of overlap use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

import jax
from jax import lax

from bijax.parallel import (
    DispatchedPart,
    Together,
    Transfer,
    join_parts,
    moe_combine_done,
    moe_combine_start,
    moe_dispatch_done,
    moe_dispatch_start,
    own_rows,
    split_dispatched,
)

from ._layered import Stored
from .block import Block, normalized
from .layers import DeltaNetSlots, GatedDeltaNet, LayerCache
from .layers.moe import router_logits, select_experts, shared_outputs
from .parallel_experts import ParallelMoE

type Values = dict[str, Any]
"""What is known of a batch; see `bijax.parallel.run_operations`."""


class Places(NamedTuple):
    """Where the tokens of a batch belong; see `ServedLlama.extend`."""

    page_table: jax.Array
    start: jax.Array
    lengths: jax.Array
    common_prefix: jax.Array | None
    slots: jax.Array | None


class BlockOperation(Protocol):
    """Maps what is known of a batch to what is new; see `bijax.parallel.run_operations`.

    In the beginning that is `stream`, the residual stream of a block; `rotary`, its angles; `places`; `cache_scales`,
    those of a cache of 8 bits or None; and `kept`, what the layer keeps, which is changed.
    """

    def __call__(self, block: Any, known: Values) -> Values:
        """Runs the operation of a block."""


def _comm_prepare_attn(block: Block, known: Values) -> Values:
    x, normed = normalized(block.attention_norm, known["stream"])
    return {"stream": (x, None), "normed": normed}


def _attn_prepare(block: Block, known: Values) -> Values:
    if isinstance(block.attention, GatedDeltaNet):  # it has no part before its state
        return {}
    places: Places = known["places"]
    keys, values = known["kept"]
    cache = LayerCache(keys, values, places.page_table, places.common_prefix, known["cache_scales"])
    where = {"start": places.start, "lengths": places.lengths}
    query, written = block.attention.prepare(known["normed"], known["rotary"], cache, **where)
    return {"query": query, "kept": (written.keys, written.values)}


def _attn_core(block: Block, known: Values) -> Values:
    places: Places = known["places"]
    where = {"start": places.start, "lengths": places.lengths}
    kept: Stored = known["kept"]
    y: Any
    if isinstance(block.attention, GatedDeltaNet):
        if not isinstance(kept, DeltaNetSlots) or places.slots is None:
            raise TypeError(f"Block: a layer of linear attention keeps states in slots, got a {type(kept).__name__}.")
        y, kept = block.attention.extend_slots(known["normed"], kept, places.slots, **where)
    else:
        keys, values = known["kept"]
        cache = LayerCache(keys, values, places.page_table, places.common_prefix, known["cache_scales"])
        y = block.attention.attend(known["normed"], known["query"], cache, **where)
    # Whoever writes there next does so after they were read, and XLA need not copy them.
    y, kept = lax.optimization_barrier((y, kept))
    return {"attended": y, "kept": kept, "query": None, "normed": None}


def _comm_prepare_mlp(block: Block, known: Values) -> Values:
    x, normed = block.add_attention(known["stream"][0], known["attended"])
    return {"stream": (x, None), "normed": normed, "attended": None}


def _mlp(block: Block, known: Values) -> Values:
    return {"result": block.mlp(known["normed"]), "normed": None}


def _gate(block: Block, known: Values) -> Values:
    experts = _experts_of(block)
    rows, router, _, _ = experts.operands(known["normed"])
    return {"scores": router_logits(experts.ops, rows, router)}


def _select_experts(block: Block, known: Values) -> Values:
    experts = _experts_of(block)
    axes, number = experts.cut.expert_axes, experts.routing.num_experts
    selected, weights = select_experts(experts.ops, known["scores"], experts.router_bias, experts.routing)
    # Rows that fill up the last device's part select no expert.
    own = {"selected": own_rows(selected, axes, fill=number), "weights": own_rows(weights, axes)}
    return {**own, "scores": None}


def _dispatch_a(block: Block, known: Values) -> Values:
    experts = _experts_of(block)
    axes, number = experts.cut.expert_axes, experts.routing.num_experts
    rows, _, _, _ = experts.operands(known["normed"])
    options: dict[str, Any] = {"num_experts": number, "zero_unused": False}
    sent, offset = moe_dispatch_start(own_rows(rows, axes), known["selected"], axes, **options)
    return {"sent": sent, "offset": offset, "selected": None}


def _shared_experts(block: Block, known: Values) -> Values:
    experts = _experts_of(block)
    if experts.shared is None:
        return {}
    dtype = experts.operands(known["normed"])[0].dtype
    return {"shared": shared_outputs(experts.ops, dtype, experts.shared, experts.shared_gate, known["normed"])}


def _dispatch_b(block: Block, known: Values) -> Values:
    return {"dispatched": moe_dispatch_done(known["sent"], known["offset"]), "sent": None, "offset": None}


def _experts_up(block: Block, known: Values) -> Values:
    experts, dispatched = _experts_of(block), known["dispatched"]
    _, _, gate_up, _ = experts.operands(known["normed"])
    inner = experts.first_product(dispatched.rows, gate_up, dispatched.counts)
    return {"inner": inner, "parts": split_dispatched(dispatched, experts.cut.expert_axes)}


def _experts(block: Block, known: Values) -> Values:
    experts, dispatched = _experts_of(block), known["dispatched"]
    _, _, gate_up, down = experts.operands(known["normed"])
    inner = experts.first_product(dispatched.rows, gate_up, dispatched.counts)
    return {"results": experts.second_product(inner, down, dispatched.counts)}


def _combine_a(block: Block, known: Values) -> Values:
    axes = _experts_of(block).cut.expert_axes
    return {"returned": moe_combine_start(known["results"], known["dispatched"], axes), "results": None}


def _combine_b(block: Block, known: Values) -> Values:
    return {**_added_up(block, known, known["returned"]), "returned": None}


def _down_first_part(block: Block, known: Values) -> Values:
    return {"returned": _down(block, known, known["parts"][0])}


def _down_second_part(block: Block, known: Values) -> Values:
    others = known["parts"][1:]  # none, where a device sends one row to each other one
    later = _down(block, known, others[0]) if others else None
    return {"returned_later": later, "inner": None, "parts": None}


def _down(block: Block, known: Values, part: DispatchedPart) -> Transfer:
    experts = _experts_of(block)
    _, _, _, down = experts.operands(known["normed"])
    results = experts.second_product(part.take(known["inner"]), down, part.counts)
    return part.combine_start(results, experts.cut.expert_axes)


def _combine_parts(block: Block, known: Values) -> Values:
    names = [name for name in ("returned", "returned_later") if known.get(name) is not None]
    arrived = join_parts([known[name] for name in names], _experts_of(block).cut.expert_axes)
    return {**_added_up(block, known, arrived), "returned": None, "returned_later": None}


def _added_up(block: Block, known: Values, arrived: jax.Array) -> Values:
    """Returns the sums of this device's tokens, ready to be sent to all."""
    own = moe_combine_done(arrived, known["dispatched"], known["weights"])
    number = known["normed"].size // max(1, known["normed"].shape[-1])
    sums = Transfer(own, Together(_experts_of(block).cut.expert_axes, number))
    return {"sums": sums, "dispatched": None, "weights": None}


def _output(block: Block, known: Values) -> Values:
    y = known["sums"].reshape(known["normed"].shape)
    shared = known.get("shared")
    y = y if shared is None else y + shared
    return {"result": y, "sums": None, "shared": None, "normed": None}


def _comm_postprocess(block: Block, known: Values) -> Values:
    y = known["result"]
    y = y if block.mlp_output_norm is None else block.mlp_output_norm(y)
    return {"stream": (known["stream"][0], y), "result": None}


def _experts_of(block: Block) -> ParallelMoE:
    experts: Any = block.mlp
    return experts


OPERATIONS: Final[Mapping[str, BlockOperation]] = {
    function.__name__.removeprefix("_"): function
    for function in (
        *(_comm_prepare_attn, _attn_prepare, _attn_core, _comm_prepare_mlp, _mlp, _gate, _select_experts),
        *(_dispatch_a, _shared_experts, _dispatch_b, _experts, _combine_a, _combine_b),
        *(_experts_up, _down_first_part, _down_second_part, _combine_parts, _output, _comm_postprocess),
    )
}
"""The operations by name."""

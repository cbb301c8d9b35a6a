"""From the arrays of the gated delta rule's gradients to their Triton kernels."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.contract import MmaDeltaRuleGradientContract, honour
from pallas_kernels.delta_rule.jax_triton.launch import Arrays, Whole
from pallas_kernels.delta_rule.schedule.gradients import GradientSchedule, gradient_schedule
from pallas_kernels.delta_rule.whole import plan_of, rows_of
from pallas_kernels.parts.in_32_bits import in_32_bits
from pallas_kernels.parts.jax_triton.launch import launch
from pallas_kernels.target import Target


@in_32_bits
def gated_delta_rule_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    edges: jax.Array,
    lengths: jax.Array,
    cotangent: jax.Array,
    state_cotangent: jax.Array,
    *,
    scale: float,
    contract: MmaDeltaRuleGradientContract,
    target: Target,
    schedule: GradientSchedule | None = None,
) -> Arrays:
    """Returns the gradients, see `pallas_kernels.delta_rule.gradients.gated_delta_rule_gradients`.

    A head of a sequence with a number that is not finite may have nan in all of its gradients, and in those of its key
    and query. No other head and no other sequence has.

    Guarantee: row-invariant: the gradients of a sequence do not depend on the others.
    """
    from pallas_kernels.delta_rule.jax_triton.gradient_kernels import (
        gates_kernel,
        inner_kernel,
        outer_kernel,
        walk_kernel,
    )

    honour("gated_delta_rule_gradients", contract, MmaDeltaRuleGradientContract())
    x = Whole(query, key, value, g, beta, state_cotangent, lengths)
    (b, tokens, h, v), (j, d), n, c = value.shape, key.shape[2:], x.chunks, contract.chunk
    inverse, weights, logs, betas, *_ = rows_of(x, plan=plan_of(x, target), target=target)
    plan = schedule or gradient_schedule(b * h, v, target.features)
    common: dict[str, Any] = {"fuses": False, "target": target}
    gates, places = (logs, betas), (lengths, tokens, n)
    sized = {"SCALE": scale, "form": x.form}

    def of_chunks(*shape: int, dtype: Any = value.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((b, h, n, *shape), dtype)

    def like(*arrays: jax.Array) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]

    dv, first, after, rest = launch(
        walk_kernel, query, key, cotangent, inverse, weights, *gates, state_cotangent, *places,
        out=[*like(value, state_cotangent), of_chunks(d, v), of_chunks(c, v)], grid=(b * h * (v // plan.columns),),
        warps=plan.warps, stages=plan.stages, constants=sized | {"COLUMNS": plan.columns}, **common,
    )  # fmt: skip
    *of_rows, inner = launch(
        inner_kernel, *x.read, cotangent, inverse, *gates, edges, rest, *places,
        out=[of_chunks(c, v), of_chunks(c, c), of_chunks(c, c), of_chunks(5, c, dtype=jnp.float32)], grid=(b * h, n),
        warps=plan.inner_warps, stages=plan.inner_stages, constants=sized | {"COLUMNS": plan.inner_columns}, **common,
    )  # fmt: skip
    dq, dk, outer, held = launch(
        outer_kernel, query, key, cotangent, *gates, edges, after, rest, *of_rows, *places,
        out=[*like(query, key), of_chunks(c, dtype=jnp.float32), of_chunks(v, dtype=jnp.float32)],
        grid=(b * j * 2, n), warps=plan.outer_warps, stages=plan.outer_stages,
        constants=sized | {"COLUMNS": plan.outer_columns}, **common,
    )  # fmt: skip
    dg, dbeta = launch(
        gates_kernel, g, logs, inner, outer, held, *places, out=like(g, beta), grid=(b * h, n),
        warps=1, stages=1, constants={"form": x.form}, **common,
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta, first

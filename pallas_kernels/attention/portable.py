"""Attention by plain products and sums, for any GPU.

It serves where no kernel does: on GPUs without tensor cores for bfloat16, and where the packages of the kernels are
missing. Its memory is that of one tile; it reads and writes the scores of a tile several times for each block of keys.
"""

import jax

from pallas_kernels.attention.blockwise import backward, tiling
from pallas_kernels.attention.blockwise.tiling import ProgramShape
from pallas_kernels.attention.call import AttentionCall, AttentionResults
from pallas_kernels.attention.schedule.blockwise import Tile
from pallas_kernels.attention.schedule.portable import attention_tile, gradient_tile
from pallas_kernels.contract import XLA_FUNCTIONS, AttentionContract, ElementwiseContract, attention_contract, honour


def attention(
    call: AttentionCall,
    *,
    contract: AttentionContract,
    functions: ElementwiseContract = XLA_FUNCTIONS,
    tile: Tile | None = None,
) -> tuple[jax.Array, ...]:
    """Attends to keys in a contiguous or a paged cache.

    Args:
        call: The call.
        contract: Order of the sums.
        functions: How exp, log and tanh are computed.
        tile: Chosen from the shape by default. The bits do not depend on it.

    Returns:
        The outputs (B, T, N, V) of the query's dtype and the log-sum-exp (B, T, N) of the scores, float32. A query
        that sees no key gives zeros and -inf.

    Raises:
        UnsupportedError: If a contract is another one.

    Guarantee: row-invariant.

    Example:
        >>> from jax import numpy as jnp
        >>> from pallas_kernels.attention.call import AttentionOptions
        >>> q, k, limits = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 3, 1, 4)), jnp.array([[0, 1, 3]])
        >>> call = AttentionCall(q, k, k, limits, AttentionOptions(scale=1.0))
        >>> attention(call, contract=attention_contract(fused=False))[0].tolist()
        [[[[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]]]
    """
    honour("attention", contract, attention_contract(fused=False))
    honour("attention", functions, XLA_FUNCTIONS)

    def choose(batch: int, queries: int, _: int, shape: ProgramShape) -> Tile:
        return attention_tile(batch, queries, shape.heads * shape.group) if tile is None else tile

    return tiling.run(call, contract=contract, choose=choose)


def gradients(
    call: AttentionCall,
    results: AttentionResults,
    *,
    contract: AttentionContract,
    functions: ElementwiseContract = XLA_FUNCTIONS,
    tile: Tile | None = None,
) -> backward.Gradients:
    """Runs the backward pass of `attention` over a contiguous cache.

    Args:
        call: The call, without pages and without 8-bit keys.
        results: The results of the forward pass, and the gradient of the outputs.
        contract: Order of the sums, as in the forward pass.
        functions: As for `attention`.
        tile: As for `attention`; of one sequence and whole blocks of queries.

    Returns:
        The gradients of queries, keys and values, with their shapes and dtypes.

    Guarantee: row-invariant; a row is a query for the gradient of the queries, a sequence for the others.
    """
    honour("attention_gradients", contract, attention_contract(fused=False))
    honour("attention_gradients", functions, XLA_FUNCTIONS)
    return backward.gradients(call, results, contract=contract, tile=tile or _gradient_tile(call))


def score_gradients(
    call: AttentionCall,
    results: AttentionResults,
    *,
    contract: AttentionContract,
    functions: ElementwiseContract = XLA_FUNCTIONS,
    tile: Tile | None = None,
) -> jax.Array:
    """Computes the gradients of the bias of the scaled and capped scores; arguments as for `gradients`.

    Returns:
        (B, N, T, S) float32, zeros where a query does not see a key.

    Guarantee: row-invariant; a row is a query.
    """
    honour("attention_score_gradients", contract, attention_contract(fused=False))
    honour("attention_score_gradients", functions, XLA_FUNCTIONS)
    return backward.score_gradients(call, results, contract=contract, tile=tile or _gradient_tile(call))


def _gradient_tile(call: AttentionCall) -> Tile:
    return gradient_tile(call.query.shape[1], max(1, call.query.shape[2]))

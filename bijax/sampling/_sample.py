"""Sampling tokens, each row of logits with its own parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bijax.core.checks import as_array, describe, flag
from bijax.sampling._arguments import OP, Request, read_request
from bijax.sampling._arithmetic import Arithmetic
from bijax.sampling._draw import draw
from bijax.sampling._measure import Measured, measure
from bijax.sampling._order import NO_TOKEN
from bijax.sampling._restrict import what_is_left
from pallas_kernels.parts.xla.manual_axes import vary_alike


class Sampled(NamedTuple):
    """The result of `sample`.

    Attributes:
        tokens: (R,) int32; -1 for a row that holds a nan or in which no token is left.
        logprobs: (R,) float32, log-probability of the token in the original logits; nan for -1, and where not
            requested.
        sampled_logprobs: (R,) float32, the same in the sampled distribution, after penalties, temperature and filters;
            0 at temperature 0.
        top_logprobs: (R, num_top) float32, the largest log-probabilities in the original logits, the lower token first
            among equals.
        top_tokens: (R, num_top) int32.
    """

    tokens: jax.Array
    logprobs: jax.Array
    sampled_logprobs: jax.Array
    top_logprobs: jax.Array
    top_tokens: jax.Array


def sample(
    logits: Any,
    *,
    seeds: Any,
    positions: Any,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    repetition_penalty: Any = None,
    frequency_penalty: Any = None,
    presence_penalty: Any = None,
    prompt_mask: Any = None,
    output_counts: Any = None,
    logit_bias: Any = None,
    allowed: Any = None,
    num_top: int = 0,
    need_logprobs: Any = True,
    batch_invariant: bool = True,
) -> Sampled:
    """Samples one token from each row of logits.

    A row's logits are changed by repetition, frequency and presence penalties, `logit_bias` and `allowed`, in this
    order, divided by the temperature, and cut by top-k, top-p and min-p, in this order. The token is then the first
    argmax of the remaining logits plus Gumbel noise, which makes it a sample of the softmax.

    The noise of a row is computed from its seed and position and the column alone (Philox-4x32, key: the seed,
    counter: the position and the column), so that it can be computed again at any time.

    All arguments may be traced, and numbers may be scalars or (R,), one per row. Noise, filters and log-probabilities
    that no row of a batch uses are skipped at run time. Traced values outside their ranges give meaningless results.

    Args:
        logits: (R, V) float32, bfloat16 or float16; computed with as float32.
        seeds: (R,) integers of 32 bits, or (R, 2) uint32, the words of larger ones: see `seed_words`.
        positions: (R,) integers, position of the token in its sequence; at least 0.
        temperature: At least 0. At 0 the first of the largest logits after the penalties is taken.
        top_k: Number of most probable tokens to keep, the lower token first among equals; 0 keeps all.
        top_p: Keeps each token if the more probable ones have a total probability below this; equals stay or go
            together. In (0, 1]; 1 keeps all.
        min_p: Keeps tokens with at least this fraction of the largest probability, in [0, 1].
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt and output; above 0.
        frequency_penalty: Subtracted from a token's logit for each time that it is in the output.
        presence_penalty: Subtracted from the logits of tokens in the output.
        prompt_mask: (R, V) bool, tokens of the prompt. Needed by a repetition penalty.
        output_counts: (R, V) integers, how often each token is in the output. Needed by each of the penalties.
        logit_bias: (R, V), added to the logits.
        allowed: (R, V) bool, tokens that may be sampled.
        num_top: Number of top log-probabilities to return, known when the program is traced.
        need_logprobs: bool, whether log-probabilities are computed; one for the batch.
        batch_invariant: With False, plain JAX operations are used, and nothing is promised about bits.

    Returns:
        A `Sampled`.

    Raises:
        TypeError: If a dtype is unsupported.
        ValueError: If a shape does not fit, a known value is out of range, or a penalty lacks a required argument.

    Guarantee: row-invariant: everything in a row of the result depends on that row of the arguments alone.
    `logprobs` has the bits of `bijax.log_softmax(logits)`.

    Source: E. J. Gumbel, "Statistical theory of extreme values" (1954); "Sampling" of SGLang's deterministic
    inference (https://lmsys.org/blog/2025-09-22-sglang-deterministic/).

    Example:
        >>> logits = jnp.array([[0.0, 3.0, 1.0], [2.0, 2.0, 0.0]])
        >>> sample(logits, seeds=[1, 2], positions=[7, 7], temperature=0.0).tokens.tolist()
        [1, 0]
        >>> batch = sample(logits, seeds=[1, 2], positions=[7, 7], top_p=0.9)
        >>> alone = sample(logits[1:], seeds=[2], positions=[7], top_p=0.9)
        >>> bool((batch.tokens[1:] == alone.tokens).all())
        True
    """
    request = read_request(
        logits,
        seeds=seeds,
        positions=positions,
        temperature=temperature,
        filters={"top_k": top_k, "top_p": top_p, "min_p": min_p},
        penalties={
            "repetition_penalty": repetition_penalty,
            "frequency_penalty": frequency_penalty,
            "presence_penalty": presence_penalty,
        },
        prompt_mask=prompt_mask,
        output_counts=output_counts,
        logit_bias=logit_bias,
        allowed=allowed,
        num_top=num_top,
    )
    return _sample(
        Request(*vary_alike(request)), num_top, need_logprobs, Arithmetic(flag(OP, "batch_invariant", batch_invariant))
    )


def _sample(request: Request, num_top: int, need_logprobs: Any, arithmetic: Arithmetic) -> Sampled:
    left = what_is_left(request, arithmetic)
    tokens = draw(left, request.temperature, request.seeds, request.positions, arithmetic)

    def skip(logits: jax.Array, *_: jax.Array) -> Measured:
        rows = logits.shape[0]
        one, top = jnp.full(rows, np.float32(np.nan)), jnp.full((rows, num_top), np.float32(np.nan))
        nothing = one, one, top, jnp.full((rows, num_top), np.int32(NO_TOKEN))
        return Measured(*vary_alike((logits, *nothing))[1:])

    def found(logits: jax.Array, left: jax.Array, temperature: jax.Array, tokens: jax.Array) -> Measured:
        return measure(logits, left, temperature, tokens, num_top, arithmetic)

    needed = jnp.asarray(as_array(OP, "need_logprobs", need_logprobs, "bool"))
    if needed.dtype != jnp.bool_ or needed.ndim:
        raise TypeError(f"{OP}: need_logprobs must be one bool, got {describe(needed)}.")
    measured: Measured = lax.cond(needed, found, skip, request.logits, left, request.temperature, tokens)
    return Sampled(tokens, *measured)

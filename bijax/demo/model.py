"""The model of `flax_layers` as the demo calls it."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from flax import nnx

from bijax.demo.compare import Text
from bijax.demo.compute import Generate
from bijax.demo.quality import Quality, assess
from bijax.demo.ways import Way
from flax_layers import convert
from flax_layers.checkpoint import Checkpoint, Tokenizer
from flax_layers.models import Llama, generate
from flax_layers.ops import PLAIN

type Models = tuple[Generate, Generate]


def open_models(checkpoint: Checkpoint, *, dtype: str, max_new_tokens: int) -> Models:
    """Builds one model with plain JAX and one with bijax, on the same arrays of weights.

    Args:
        checkpoint: The checkpoint.
        dtype: Dtype of weights and computation.
        max_new_tokens: Longest text, in tokens. A text ends earlier at a token that ends generation.

    Raises:
        CheckpointError: If a weight cannot be read.
    """
    return _generators(_load(checkpoint, dtype), checkpoint, max_new_tokens)


def open_quantized_models(
    checkpoint: Checkpoint, tokenizer: Tokenizer, prompt: Sequence[int], *, dtype: str, max_new_tokens: int
) -> tuple[Models, tuple[Quality, Quality]]:
    """Builds the same models with int8 linear layers.

    Args:
        checkpoint: The checkpoint.
        tokenizer: Its tokenizer.
        prompt: Token ids.
        dtype: Dtype of the other weights and of the computation.
        max_new_tokens: Longest text, in tokens.

    Returns:
        The models, and the bijax model's results for the prompt and for a passage, before and after quantisation.

    Raises:
        CheckpointError: If a weight cannot be read.
    """
    model = _load(checkpoint, dtype)
    before = assess(model, tokenizer, prompt, max_new_tokens=max_new_tokens)
    convert(model, quantize="int8")
    after = assess(model, tokenizer, prompt, max_new_tokens=max_new_tokens)
    return _generators(model, checkpoint, max_new_tokens), (before, after)


def _load(checkpoint: Checkpoint, dtype: str) -> Llama:
    return Llama.from_checkpoint(checkpoint, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))


def _generators(model: Llama, checkpoint: Checkpoint, max_new_tokens: int) -> Models:
    eos_token_ids = checkpoint.config.eos_token_ids

    def generator(model: Llama) -> Generate:
        def run(prompts: Sequence[Sequence[int]], way: Way, on_tokens: Callable[[int], None]) -> Sequence[Text]:
            generation = generate(
                model,
                prompts,
                max_new_tokens=max_new_tokens,
                eos_token_ids=eos_token_ids,
                prefill_chunk=way.prefill_chunk,
                cache=way.cache,
                on_token=on_tokens,
            )
            return [Text(*pair) for pair in zip(generation.tokens, generation.logprobs, strict=True)]

        return run

    return generator(nnx.with_attributes(model, ops=PLAIN)), generator(model)

"""The model of `flax_layers` as the demo calls it."""

from collections.abc import Callable, Sequence

from flax import nnx

from bijax.demo.compare import Text
from bijax.demo.compute import Generate
from bijax.demo.ways import Way
from flax_layers.checkpoint import Checkpoint
from flax_layers.models import Llama, generate
from flax_layers.ops import PLAIN


def open_models(checkpoint: Checkpoint, *, max_new_tokens: int) -> tuple[Generate, Generate]:
    """Builds one model with plain JAX and one with bijax, on the same arrays of weights.

    Args:
        checkpoint: The checkpoint.
        max_new_tokens: Longest text, in tokens. A text ends earlier at a token that ends generation.

    Raises:
        CheckpointError: If a weight cannot be read.
    """
    model = Llama.from_checkpoint(checkpoint)
    eos_token_ids = checkpoint.tokenizer.eos_token_ids

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

"""The cost of quantisation: text and perplexity of a model before and after."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bijax.demo.passage import PASSAGE
from flax_layers.checkpoint import Tokenizer
from flax_layers.models import Llama, generate, score


@dataclasses.dataclass(frozen=True)
class Quality:
    """A model's results for a prompt and a passage.

    Attributes:
        text: The tokens that continue the first prompt.
        perplexity: Of the passage.
        tokens: Tokens of the passage.
    """

    text: np.ndarray
    perplexity: float
    tokens: int


def assess(model: Llama, tokenizer: Tokenizer, prompt: Sequence[int], *, max_new_tokens: int) -> Quality:
    """Continues a prompt and computes the perplexity of the passage."""
    passage = tokenizer.encode(PASSAGE)[: model.config.max_position_embeddings]
    logprobs = score(model, [passage])[0].astype(np.float64)
    text = generate(model, [prompt], max_new_tokens=max_new_tokens, eos_token_ids=tokenizer.eos_token_ids).tokens[0]
    return Quality(text, math.exp(-logprobs.mean()), len(passage))


def quality_lines(
    quality: tuple[Quality, Quality], decode: Callable[[np.ndarray], str], *, dtype: str
) -> Iterator[str]:
    """Yields lines on the perplexity and the text of a quantised model and of the model before."""
    before, after = quality
    yield (
        f"perplexity of a passage of {before.tokens} tokens: {dtype} {before.perplexity:.3f}, int8"
        f" {after.perplexity:.3f}. The first prompt's text:"
    )
    for name, found in ((dtype, before), ("int8", after)):
        yield f"  {name:8}  {decode(found.text)!r}"

"""Prompts: what requests ask to be completed, and their way into tokens."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from bijax.serving import SamplingParams

from .errors import ApiError
from .field_names import FieldNames
from .model import ServedModel, Tokenizer


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages for the chat template.

    Attributes:
        messages: As templates know them.
        tools: Functions that the model may call; None for none.
    """

    messages: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]] | None = None

    def encoded(self, tokenizer: Tokenizer, *, add_generation_prompt: bool = True) -> list[int]:
        """Its tokens."""
        if self.tools is None:  # tokenizers need not know tools
            return tokenizer.encode_chat(self.messages, add_generation_prompt=add_generation_prompt)
        return tokenizer.encode_chat(self.messages, add_generation_prompt=add_generation_prompt, tools=self.tools)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt of a request.

    Attributes:
        source: A text, token ids, or a conversation.
        params: How to sample.
        field: The request field that holds the source, for errors.
        names: The names of the parameters in the request, for errors.
        rid: The name that the client gave it, to abort it.
        priority: Smaller ones come first.
    """

    source: str | list[int] | Conversation
    params: SamplingParams
    field: str
    names: FieldNames = dataclasses.field(default_factory=FieldNames)
    rid: str | None = None
    priority: int = 0


async def tokenize(
    prompts: Sequence[Prompt], model: ServedModel, *, max_prompt_tokens: int | None, unknown_token_id: int | None = None
) -> list[list[int]]:
    """The tokens of each prompt, computed in a separate thread, since long texts take long.

    Args:
        prompts: The prompts.
        model: Knows the tokens.
        max_prompt_tokens: Maximum number of prompt tokens; None for the model's limit.
        unknown_token_id: Replaces token ids outside the vocabulary; with None they are refused.

    Raises:
        ApiError: With status 400, if a prompt has no tokens or too many, or contains something unknown to the model.
    """
    longest = model.max_model_len if max_prompt_tokens is None else min(max_prompt_tokens, model.max_model_len)
    return await asyncio.to_thread(lambda: [_tokens(prompt, model, longest, unknown_token_id) for prompt in prompts])


def _tokens(prompt: Prompt, model: ServedModel, longest: int, unknown: int | None) -> list[int]:
    field = prompt.field
    match prompt.source:
        case str(text):
            tokens = encoded(lambda: model.text(field).encode(text), field)
        case Conversation() as conversation:
            tokens = encoded(lambda: conversation.encoded(model.text(field)), field)
        case given:
            tokens = given if unknown is None else [t if t < model.vocab_size else unknown for t in given]
            outside = next((token for token in tokens if not 0 <= token < model.vocab_size), None)
            if outside is not None:
                raise ApiError(400, f"token ids must be from 0 to {model.vocab_size - 1}, got {outside}", field=field)
    if not tokens:
        raise ApiError(400, "the prompt has no tokens; give at least one", field=field)
    if len(tokens) > longest:
        raise ApiError(400, f"the prompt has {len(tokens)} tokens, at most {longest} are taken", field=field)
    return tokens


def encoded(encode: Callable[[], list[int]], field: str) -> list[int]:
    """The tokens that a tokenizer gives.

    Raises:
        ApiError: With status 400 and the field, if it refuses the text.
    """
    try:
        return encode()
    except (TypeError, ValueError) as error:
        raise ApiError(400, str(error), field=field) from None

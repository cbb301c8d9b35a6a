"""`/tokenize` and `/detokenize`, with the fields of SGLang and vLLM."""

from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from .connection import json_response
from .endpoints import body, service
from .errors import ApiError
from .neutral import TOKENIZE, Neutral
from .openai_request import Message
from .prompts import Conversation, encoded
from .schema import OneOrMany, OneOrManyTokenIds, RequestBody


class Tokenize(RequestBody):
    """`/tokenize`: a text, several, or a conversation."""

    neutral: ClassVar[Neutral] = TOKENIZE

    model: str | None = None
    prompt: OneOrMany[str] | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_generation_prompt: bool = True


class Detokenize(RequestBody):
    """`/detokenize`: tokens, or several lists of them."""

    neutral: ClassVar[Neutral] = {"skip_special_tokens": (False,)}

    model: str | None = None
    tokens: OneOrManyTokenIds


async def tokenize(request: Request) -> Response:
    """The tokens of texts."""
    parsed, here = await body(request, Tokenize), service(request)
    if (parsed.prompt is None) == (parsed.messages is None):
        raise ApiError(400, "give either a prompt or messages", field="prompt")
    tokenizer = here.model.text("prompt")
    tokens: Any
    count: Any
    if parsed.messages is not None:
        conversation = Conversation(tuple(message.plain() for message in parsed.messages))
        tokens = encoded(
            lambda: conversation.encoded(tokenizer, add_generation_prompt=parsed.add_generation_prompt), "messages"
        )
        count = len(tokens)
    elif isinstance(parsed.prompt, list):
        texts = parsed.prompt
        tokens = [encoded(lambda text=text: tokenizer.encode(text), f"prompt.{i}") for i, text in enumerate(texts)]  # type: ignore[misc]
        count = [len(one) for one in tokens]
    else:
        text = parsed.prompt or ""
        tokens = encoded(lambda: tokenizer.encode(text), "prompt")
        count = len(tokens)
    return json_response({"tokens": tokens, "count": count, "max_model_len": here.model.max_model_len})


async def detokenize(request: Request) -> Response:
    """The texts of tokens."""
    parsed, here = await body(request, Detokenize), service(request)
    tokenizer = here.model.text("tokens")
    lists: list[Any] = list(parsed.tokens)
    many = bool(lists) and isinstance(lists[0], list)
    texts = []
    for tokens in lists if many else [lists]:
        try:
            texts.append(tokenizer.decode(tokens))
        except ValueError as error:
            raise ApiError(400, str(error), field="tokens") from None
    # SGLang calls it text, vLLM prompt.
    text = texts if many else texts[0]
    return json_response({"text": text, "prompt": text})

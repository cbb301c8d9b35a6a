"""The bodies of OpenAI's `/v1/completions` and `/v1/chat/completions`."""

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, PlainValidator, model_validator

from bijax.serving import Grammar

from .errors import ApiError
from .neutral import CHAT, COMPLETIONS, MESSAGE, STREAM_OPTIONS, Neutral
from .prompts import Conversation, Prompt
from .sampling_fields import SamplingFields
from .schema import RequestBody, TextOr, shown
from .structured import OpenAIStructuredFields
from .tools import Tool, ToolCall, ToolChoice, call_grammar, offered

COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens in /v1/completions


class StreamOptions(RequestBody):
    """`stream_options`."""

    neutral: ClassVar[Neutral] = STREAM_OPTIONS

    include_usage: bool = False


class OpenAIBody(OpenAIStructuredFields, SamplingFields):
    """The fields of both endpoints. The fields beyond OpenAI's have vLLM's names."""

    model: str | None = None
    lora_path: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    priority: int = 0

    def renamed(self) -> dict[str, str]:
        """OpenAI's and vLLM's names."""
        return {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}

    def include_usage(self) -> bool:
        """Whether a stream ends with an event about the number of tokens.

        Raises:
            ApiError: With status 400, if there are options for a stream, but no stream.
        """
        if self.stream_options is None:
            return False
        if not self.stream:
            raise ApiError(400, "only allowed together with stream=true", field="stream_options")
        return self.stream_options.include_usage


def prompts_of(value: object) -> list[str] | list[list[int]]:
    """The prompts of a field that is one or several, texts or token ids; ValueError if it is neither."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        if _are_tokens(value):
            return [value]
        if all(_are_tokens(item) for item in value):
            return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of such lists")


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


class CompletionBody(OpenAIBody):
    """`/v1/completions`."""

    neutral: ClassVar[Neutral] = COMPLETIONS

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(prompts_of)]
    logprobs: int | None = None
    echo: bool | None = None

    def renamed(self) -> dict[str, str]:
        """This endpoint has one field for log-probabilities, the number of the most probable ones."""
        return super().renamed() | {"top_logprobs": "logprobs"}

    def prompts(self) -> list[Prompt]:
        """The prompts with their parameters.

        Raises:
            ApiError: With status 400, if a value is out of range.
        """
        with_logprobs = self.logprobs is not None
        names = self.names()
        params = self.params(
            names,
            max_new_tokens=COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens,
            min_new_tokens=self.min_tokens,
            seed=self.seed,
            logprobs=with_logprobs,
            top_logprobs=self.logprobs,
            prompt_logprobs=with_logprobs and bool(self.echo),
        )
        return [Prompt(source, params, "prompt", names, priority=self.priority) for source in self.prompt]


class ContentPart(RequestBody):
    """A part of a message; models here read text alone."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: object) -> object:
        texts = get_args(cls.model_fields["type"].annotation)
        if isinstance(given, dict) and given.get("type", texts[0]) not in texts:
            wanted, found = " or ".join(map(shown, texts)), shown(given["type"])
            cls.refuse("type", f"must be {wanted}, since images, audio and files are not read; got {found}")
        return given


class Message(RequestBody):
    """A message of a conversation."""

    neutral: ClassVar[Neutral] = MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOr[list[ContentPart]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content: required, but missing")
        return self

    def plain(self) -> dict[str, Any]:
        """The message as chat templates know it; to them a developer is the system."""
        parts = self.content or ""
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.role == "tool":
            plain |= {"name": self.name, "tool_call_id": self.tool_call_id}
        return plain


class ChatBody(OpenAIBody):
    """`/v1/chat/completions`."""

    neutral: ClassVar[Neutral] = CHAT

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None

    def constraints(self) -> dict[str, Grammar]:
        """A tool that must be called is a constraint too."""
        call = call_grammar(self.tools, self.tool_choice)
        return super().constraints() | ({} if call is None else {"tool_choice": call})

    def renamed(self) -> dict[str, str]:
        """The limit has two names here."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return super().renamed() | {"max_new_tokens": limit}

    def prompts(self, max_new_tokens: int, template: str | None = None) -> list[Prompt]:
        """The one prompt with its parameters.

        Args:
            max_new_tokens: For a request that does not say.
            template: The chat template, which must know tools if there are any.

        Raises:
            ApiError: With status 400, if a value is out of range.
        """
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ApiError(400, "the newer name of max_tokens; give one of them", field="max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "only allowed together with logprobs=true", field="top_logprobs")
        limits = (self.max_tokens, self.max_completion_tokens, max_new_tokens)
        names = self.names()
        params = self.params(
            names,
            max_new_tokens=next(limit for limit in limits if limit is not None),
            min_new_tokens=self.min_tokens,
            seed=self.seed,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
        )
        tools = offered(self.tools, self.tool_choice, template)
        conversation = Conversation(tuple(message.plain() for message in self.messages), tools)
        return [Prompt(conversation, params, "messages", names, priority=self.priority)]

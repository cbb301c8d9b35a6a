"""The body of OpenAI's `/v1/responses`."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from bijax.serving import Grammar

from .errors import ApiError
from .neutral import RESPONSES, Neutral
from .openai_request import ContentPart, Message
from .prompts import Conversation, Prompt
from .sampling_fields import SamplingFields
from .schema import RequestBody, TextOr


class InputPart(ContentPart):
    """A part of the content of an input message."""

    neutral: ClassVar[Neutral] = {"annotations": (dict,), "logprobs": (dict,)}

    type: Literal["input_text", "output_text", "text"]  # type: ignore[assignment]


class InputMessage(RequestBody):
    """A message of `input`. The message of an earlier response can be sent back unchanged."""

    neutral: ClassVar[Neutral] = {"id": (str,), "status": (str,), "phase": ()}

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: TextOr[list[InputPart]]

    def plain(self) -> dict[str, Any]:
        """The message as chat templates know it."""
        parts = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return Message(role=self.role, content=parts).plain()


class TextFormat(RequestBody):
    """`text.format`."""

    neutral: ClassVar[Neutral] = {"description": (str,), "strict": (bool,), "name": (str,)}

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(None, alias="schema")


class TextOptions(RequestBody):
    """`text`."""

    neutral: ClassVar[Neutral] = {"verbosity": ("medium",)}

    format: TextFormat | None = None


class ResponsesBody(SamplingFields):
    """`/v1/responses`. Nothing is stored: each request brings its whole conversation."""

    neutral: ClassVar[Neutral] = RESPONSES

    model: str | None = None
    input: TextOr[list[InputMessage]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    seed: int | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    top_logprobs: int | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    metadata: dict[str, str] | None = None
    priority: int = 0

    def constraints(self) -> dict[str, Grammar]:
        """The format of the text is a constraint too."""
        wanted_format = None if self.text is None else self.text.format
        if wanted_format is None or wanted_format.type == "text":
            return super().constraints()
        if (wanted_format.type == "json_schema") != (wanted_format.json_schema is not None):
            raise ApiError(400, 'schema belongs to the type "json_schema"', field="text.format")
        return super().constraints() | {"text.format": Grammar.json(wanted_format.json_schema)}

    def renamed(self) -> dict[str, str]:
        """This endpoint's name of the limit."""
        return {"max_new_tokens": "max_output_tokens"}

    def prompt(self, max_new_tokens: int) -> Prompt:
        """The prompt with its parameters.

        Args:
            max_new_tokens: For a request that does not say.

        Raises:
            ApiError: With status 400, if a value is out of range.
        """
        names = self.names()
        given = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else [
            message.plain() for message in self.input
        ]  # fmt: skip
        if self.instructions is not None:
            given.insert(0, {"role": "system", "content": self.instructions})
        if not given:
            raise ApiError(400, "must have at least one message, got none", field="input")
        params = self.params(
            names,
            max_new_tokens=max_new_tokens if self.max_output_tokens is None else self.max_output_tokens,
            seed=self.seed,
            logprobs=bool(self.include),
            top_logprobs=self.top_logprobs if self.include else None,
        )
        if params.n != 1:
            raise ApiError(400, f"must be 1: a response has one output, got {params.n}", field="n")
        return Prompt(Conversation(tuple(given)), params, "input", names, priority=self.priority)

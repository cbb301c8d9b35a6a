"""Functions that a model may call: as requests describe them, and as answers hold them.

The form is that of Hermes, Qwen 2.5 and later: `<tool_call>`, a JSON object with `name` and `arguments`, and
`</tool_call>`.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from bijax.serving import Grammar

from .errors import ApiError
from .neutral import Neutral
from .schema import RequestBody

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"\s*{OPEN}\s*(\{{.*?\}})\s*{CLOSE}", re.DOTALL)
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Function(RequestBody):
    """A function."""

    neutral: ClassVar[Neutral] = {"strict": (bool,)}

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(RequestBody):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates know it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class FunctionName(RequestBody):
    """The function of a `tool_choice`."""

    name: str


class NamedTool(RequestBody):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(RequestBody):
    """The function of a call in a message."""

    name: str
    arguments: str


class ToolCall(RequestBody):
    """A call in a message of the assistant."""

    neutral: ClassVar[Neutral] = {"index": (int,)}

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """The call as chat templates know it: with its arguments as an object."""
        try:
            arguments = json.loads(self.function.arguments)
        except ValueError:
            arguments = self.function.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


type ToolChoice = Literal["none", "auto", "required"] | NamedTool


def offered(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, template: str | None
) -> list[dict[str, Any]] | None:
    """The tools that the chat template gets.

    Args:
        tools: Those of the request.
        choice: Whether one must be called.
        template: The chat template.

    Raises:
        ApiError: With status 400, if a chosen tool is missing, or the template does not know tools in this form.
    """
    if choice not in (None, "none", "auto") and not tools:
        raise ApiError(400, "needs tools, got none", field="tool_choice")
    if isinstance(choice, NamedTool) and tools is not None:
        names = [tool.function.name for tool in tools]
        if choice.function.name not in names:
            raise ApiError(
                400, f"must name one of {', '.join(names)}, got {choice.function.name!r}", field="tool_choice"
            )
    if not tools or choice == "none":
        return None
    if template is None or "tools" not in template or OPEN not in template:
        raise ApiError(
            400,
            f"the chat template of this model has no tools in the form {OPEN}JSON{CLOSE}, as Qwen 2.5 has them; leave"
            " them out, or serve another model",
            field="tools",
        )
    return [tool.plain() for tool in tools]


def call_grammar(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> Grammar | None:
    """The grammar of an answer that must be a call: with "required" of any tool, or of the one that is named."""
    if tools is None or choice in (None, "none", "auto"):
        return None
    wanted = choice.function.name if isinstance(choice, NamedTool) else None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": tool.function.parameters or
                           {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
        if wanted in (None, tool.function.name)
    ]  # fmt: skip
    schema = json.dumps({"x-guidance": _JSON, "anyOf": calls})
    return Grammar("lark", f'start: "{OPEN}\\n" call "\\n{CLOSE}"\ncall: %json {schema}\n')


def split_calls(text: str, id_: str) -> tuple[str, list[dict[str, Any]]]:
    """Separates the calls in an answer from its other text. A call that is not valid JSON stays text.

    Args:
        text: The answer.
        id_: Prefix of the ids of the calls.

    Example:
        >>> split_calls('Well.<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', "call_7")
        ('Well.', [{'id': 'call_7_0', 'type': 'function', 'function': {'name': 'f', 'arguments': '{"x": 1}'}}])
    """
    calls: list[dict[str, Any]] = []

    def take(match: re.Match[str]) -> str:
        try:
            found = json.loads(match[1])
        except ValueError:
            return match[0]
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return match[0]
        function = {"name": found["name"], "arguments": json.dumps(found.get("arguments", {}), ensure_ascii=False)}
        calls.append({"id": f"{id_}_{len(calls)}", "type": "function", "function": function})
        return ""

    return _CALL.sub(take, text), calls


def sure_text(text: str) -> str:
    r"""The beginning of an unfinished answer that is certainly no part of a call.

    Example:
        >>> sure_text("Well.\n<tool"), sure_text("1 < 2")
        ('Well.', '1 < 2')
    """
    end = text.find(OPEN)
    if end < 0:
        end = next((len(text) - n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), len(text))
    return text[:end].rstrip() if end < len(text) else text.rstrip()

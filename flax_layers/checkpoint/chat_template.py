"""Chat templates, rendered as the library `transformers` renders them."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from .errors import CheckpointError


class ChatTemplate:
    """A compiled chat template.

    Templates come from checkpoints and are programs, so they run in jinja2's immutable sandbox. They see what
    `transformers` shows them: `messages`, `tools`, `add_generation_prompt`, the special tokens (`bos_token`,
    `eos_token`, ...), the functions `raise_exception` and `strftime_now`, the filter `tojson` without HTML escapes, and
    `break` and `continue`.

    Args:
        source: The template.
        special_tokens: Text of the special tokens by role, for example {"bos_token": "<s>"}.

    Attributes:
        source: The template.

    Raises:
        CheckpointError: If the template does not compile.

    Example:
        >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}",
        ...                         {"eos_token": "</s>"})
        >>> template.render([{"role": "user", "content": "Hi"}])
        'user: Hi</s>'
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(
                f"the chat template of this checkpoint does not compile: {error}; correct it in the checkpoint"
            ) from error
        self._special_tokens = dict(special_tokens)
        self.source = source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Renders messages to the text that the model was trained on.

        Args:
            messages: At least one mapping with `role` and `content`, both strings. `content` may be None with
                `tool_calls`.
            add_generation_prompt: Whether to end with the opening of the assistant's answer.
            tools: Functions that the model may call, as OpenAI's API describes them. A template that does not know
                tools ignores them.

        Raises:
            ValueError: If `messages` is empty or a message lacks a part, or if the template refuses them.
        """
        _check_messages(messages)
        try:
            return self._template.render(
                self._special_tokens, messages=messages, add_generation_prompt=add_generation_prompt, tools=tools
            )
        # A template is a program: besides its own errors it can run into any of Python's.
        except Exception as error:
            raise ValueError(
                f"the chat template cannot render these {len(messages)} messages with the roles "
                f"{[message['role'] for message in messages]}: {error}; change the messages as the template asks"
            ) from error


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, (str, Mapping)) or not len(messages):
        raise ValueError(f"messages must be a list of one or more messages, got {messages!r}")
    for index, message in enumerate(messages):
        # A template prints a missing part as nothing, so the text would be lost without a word.
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}] must be a mapping with a string under 'role', got {message!r}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and "tool_calls" in message):
            raise ValueError(f"messages[{index}] must have a string under 'content', got {message!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)

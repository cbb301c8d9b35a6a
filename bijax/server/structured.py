"""The fields of requests that constrain outputs: their many names, and the grammar that they specify."""

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from bijax.serving import Grammar

from .errors import ApiError
from .neutral import STRUCTURED, Neutral
from .schema import RequestBody

type JsonObject = dict[str, Any]


class JsonSchemaFormat(RequestBody):
    """`response_format.json_schema`."""

    neutral: ClassVar[Neutral] = {"description": (str,), "strict": (bool,)}

    name: str | None = None
    json_schema: JsonObject | None = Field(None, alias="schema")


class ResponseFormat(RequestBody):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def grammar(self) -> Grammar | None:
        """The grammar that it specifies.

        Raises:
            ApiError: With status 400, if type and schema do not belong together.
        """
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ApiError(400, 'json_schema belongs to the type "json_schema"', field="response_format")
        if self.type == "text":
            return None
        return Grammar.json(None if self.json_schema is None else self.json_schema.json_schema)


class StructuredOutputs(RequestBody):
    """vLLM's `structured_outputs`."""

    neutral: ClassVar[Neutral] = STRUCTURED

    json_: JsonObject | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructuredFields(RequestBody):
    """SGLang's names, which all endpoints take."""

    regex: str | None = None
    json_schema: JsonObject | str | None = None
    ebnf: str | None = None

    def constraints(self) -> dict[str, Grammar]:
        """The grammar of each field that has a value.

        Raises:
            ApiError: With status 400, if a value is not one.
        """
        return _grammars({"regex": self.regex, "json_schema": self.json_schema, "ebnf": self.ebnf})

    def grammar(self, names: Callable[[str], str]) -> Grammar | None:
        """The grammar that the request specifies.

        Args:
            names: The place of a field in the request.

        Raises:
            ApiError: With status 400, if several fields specify one.
        """
        found = self.constraints()
        if len(found) > 1:
            raise ApiError(400, f"give one of {', '.join(found)}; an output has one grammar", field=names([*found][1]))
        return next(iter(found.values()), None)


class OpenAIStructuredFields(StructuredFields):
    """OpenAI's and vLLM's names too."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def constraints(self) -> dict[str, Grammar]:
        """The grammar of each field that has a value."""
        found = super().constraints()
        if self.response_format is not None and (grammar := self.response_format.grammar()) is not None:
            found["response_format"] = grammar
        if self.structured_outputs is not None:
            given = self.structured_outputs
            inner = _grammars({"json": given.json_, "regex": given.regex, "choice": given.choice,
                               "grammar": given.grammar, "json_object": given.json_object})  # fmt: skip
            found |= {f"structured_outputs.{name}": grammar for name, grammar in inner.items()}
        return found | _grammars(
            {"guided_json": self.guided_json, "guided_regex": self.guided_regex, "guided_choice": self.guided_choice,
             "guided_grammar": self.guided_grammar}
        )  # fmt: skip


def _grammars(given: Mapping[str, Any]) -> dict[str, Grammar]:
    return {name: _grammar(name, value) for name, value in given.items() if value not in (None, False)}


def _grammar(name: str, value: Any) -> Grammar:
    match name.removeprefix("guided_"):
        case "json_object":
            return Grammar.json()
        case "json" | "json_schema":
            return Grammar.json(_schema(name, value))
        case "regex":
            return Grammar("regex", value)
        case "choice":
            if not value:
                raise ApiError(400, "must have at least one text, got none", field=name)
            return Grammar.choice(value)
    return Grammar("ebnf", value)


def _schema(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ApiError(400, f"must be a JSON schema: {error}", field=name) from None

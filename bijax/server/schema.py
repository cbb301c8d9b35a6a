"""The base of all request bodies: strict types, no unknown fields, errors that name the field."""

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NoReturn

import pydantic
from pydantic import BeforeValidator, ConfigDict, Discriminator, PlainValidator, Tag, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from .errors import ApiError
from .neutral import Neutral, is_neutral, wanted

LONGEST_VALUE = 80  # characters of a wrong value in an error
NEAREST = 0.45  # least similarity of a suggested name: that of "seed" and "sampling_seed"
_REFUSED = "refused_field"
_ONE, _MANY = "<one>", "<many>"  # tags, which pydantic puts among the names of fields


class RequestBody(pydantic.BaseModel):
    """A JSON object of a request. Types are not converted (`"1"` is not accepted as a number), and numbers are finite.

    Null means an absent field, whatever its name. So do neutral values of unsupported fields.

    Attributes:
        neutral: Unsupported fields, with their neutral values.
        nested: Nested objects, whose fields an error names if one is in the wrong place.
    """

    neutral: ClassVar[Neutral] = {}
    nested: ClassVar[Mapping[str, "type[RequestBody]"]] = {}

    model_config: ClassVar[ConfigDict] = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if cls._asks(name, value)}

    @classmethod
    def _asks(cls, name: str, value: object) -> bool:
        field = cls._fields_by_name().get(name)
        if field is not None:
            return value is not None or field.is_required()
        if is_neutral(value, cls.neutral.get(name, ())) if name in cls.neutral else value is None:
            return False
        if name in cls.neutral:
            reason = f"not served here; {wanted(cls.neutral[name], shown)}, got {shown(value)}"
        else:
            reason = f"unknown field; known here: {', '.join(sorted(cls._fields_by_name()))}{cls._nearest(name)}"
        cls.refuse(name, reason)

    @classmethod
    def refuse(cls, field: str, reason: str) -> NoReturn:
        """Refuses a field from a validator; the answer names it."""
        raise PydanticCustomError(_REFUSED, "{reason}", {"reason": reason, "field": field})

    @classmethod
    def _fields_by_name(cls) -> dict[str, FieldInfo]:
        """The fields by their names in JSON, which may be names that Python has for itself."""
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    @classmethod
    def _nearest(cls, name: str) -> str:
        places = {inner: f"{outer}.{inner}" for outer, kind in cls.nested.items() for inner in kind.model_fields}
        places |= {own: own for own in cls.model_fields}
        found = difflib.get_close_matches(name[:LONGEST_VALUE], places, n=1, cutoff=NEAREST)
        return f"; did you mean {places[found[0]]}?" if found else ""


def parse[Body: RequestBody](kind: type[Body], body: bytes) -> Body:
    """Reads a JSON body.

    Args:
        kind: What it should be.
        body: JSON in UTF-8. An empty body counts as `{}`.

    Raises:
        ApiError: With status 400, if it is not JSON or not of this kind. The message names the field.

    Example:
        >>> class Flush(RequestBody):
        ...     timeout: float = 0.0
        >>> parse(Flush, b'{"timeout": "1"}')
        Traceback (most recent call last):
        bijax.server.errors.ApiError: timeout: must be a valid number, got "1"
        >>> parse(Flush, b'{"timeuot": 1}')
        Traceback (most recent call last):
        bijax.server.errors.ApiError: timeuot: unknown field; known here: timeout; did you mean timeout?
    """
    try:
        return kind.model_validate_json(body or b"{}")
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = [str(name) for name in first["loc"] if name not in (_ONE, _MANY)]
        if first["type"] == _REFUSED:
            path.append(first["ctx"]["field"])
        raise ApiError(400, _reason(first), field=shown_path(path)) from None


def shown_path(path: list[str]) -> str | None:
    """A field's place in the body, as errors show it."""
    text = ".".join(path)
    return (text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}...") or None


def shown(value: object) -> str:
    """A value as errors show it: JSON, cut to a readable length."""
    text = json.dumps(value, default=str)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _reason(error: Any) -> str:
    match error["type"]:
        case "too_short":
            return f"must have at least {error['ctx']['min_length']} entry, got {shown(error['input'])}"
        case "missing":
            return "required, but missing"
        case "json_invalid":
            return f"the body must be a JSON object in UTF-8: {error['msg']}"
        case "model_type" | "model_attributes_type":
            return f"must be a JSON object, got {shown(error['input'])}"
    if error["type"] == _REFUSED:
        return str(error["msg"])
    message = str(error["msg"]).removeprefix("Value error, ").replace("Input should be", "must be", 1)
    return f"{message}, got {shown(error['input'])}"


def _strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise ValueError("must be a string or a list of strings")


def _logit_bias(value: object) -> object:
    if not isinstance(value, dict):
        return value
    for key in value:
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 20):
            raise ValueError("must have token ids for its keys")
    return {int(key): bias for key, bias in value.items()}


def _depth(value: object) -> str:
    return _MANY if isinstance(value, list) and (not value or isinstance(value[0], (list, dict, str))) else _ONE


def _length(value: object) -> str:
    return _MANY if isinstance(value, list) else _ONE


Strings = Annotated[tuple[str, ...], PlainValidator(_strings)]
LogitBias = Annotated[dict[int, float], BeforeValidator(_logit_bias)]
TokenIds = list[int]

# One value, or a list of them, one for each prompt.
type OneOrMany[T] = Annotated[Annotated[T, Tag(_ONE)] | Annotated[list[T], Tag(_MANY)], Discriminator(_length)]
type OneOrManyTokenIds = Annotated[
    Annotated[TokenIds, Tag(_ONE)] | Annotated[list[TokenIds], Tag(_MANY)], Discriminator(_depth)
]
# A text, or a list of something.
type TextOr[T] = Annotated[Annotated[str, Tag(_ONE)] | Annotated[T, Tag(_MANY)], Discriminator(_length)]

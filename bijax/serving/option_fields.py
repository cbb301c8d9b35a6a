"""Options that are arguments, flags of commands and environment variables at once."""

import argparse
import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Self

ENVIRONMENT_PREFIX = "BIJAX_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_WANTED = {bool: "True or False", int: "an integer", float: "a number", str: "a string", tuple: "a tuple of strings"}


def option(
    default: Any,
    text: str,
    *,
    kind: type = int,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    metavar: str = "TEXT",
) -> Any:
    """A field of a subclass of `Options`.

    Args:
        default: Its default; with None, None is accepted too.
        text: Its description, for `--help`.
        kind: bool, int, float, str, or tuple for strings: a flag with several values, a variable with commas.
        least: Smallest number allowed.
        most: Largest number allowed.
        choices: The only strings allowed.
        metavar: What stands for a string in `--help`.
    """
    metadata = {"help": text, "kind": kind, "least": least, "most": most, "choices": choices, "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata)


class Options:
    """Base of frozen dataclasses whose fields are made by `option`.

    The constructor reads nothing but its arguments, and checks them. `read` reads the environment too: an argument or a
    flag takes precedence over the variable `BIJAX_<NAME>`, and the variable over the default.

    Raises:
        TypeError: If an option has the wrong type; the message names it.
        ValueError: If it is out of range.

    Example:
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Listening(Options):
        ...     port: int = option(80, "port to listen on", least=0, most=65535)
        >>> Listening.read(environ={"BIJAX_PORT": "8000"}).port
        8000
        >>> Listening.read(port=70000, environ={"BIJAX_PORT": "8000"})
        Traceback (most recent call last):
            ...
        ValueError: Listening: port must be from 0 to 65535, got 70000.
    """

    def __post_init__(self) -> None:
        for field in _fields(type(self)):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                _check(f"{type(self).__name__}: {field.name}", value, field.metadata)

    @classmethod
    def read(cls, *, environ: Mapping[str, str] | None = None, **given: Any) -> Self:
        """Returns options from arguments, and from the environment where there is no argument.

        Args:
            environ: The environment; the process's by default.
            given: Options by name. None counts as absent.

        Raises:
            TypeError: If there is no such option, or one has the wrong type.
            ValueError: If one is out of range or a variable cannot be read; the message names it.
        """
        environ = os.environ if environ is None else environ
        found = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items() if v is not None}
        for field in _fields(cls):
            variable = ENVIRONMENT_PREFIX + field.name.upper()
            if field.name not in found and variable in environ:
                found[field.name] = _parse(variable, environ[variable], field.metadata["kind"])
        return cls(**found)

    @classmethod
    def add_flags(cls, parser: argparse._ActionsContainer) -> None:
        """Adds a flag for each option: `--page-size`, `--no-prefix-cache`. An absent flag is None."""
        for field in _fields(cls):
            kind, choices = field.metadata["kind"], field.metadata["choices"]
            how: dict[str, Any] = {"type": kind, "metavar": field.metadata["metavar"] if kind is str else "N"}
            if kind is bool:
                how = {"action": argparse.BooleanOptionalAction}
            elif kind is tuple:
                how = {"nargs": "+", "metavar": field.metadata["metavar"]}
            elif choices:
                how = {"choices": choices}
            default = "" if field.default in (None, ()) else f" (default: {field.default})"
            parser.add_argument(
                "--" + field.name.replace("_", "-"),
                default=None,
                help=f"{field.metadata['help']}{default}; also {ENVIRONMENT_PREFIX}{field.name.upper()}",
                **how,
            )

    @classmethod
    def from_flags(cls, parsed: argparse.Namespace, *, environ: Mapping[str, str] | None = None) -> Self:
        """Returns options from parsed flags, and from the environment where there is no flag; see `read`."""
        return cls.read(environ=environ, **{field.name: getattr(parsed, field.name) for field in _fields(cls)})


def _fields(options: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(options)


def _check(name: str, value: Any, about: Mapping[str, Any]) -> None:
    kind, least, most, choices = about["kind"], about["least"], about["most"], about["choices"]
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise TypeError(f"{name} must be {_WANTED[kind]}, got {value!r}.")
    if kind is tuple and not all(isinstance(item, str) for item in value):
        raise TypeError(f"{name} must be {_WANTED[kind]}, got {value!r}.")
    if choices and value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
    # nan is in no range
    if not (least is None or value >= least) or not (most is None or value <= most):
        wanted = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {wanted}, got {value}.")


def _parse(variable: str, value: str, kind: type) -> Any:
    if kind is bool:
        if value.lower() in (*_TRUE, *_FALSE):
            return value.lower() in _TRUE
        raise ValueError(f"{variable} must be one of {', '.join((*_TRUE, *_FALSE))}, got {value!r}.")
    if kind is tuple:
        return tuple(item.strip() for item in value.split(",") if item.strip())
    try:
        return kind(value)
    except ValueError as error:
        raise ValueError(f"{variable} must be {_WANTED[kind]}, got {value!r}.") from error

"""Options of the engine: as arguments, flags of commands, and environment variables."""

import argparse
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ENVIRONMENT_PREFIX = "BIJAX_"
MAX_DRAFTS = 7
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _option(default: Any, text: str, *, least: int | None = None, most: int | None = None, kind: type = int) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, "least": least, "most": most, "kind": kind})


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine works. It checks itself.

    No option but `enable_deterministic_inference` and `default_seed` can move a bit of what a request gets.

    `EngineOptions()` reads nothing but its arguments. `read` reads the environment too: an argument or a flag counts
    before the variable `BIJAX_<NAME>`, and that before the default.

    Raises:
        TypeError: If an option has the wrong type; the message names it.
        ValueError: If it is out of range.

    Example:
        >>> EngineOptions.read(page_size=32, environ={"BIJAX_PAGE_SIZE": "8", "BIJAX_NUM_PAGES": "64"}).page_size
        32
        >>> EngineOptions(page_size=0)
        Traceback (most recent call last):
            ...
        ValueError: EngineOptions: page_size must be at least 1, got 0.
    """

    page_size: int = _option(16, "tokens of a page of the cache", least=1)
    num_pages: int = _option(512, "pages of the cache", least=1)
    max_running: int = _option(32, "sequences computed at once, at most", least=1)
    max_waiting: int = _option(1024, "sequences that may wait; more are refused", least=1)
    max_prefill_tokens: int = _option(256, "tokens of prompts computed in a step, at most", least=1)
    max_length: int | None = _option(None, "longest sequence in tokens; the model's by default", least=2)
    prefix_cache: bool = _option(True, "keep computed pages for requests that start alike", kind=bool)
    speculative_tokens: int = _option(
        0, "tokens of a sequence drafted by prompt lookup in a step", least=0, most=MAX_DRAFTS
    )
    enable_deterministic_inference: bool = _option(
        True, "same bits for a request in any company; off: plain JAX operations", kind=bool
    )
    default_seed: int | None = _option(
        None, "seed of requests that name none (SGLang: 42); by default a hash of the prompt", least=0, most=2**64 - 1
    )
    aging_steps: int = _option(
        256, "steps of the engine after which a request counts as much as one a priority above", least=1
    )

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            value, about = getattr(self, option.name), option.metadata
            if value is None and option.default is None:
                continue
            if type(value) is not about["kind"]:
                wanted = "True or False" if about["kind"] is bool else "an integer"
                raise TypeError(f"EngineOptions: {option.name} must be {wanted}, got {value!r}.")
            least, most = about["least"], about["most"]
            if (least is not None and value < least) or (most is not None and value > most):
                wanted = f"at least {least}" if most is None else f"from {least} to {most}"
                raise ValueError(f"EngineOptions: {option.name} must be {wanted}, got {value}.")

    @classmethod
    def read(cls, *, environ: Mapping[str, str] | None = None, **given: Any) -> "EngineOptions":
        """Returns options from arguments, and from the environment where there is no argument.

        Args:
            environ: The environment; that of the process by default.
            given: Options by name. None counts as not given.

        Raises:
            TypeError: If there is no such option, or one has the wrong type.
            ValueError: If one is out of range or a variable cannot be read; the message names it.
        """
        environ = os.environ if environ is None else environ
        found = {name: value for name, value in given.items() if value is not None}
        for option in dataclasses.fields(cls):
            variable = ENVIRONMENT_PREFIX + option.name.upper()
            if option.name not in found and variable in environ:
                found[option.name] = _parse(variable, environ[variable], option.metadata["kind"])
        return cls(**found)

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Adds a flag for each option: `--page-size`, `--no-prefix-cache`. One that is not given is None."""
        for option in dataclasses.fields(cls):
            kind = option.metadata["kind"]
            how: dict[str, Any] = (
                {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind, "metavar": "N"}
            )
            default = "" if option.default is None else f" (default: {option.default})"
            parser.add_argument(
                "--" + option.name.replace("_", "-"),
                default=None,
                help=f"{option.metadata['help']}{default}; also {ENVIRONMENT_PREFIX}{option.name.upper()}",
                **how,
            )

    @classmethod
    def from_flags(cls, parsed: argparse.Namespace, *, environ: Mapping[str, str] | None = None) -> "EngineOptions":
        """Returns options from parsed flags, and from the environment where there is no flag; see `read`."""
        names = [option.name for option in dataclasses.fields(cls)]
        return cls.read(environ=environ, **{name: getattr(parsed, name) for name in names})


def _parse(variable: str, value: str, kind: type) -> Any:
    if kind is bool:
        if value.lower() in (*_TRUE, *_FALSE):
            return value.lower() in _TRUE
        raise ValueError(f"{variable} must be one of {', '.join((*_TRUE, *_FALSE))}, got {value!r}.")
    try:
        return int(value)
    except ValueError as error:
        raise ValueError(f"{variable} must be an integer, got {value!r}.") from error

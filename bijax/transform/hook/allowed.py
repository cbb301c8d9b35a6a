"""The argument `allow`: names of primitives that the caller allows."""

import difflib
from collections.abc import Iterable

from bijax.transform.hook import _jax_private, compiled
from bijax.transform.rules.registry import named


def allowed_names(allow: Iterable[str]) -> tuple[str, ...]:
    """Returns the names, sorted, each once.

    Raises:
        TypeError: If `allow` does not hold names.
        ValueError: If no primitive has one of them.
    """
    if isinstance(allow, str) or not isinstance(allow, Iterable):
        came = f"the string {allow!r}" if isinstance(allow, str) else type(allow).__name__
        raise TypeError(f"bijax.invariant: allow must be a collection of names of primitives, got {came}.")
    given = tuple(allow)
    for name in given:
        if not isinstance(name, str) or not name or any(c.isspace() for c in name):
            raise TypeError(f"bijax.invariant: allow must hold names of primitives, got {name!r}.")
    names = tuple(sorted(set(given)))
    if names:
        _check_known(names)
    return names


def _check_known(names: tuple[str, ...]) -> None:
    known = {compiled.NAME} | named() | _jax_private.names_of_primitives()
    for name in names:
        if name not in known:
            near = " or ".join(map(repr, difflib.get_close_matches(name, sorted(known), n=2)))
            raise ValueError(
                f"bijax.invariant: allow must hold names of primitives, got {name!r}, which no primitive has"
                f"{f'; did you mean {near}?' if near else '.'} The error of a refused operation and bijax.audit show"
                " the names. A primitive of your own must have a lowering rule before its name is given."
            )

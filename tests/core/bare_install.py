"""Runs code in which only packages that an installation with some extras has can be imported.

python tests/core/bare_install.py EXTRAS CODE
"""

import importlib.abc
import importlib.metadata
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME = "batch-invariant-jax"


def installed_with(extras: Iterable[str]) -> set[str]:
    """Returns the distributions that `pip install batch-invariant-jax[extras]` installs."""
    found: set[tuple[str, str]] = set()
    waiting = [(NAME, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # a package for another platform
        for text in requirements:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(requirement.name), e) for e in ("", *requirement.extras)]
    return {name for name, _ in found}


class OnlyInstalled(importlib.abc.MetaPathFinder):
    """Refuses top-level modules of distributions that are not among `distributions`."""

    def __init__(self, distributions: set[str]) -> None:
        owners = importlib.metadata.packages_distributions()
        self._refused = {
            module
            for module, names in owners.items()
            if not distributions & {canonicalize_name(name) for name in names}
        }

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname in self._refused:
            raise ModuleNotFoundError(f"No module named {fullname!r} in this installation", name=fullname)
        return None


if __name__ == "__main__":
    finder = OnlyInstalled(installed_with(filter(None, sys.argv[1].split(","))))
    sys.meta_path.insert(0, finder)
    exec(sys.argv[2])

"""The reference has every public name."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import ROOT

REFERENCE = ROOT / "docs" / "reference"
MODULES = (
    "bijax",
    "bijax.ops",
    "bijax.hlo",
    "bijax.testing",
    "flax_layers",
    "flax_layers.nnx",
    "flax_layers.linen",
    "flax_layers.checkpoint",
    "pallas_kernels.contract",
)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


public = load(ROOT / "docs" / "public.py")


def documented() -> set[int]:
    """The identities of all objects that the pages of the reference document."""
    found = set()
    for page in REFERENCE.glob("*.md"):
        text, module = page.read_text(encoding="utf-8"), ""
        for directive, argument in re.findall(r"^(?:\.\. |```)([\w:{}-]+)(?:::)? ([\w.]+)$", text, re.MULTILINE):
            directive = directive.rstrip(":")
            if directive == "{public-members}":
                found |= {id(getattr(importlib.import_module(argument), n)) for n in public.public_names(argument)}
            elif directive in ("module", "currentmodule"):
                module = argument
            elif directive.startswith("auto"):
                owner, _, name = argument.rpartition(".")
                found.add(id(getattr(importlib.import_module(owner or module), name)))
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_documented(module: str) -> None:
    known, namespace = documented(), importlib.import_module(module)
    missing = [n for n in public.public_names(module) if id(getattr(namespace, n)) not in known]
    assert not missing, f"add these names of {module} to a page of docs/reference: {', '.join(missing)}"


@pytest.mark.parametrize("module", MODULES)
def test_public_names_are_those_that_the_module_offers(module: str) -> None:
    namespace = vars(importlib.import_module(module))
    own = {n for n, m in namespace.items() if not n.startswith("_") and not inspect.ismodule(m)}
    assert own - set(public.public_names(module)) <= {"Final"}


def test_public_packages_are_listed() -> None:
    packages = {f"bijax.{p.parent.name}" for p in (ROOT / "bijax").glob("*/__init__.py")}
    packages |= {f"flax_layers.{p.parent.name}" for p in (ROOT / "flax_layers").glob("*/__init__.py")}
    # The names of these are public through the packages above, or belong to the command line.
    internal = {"bijax.demo", "bijax.transform", "flax_layers.conversion", "flax_layers.models", "flax_layers.ops"}
    offering = {p for p in packages - internal if public.public_names(p)}
    assert offering <= set(MODULES), "document the new packages, and list them here"

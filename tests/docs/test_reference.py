"""The reference has every public name."""

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import ROOT


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


public = load(ROOT / "docs" / "public.py")


def by_topic() -> set[int]:
    """The identities of all objects that the pages of `docs/reference` document."""
    found = set()
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        text, module = page.read_text(encoding="utf-8"), ""
        for directive, argument in re.findall(r"^\.\. (\w+):: ([\w.]+)$", text, re.MULTILINE):
            if directive in ("module", "currentmodule"):
                module = argument
            elif directive.startswith("auto"):
                owner, _, name = argument.rpartition(".")
                found.add(id(getattr(importlib.import_module(owner or module), name)))
    return found


@pytest.mark.parametrize("module", sorted(public.BY_TOPIC))
def test_every_name_is_on_a_page(module: str) -> None:
    known, namespace = by_topic(), importlib.import_module(module)
    missing = [name for name in public.public_names(module) if id(getattr(namespace, name)) not in known]
    assert not missing, f"add these names of {module} to a page of docs/reference: {', '.join(missing)}"


def test_a_name_that_is_on_no_page_is_found() -> None:
    assert id(public.modules) not in by_topic()


def test_other_modules_have_a_page_of_their_own() -> None:
    expected = {"bijax.hlo", "bijax.testing", "flax_layers", "flax_layers.checkpoint", "flax_layers.linen"}
    assert expected | {"flax_layers.nnx", "pallas_kernels.contract"} <= set(public.modules())


@pytest.mark.parametrize("module", [*sorted(public.BY_TOPIC), *public.modules()])
def test_public_names_are_those_that_the_module_offers(module: str) -> None:
    namespace = vars(importlib.import_module(module))
    own = {n: m for n, m in namespace.items() if not n.startswith("_") and not inspect.ismodule(m)}
    # Functions of Flax that need no form of ours, such as pooling, are offered as they are.
    flax = {name for name, member in own.items() if getattr(member, "__module__", "").startswith("flax.")}
    assert own.keys() - set(public.public_names(module)) - flax <= {"Any", "Final"}

"""Pages of the reference, and the directive `public-members MODULE` on them: every public name of a module."""

import importlib
import inspect
from pathlib import Path

from docutils import nodes
from public import modules, public_names
from sphinx.util.docutils import SphinxDirective


def write_pages(folder: Path) -> None:
    """Writes a page for each public module, with the module's docstring above its names."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.md"):
        old.unlink()
    for module in modules():
        text = inspect.getdoc(importlib.import_module(module)) or ""
        page = f"# {module}\n\n{text}\n\n```{{public-members}} {module}\n```\n"
        (folder / f"{module}.md").write_text(page, encoding="utf-8")


def entry(module: str, name: str) -> str:
    """Returns the lines of reStructuredText that document one name."""
    member = getattr(importlib.import_module(module), name)
    if inspect.isclass(member):
        return f".. auto{'exception' if issubclass(member, Exception) else 'class'}:: {module}.{name}"
    if inspect.isroutine(member):
        return f".. autofunction:: {module}.{name}"
    value = repr(member)
    shown = f"\n   :value: {value}" if len(value) < 100 and " object at " not in value else ""
    return f".. py:data:: {module}.{name}{shown}"


class PublicMembers(SphinxDirective):
    """Documents all that `public_names` lists; classes and functions first, then constants."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns the nodes of all entries."""
        (module,) = self.arguments
        entries = sorted(
            (entry(module, name) for name in public_names(module)), key=lambda e: e.startswith(".. py:data")
        )
        body = "\n\n".join([f".. module:: {module}", *entries])
        return self.parse_text_to_nodes(f"```{{eval-rst}}\n{body}\n```\n")

"""Pages of the reference, and the directive `public-members MODULE` on them: every public name of a module."""

import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path

from docutils import nodes
from public import modules, public_names
from sphinx.util.docutils import SphinxDirective

_DIRECTIVE = re.compile(r"^\.\. (\w+):: ([\w.]+)$", re.MULTILINE)


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
        documented = [e for e in entries if not e.startswith(".. py:data")]
        body = "\n\n".join([f".. module:: {module}", summary(_argument(e) for e in documented), *entries])
        return self.parse_text_to_nodes(f"```{{eval-rst}}\n{body}\n```\n")


class PageSummary(SphinxDirective):
    """A table of all that the `auto` directives of this page document."""

    def run(self) -> list[nodes.Node]:
        """Returns the table."""
        text, module, names = Path(self.env.doc2path(self.env.docname)).read_text(encoding="utf-8"), "", []
        for directive, argument in _DIRECTIVE.findall(text):
            if directive in ("module", "currentmodule"):
                module = argument
            elif directive.startswith("auto"):
                names.append(argument if "." in argument else f"{module}.{argument}")
        return self.parse_text_to_nodes(f"```{{eval-rst}}\n{summary(names)}\n```\n")


def summary(names: Iterable[str]) -> str:
    """Returns the lines of reStructuredText of a table: each name with the first sentence of its docstring."""
    return ".. autosummary::\n   :nosignatures:\n\n" + "\n".join(f"   ~{name}" for name in names)


def _argument(entry: str) -> str:
    return entry.splitlines()[0].partition(":: ")[2]

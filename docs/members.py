"""The directive `public-members MODULE`: the reference of every public name that a module offers."""

import importlib
import inspect

from docutils import nodes
from public import public_names
from sphinx.util.docutils import SphinxDirective


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

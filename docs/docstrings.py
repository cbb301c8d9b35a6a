"""Turns the project's docstrings into what Sphinx reads; its Google sections are left to napoleon.

The docstrings are plain text for an editor's pop-up: code in single backticks, and stars and bars that mean nothing.
"""

import inspect
import re
from typing import Any

_CODE = re.compile(r"(`[^`]*`)")
# Emphasis, which is left as it is, or what reStructuredText would take for a mark or an address.
_MARKS = re.compile(r"(?<!\S)\*[^\s*]+(?: [^\s*]+)*\*(?!\w)|[*|]|(?<=\w)_(?!\w)|(?<=FILE):")
# A default that is a function or a class: `<function zeros at 0x7f00>`, `<class 'jax.numpy.float32'>`.
_OBJECT = re.compile(r"<(?:function|class|built-in function) '?([\w.]+)(?:\.<locals>[\w.]*)?'?(?: at 0x\w+)?>")
# What linen adds to the fields of each of its classes.
_LINEN_FIELDS = ", parent=<flax.linen.module._Sentinel object>, name=None"
_LABEL = re.compile(r"^(Guarantee|Source):(?= )")
_OVERLOADED = ("bijax.ops.attention.dot_product", "bijax.ops.attention.paged")
_SECTION = re.compile(r"^\w+:$", re.MULTILINE)


def prose(text: str) -> str:
    """Returns docstring text in which reStructuredText sees no markup but code and lists.

    Doctests stay as they are. An indented block that belongs to no section is code.
    """
    found, in_section = [], False
    for paragraph in text.split("\n\n"):
        indented = paragraph.startswith("    ")
        if not indented:
            in_section = bool(_SECTION.search(paragraph))
        if indented and not in_section:
            found.append(f"::\n\n{paragraph}")
        else:
            found.append(paragraph if ">>>" in paragraph else _escape(paragraph))
    return "\n\n".join(found)


def _escape(paragraph: str) -> str:
    label = _LABEL.match(paragraph)
    rest = paragraph[label.end() :] if label else paragraph
    parts = _CODE.split(rest)
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = _MARKS.sub(lambda m: m[0] if len(m[0]) > 1 else f"\\{m[0]}", part)
            if i and part[:1].isalnum():  # a plural after code
                parts[i] = rf"\ {parts[i]}"
    return (f"**{label[1]}:**" if label else "") + "".join(parts)


def process_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrites a docstring in place, before napoleon does."""
    lines[:] = prose("\n".join(lines)).split("\n")


def process_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    """Shows the arguments of classes whose metaclass takes any, as Flax's does, and names instead of addresses."""
    if what == "class":
        # The metaclass's, not that of the class.
        app.env.current_document.autodoc_annotations.get(name, {}).pop("return", None)
        if signature == "(*args, **kwargs)":
            parameters = list(inspect.signature(obj.__init__).parameters.values())[1:]
            signature = str(inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters]))
    return signature and _OBJECT.sub(r"\1", signature.replace(_LINEN_FIELDS, "")), returns


def show_whole_signatures(app: Any) -> None:
    """Makes Sphinx show the signature of a function instead of its overloads, which leave its keywords to a type."""
    from sphinx.pycode import ModuleAnalyzer  # type checkers and linters need no Sphinx

    for module in _OVERLOADED:
        analyzer = ModuleAnalyzer.for_module(module)
        analyzer.analyze()
        analyzer.overloads.clear()


def skip_member(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out what other packages define, and the fields of tuples, which the class lists."""
    module = getattr(obj, "__module__", None) or ""
    foreign = not isinstance(obj, property) and not module.startswith(("bijax", "flax_layers", "pallas_kernels"))
    return True if foreign or str(getattr(obj, "__doc__", "")).startswith("Alias for field") else None

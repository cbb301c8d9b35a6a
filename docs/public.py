"""What is public: for the reference, and for the test that it is complete."""

import importlib
import inspect
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = ("bijax", "flax_layers", "pallas_kernels")
INTERNAL = {
    "bijax.demo",
    "bijax.inspect",
    "bijax.transform",
    "flax_layers.conversion",
    "flax_layers.models",
    "flax_layers.ops",
}
"""Packages whose names are public through others, or belong to the command line."""
BY_TOPIC = {"bijax", "bijax.ops"}
"""Modules whose names are on pages of `docs/reference`, put together by topic."""


def modules() -> list[str]:
    """Returns the public modules that have a page of their own: packages that offer names, and the contracts."""
    folders = [ROOT / "flax_layers", *(ROOT / "bijax").iterdir(), *(ROOT / "flax_layers").iterdir()]
    packages = {".".join(p.relative_to(ROOT).parts) for p in folders if (p / "__init__.py").exists()}
    chosen = packages - INTERNAL - BY_TOPIC | {"pallas_kernels.contract"}
    return sorted(module for module in chosen if public_names(module))


def public_names(module: str) -> list[str]:
    """Returns the names that a module of ours offers: no modules, nothing that another package defines."""
    namespace = importlib.import_module(module)
    # `dir`, because some names are imported when they are first used.
    return sorted(n for n in dir(namespace) if not n.startswith("_") and _is_ours(getattr(namespace, n)))


def _is_ours(member: Any) -> bool:
    if inspect.ismodule(member):
        return False
    if not (inspect.isclass(member) or inspect.isroutine(member)):
        # A constant does not tell where it comes from, but annotations of another package do.
        return not type(member).__module__.startswith("typing")
    # What wraps a function of another package bears its name, but has code of ours.
    code = getattr(member, "__code__", None)
    wraps = code is not None and any(Path(code.co_filename).is_relative_to(ROOT / package) for package in PACKAGES)
    return wraps or member.__module__.split(".")[0] in PACKAGES

"""What of a module is public, for the reference and for the test that it is complete."""

import importlib
import inspect
from typing import Any

PACKAGES = ("bijax", "flax_layers", "pallas_kernels")


def public_names(module: str) -> list[str]:
    """Returns the names that a module of ours offers: no modules, nothing that another package defines."""
    namespace = importlib.import_module(module)
    return sorted(name for name, member in vars(namespace).items() if not name.startswith("_") and _is_ours(member))


def _is_ours(member: Any) -> bool:
    if inspect.ismodule(member):
        return False
    if not (inspect.isclass(member) or inspect.isroutine(member)):
        # A constant does not tell where it comes from, but annotations of another package do.
        return not type(member).__module__.startswith("typing")
    return member.__module__.split(".")[0] in PACKAGES

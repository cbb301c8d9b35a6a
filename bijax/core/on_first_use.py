"""Modules that are imported when something of theirs is used.

The kernels for GPUs are written with `jax.experimental.pallas.mosaic_gpu`, whose import takes half a second and sets an
environment variable. A process that never lowers for a GPU is spared both.
"""

import importlib
from types import ModuleType
from typing import Any


class _OnFirstUse(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # what inspects modules in passing is no use of them
        return getattr(importlib.import_module(self.__name__), name)


def on_first_use(name: str) -> Any:
    """Returns a stand-in for a module, which imports it when an attribute is read.

    Args:
        name: Full name of the module. Import it under `typing.TYPE_CHECKING` too, for those who read types.

    Example:
        >>> on_first_use("math").floor(1.5)
        1
    """
    return _OnFirstUse(name)

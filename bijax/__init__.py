"""Batch-invariant JAX: a row gets the same bits whatever else is in the batch.

Names are imported when they are first used, so that `import bijax` and the command line do not wait for JAX. They are
listed in `__init__.pyi`, as in SPEC 1 of Scientific Python (https://scientific-python.org/specs/spec-0001/).
"""

import ast
import functools
import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import typing


def __getattr__(name: str) -> typing.Any:
    if name == "__version__":
        value: typing.Any = _version()
    elif name == "__all__":  # of `from bijax import *`
        value = sorted({*_modules(), "__version__"})
    elif not name.startswith("_") and (module := _modules().get(name, __name__)) != __name__:
        value = getattr(importlib.import_module(module), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules(), "__version__"} - {"ast", "functools", "importlib", "typing"})


@functools.cache
def _modules() -> dict[str, str]:
    """Returns the module of each public name, as the stub file imports it."""
    stub = importlib.resources.files(__name__).joinpath("__init__.pyi").read_text(encoding="utf-8")
    imports = (node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def _version() -> str:
    try:
        return importlib.metadata.version("batch-invariant-jax")
    except importlib.metadata.PackageNotFoundError:
        return "0.0.0+uninstalled"

"""Modules that need a library which is not installed have no doctests to collect."""

import importlib.util
from pathlib import Path

collect_ignore = [] if importlib.util.find_spec("tunix") else ["bijax/integrations/tunix.py"]
if not importlib.util.find_spec("triton"):
    kernels = (Path(__file__).parent / "pallas_kernels").glob("*/jax_triton*")
    collect_ignore += [str(path) for path in kernels if path.parent.name != "backends"]

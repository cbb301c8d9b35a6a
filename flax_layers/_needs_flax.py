"""Tells what to install where Flax is missing."""

import importlib.util

if importlib.util.find_spec("flax") is None:
    raise ModuleNotFoundError(
        "flax_layers: expected the package flax, which is not installed; install it with `pip install flax`.",
        name="flax",
    )

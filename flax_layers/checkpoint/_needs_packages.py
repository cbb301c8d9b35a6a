"""Tells what to install where packages that read checkpoints are missing."""

import importlib.util

_missing = [name for name in ("gguf", "safetensors", "tokenizers", "jinja2") if importlib.util.find_spec(name) is None]
if _missing:
    raise ModuleNotFoundError(
        f"flax_layers.checkpoint: expected the package{'s' * (len(_missing) > 1)} {', '.join(_missing)}, which"
        f" {'are' if len(_missing) > 1 else 'is'} not installed; install with `pip install {' '.join(_missing)}`.",
        name=_missing[0],
    )

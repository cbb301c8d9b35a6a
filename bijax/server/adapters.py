"""Which LoRA adapter a request names, by the name of the model or by SGLang's `lora_path`."""

import dataclasses
from collections.abc import Sequence

from .errors import ApiError
from .model import ServedModel
from .prompts import Prompt


def find_adapter(model: ServedModel, name: str | None, lora_path: str | None = None) -> str | None:
    """Returns the name of an adapter, or None for the model itself.

    Args:
        model: What is served.
        name: The field `model`: the name of the model, of an adapter (as vLLM), or both as "model:adapter" (as SGLang).
        lora_path: The field of this name: an adapter.

    Raises:
        ApiError: With status 404 if there is no model or adapter of that name, and 400 if the fields contradict each
            other.

    Example:
        >>> served = ServedModel("base", "/models/base", 100, 64, adapters={"poet": "/adapters/poet"})
        >>> find_adapter(served, "base"), find_adapter(served, "poet"), find_adapter(served, None, "poet")
        (None, 'poet', 'poet')
        >>> find_adapter(served, "prose")
        Traceback (most recent call last):
            ...
        bijax.server.errors.ApiError: model: no such model: 'prose'; this server has 'base', 'poet'
    """
    named = None if name is None else name.removeprefix(f"{model.name}:")
    if named in (None, model.name):
        named = None
    elif named not in model.adapters:
        raise ApiError(404, f"no such model: {name!r}; this server has {_listed(model)}", field="model")
    if lora_path is None:
        return named
    if lora_path not in model.adapters:
        known = ", ".join(map(repr, model.adapters)) or "none; start it with --lora-paths NAME=PATH"
        raise ApiError(404, f"no such adapter: {lora_path!r}; this server has {known}", field="lora_path")
    if named not in (None, lora_path):
        raise ApiError(400, f"must be the adapter that model names, {named!r}, got {lora_path!r}", field="lora_path")
    return lora_path


def with_adapter(prompts: Sequence[Prompt], adapter: str | None) -> list[Prompt]:
    """Returns prompts that are computed with an adapter."""
    if adapter is None:
        return list(prompts)
    return [
        dataclasses.replace(prompt, params=dataclasses.replace(prompt.params, adapter=adapter)) for prompt in prompts
    ]


def _listed(model: ServedModel) -> str:
    return ", ".join(map(repr, (model.name, *model.adapters)))

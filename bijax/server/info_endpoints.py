"""Information about the server and its model."""

import dataclasses
import importlib.metadata
from typing import Any

import jax
from starlette.requests import Request
from starlette.responses import Response

from .adapters import find_adapter
from .connection import json_response
from .endpoints import service
from .service import Service

DISTRIBUTION = "batch-invariant-jax"


async def models(request: Request) -> Response:
    """The model, and its adapters."""
    here = service(request)
    cards = [_model_card(here), *(_model_card(here, adapter) for adapter in here.model.adapters)]
    return json_response({"object": "list", "data": cards})


async def model(request: Request) -> Response:
    """The model or an adapter by its name."""
    here = service(request)
    return json_response(_model_card(here, find_adapter(here.model, request.path_params["model"])))


async def model_info(request: Request) -> Response:
    """Which model and which weights, and the fingerprint of the contracts."""
    return json_response(_model_info(service(request)))


async def server_info(request: Request) -> Response:
    """The same, and how they are served: options, size of the cache, versions."""
    here = service(request)
    info = _model_info(here) | {"version": server_version(), "jax_version": jax.__version__, "status": here.phase.value}
    info["max_total_num_tokens"] = here.generation(draining=True).engine.stats().cache_tokens
    if here.engine_options is not None:
        info["engine"] = dataclasses.asdict(here.engine_options)
    if here.model_options is not None:
        info["model"] = dataclasses.asdict(here.model_options)
    return json_response(info)


async def version(request: Request) -> Response:
    """The version of the server."""
    return json_response({"version": server_version()})


def server_version() -> str:
    """The version of the installed package."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _model_card(here: Service, adapter: str | None = None) -> dict[str, Any]:
    return {
        "id": adapter or here.model.name,
        "object": "model",
        "created": here.started_at,
        "owned_by": "bijax",
        "root": here.model.path if adapter is None else here.model.adapters[adapter],
        "parent": None if adapter is None else here.model.name,
        "max_model_len": here.model.max_model_len,
    }


def _model_info(here: Service) -> dict[str, Any]:
    return {
        "model_path": here.model.path,
        "tokenizer_path": here.model.path,
        "is_generation": True,
        "served_model_name": here.model.name,
        "max_model_len": here.model.max_model_len,
        "vocab_size": here.model.vocab_size,
        "weight_version": here.generation(draining=True).engine.stats().weight_version,
        "fingerprint": here.fingerprint,
        "system_fingerprint": here.system_fingerprint,
    }

"""The endpoints: path, methods, body, and what `/docs` says of them."""

from . import control_endpoints as control
from . import health_endpoints as health
from . import info_endpoints as info
from . import openai_endpoints as openai
from . import page_endpoints as pages
from . import token_endpoints as tokens
from .embeddings_endpoint import Embeddings, embeddings
from .endpoint import Endpoint
from .generate_endpoint import generate
from .generate_request import GenerateBody
from .openai_request import ChatBody, CompletionBody
from .responses_endpoint import responses
from .responses_request import ResponsesBody
from .score_endpoint import Score, score

_POST = ("POST",)

ENDPOINTS = [
    Endpoint("/generate", generate, _POST, GenerateBody, "Generation"),
    Endpoint("/v1/completions", openai.completions, _POST, CompletionBody, "Generation"),
    Endpoint("/v1/chat/completions", openai.chat_completions, _POST, ChatBody, "Generation"),
    Endpoint("/v1/responses", responses, _POST, ResponsesBody, "Generation"),
    Endpoint("/v1/embeddings", embeddings, _POST, Embeddings, "Scores"),
    Endpoint("/v1/score", score, _POST, Score, "Scores"),
    Endpoint("/tokenize", tokens.tokenize, _POST, tokens.Tokenize, "Tokens"),
    Endpoint("/detokenize", tokens.detokenize, _POST, tokens.Detokenize, "Tokens"),
    Endpoint("/v1/models", info.models),
    Endpoint("/v1/models/{model:path}", info.model),
    Endpoint("/model_info", info.model_info),
    Endpoint("/get_model_info", info.model_info),
    Endpoint("/server_info", info.server_info),
    Endpoint("/get_server_info", info.server_info),
    Endpoint("/version", info.version),
    Endpoint("/", pages.playground),
    Endpoint("/docs", pages.docs),
    Endpoint("/openapi.json", pages.openapi_json),
    Endpoint("/health", health.health),
    Endpoint("/ping", health.health),
    Endpoint("/health_generate", health.health_generate),
    Endpoint("/metrics", health.metrics),
    Endpoint("/flush_cache", control.flush_cache, ("GET", "POST"), control.Nothing, "Control"),
    Endpoint("/abort_request", control.abort_request, _POST, control.Abort, "Control"),
    Endpoint("/pause_generation", control.pause_generation, _POST, control.Pause, "Control"),
    Endpoint("/continue_generation", control.continue_generation, _POST, control.Nothing, "Control"),
    Endpoint("/update_weights_from_disk", control.update_weights_from_disk, _POST, control.Update, "Control"),
]

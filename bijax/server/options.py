"""Options of the server."""

import dataclasses
from dataclasses import field
from typing import Any, Literal


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How the server listens, and what it takes. It checks itself.

    Raises:
        ValueError: If a value is out of range; the message names it.

    Example:
        >>> ServerOptions(port=8000).host
        '127.0.0.1'
        >>> ServerOptions(port=70000)
        Traceback (most recent call last):
        ValueError: port must be from 0 to 65535, got 70000
    """

    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(30000, "port to listen on; 0 takes a free one")
    served_model_name: str | None = _option(None, "name of the model in replies (default: the name of its file)")
    api_key: str | None = _option(None, "key that requests must bring as `Authorization: Bearer KEY`")
    max_request_bytes: int = _option(4 * 2**20, "longest body of a request")
    max_header_bytes: int = _option(64 * 2**10, "longest head of a request")
    max_prompts: int = _option(512, "most outputs that one request may ask for: prompts times n")
    max_prompt_tokens: int | None = _option(None, "longest prompt (default: the model's longest sequence)")
    max_output_tokens: int | None = _option(None, "longest output (default: the model's longest sequence)")
    max_open_requests: int = _option(1024, "most requests at a time; more are answered with 503")
    body_timeout: float = _option(30.0, "seconds in which a body must come")
    drain_timeout: float = _option(30.0, "seconds that running requests have to finish after SIGTERM")
    retry_after: int = _option(5, "seconds after which clients that were answered with 503 may try again")
    log_format: Literal["text", "json"] = _option("text", "form of the log lines")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}")
        if self.api_key is not None and not self.api_key:
            raise ValueError("api_key must not be empty; leave it out to serve without a key")
        for name in (
            "max_request_bytes",
            "max_header_bytes",
            "max_prompts",
            "max_prompt_tokens",
            "max_output_tokens",
            "max_open_requests",
            "retry_after",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("body_timeout", "drain_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.log_format not in ("text", "json"):
            raise ValueError(f"log_format must be 'text' or 'json', got {self.log_format!r}")

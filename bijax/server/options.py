"""Options of the server."""

import dataclasses

from bijax.serving.option_fields import Options, option

_DAY_S = 86400.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions(Options):
    """How the server listens, and what it accepts. Validates itself.

    Example:
        >>> ServerOptions(port=8000).host
        '127.0.0.1'
        >>> ServerOptions(port=70000)
        Traceback (most recent call last):
            ...
        ValueError: ServerOptions: port must be from 0 to 65535, got 70000.
    """

    host: str = option("127.0.0.1", "address to listen on", kind=str)
    port: int = option(30000, "port to listen on; 0 takes a free one", least=0, most=65535)
    served_model_name: str | None = option(None, "name of the model in replies; by default that of its file", kind=str)
    skip_tokenizer_init: bool = option(
        False, "serve token ids alone, for checkpoints whose tokenizer cannot be read", kind=bool
    )
    api_key: str | None = option(None, "key that requests must send as `Authorization: Bearer KEY`", kind=str)
    allowed_origins: str | None = option(
        None, "origins whose pages may call the server, separated by commas; * for all; by default none", kind=str
    )
    max_request_bytes: int = option(4 * 2**20, "maximum size of the body of a request, in bytes", least=1)
    max_header_bytes: int = option(32 * 2**10, "maximum size of the headers of a request, in bytes", least=1024)
    max_prompts: int = option(512, "maximum number of outputs of one request: its prompts times n", least=1)
    max_prompt_tokens: int | None = option(None, "maximum length of a prompt; by default that of the model", least=1)
    max_output_tokens: int | None = option(None, "maximum length of an output; by default that of the model", least=1)
    unknown_token_id: int | None = option(
        None, "token that replaces ids outside the vocabulary in input_ids; by default they are refused", least=0
    )
    max_open_requests: int = option(
        1024, "maximum number of open requests; further ones are answered with 503", least=1
    )
    body_timeout: float = option(
        30.0, "seconds to wait for the body of a request", kind=float, least=0.001, most=_DAY_S
    )
    drain_timeout: float = option(
        30.0, "seconds after SIGTERM in which requests may finish", kind=float, least=0.0, most=_DAY_S
    )
    retry_after: int = option(
        5, "seconds after which a client that got a 503 should try again, sent as Retry-After", least=1
    )
    data_parallel_size: int = option(
        1,
        "number of equal models that share the requests, each on tensor_parallel_size times expert_parallel_size"
        " devices of its own",
        least=1,
    )
    nnodes: int = option(1, "processes that serve one model together, each started with this command", least=1)
    node_rank: int = option(0, "which of these processes this is; 0 listens for requests", least=0)
    dist_init_addr: str | None = option(
        None, "HOST:PORT of process 0, to which the others connect; needed with nnodes", kind=str
    )
    log_format: str = option("text", "format of the log lines", kind=str, choices=("text", "json"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("ServerOptions: api_key must not be empty; leave it out to serve without a key.")
        self._check_processes()

    def _check_processes(self) -> None:
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"ServerOptions: node_rank must be less than nnodes, got {self.node_rank} of {self.nnodes} processes."
            )
        host, _, port = (self.dist_init_addr or "").rpartition(":")
        if self.nnodes == 1 and self.dist_init_addr is not None:
            raise ValueError(
                f"ServerOptions: dist_init_addr must be left out with one process, got {self.dist_init_addr!r}; set"
                " nnodes."
            )
        if self.nnodes > 1 and not (host and port.isdigit()):
            raise ValueError(
                "ServerOptions: dist_init_addr must be HOST:PORT of process 0 with several processes, got"
                f" {self.dist_init_addr!r}."
            )
        if self.nnodes > 1 and self.data_parallel_size > 1:
            raise ValueError(
                f"ServerOptions: data_parallel_size must be 1 with several processes, got {self.data_parallel_size}."
            )

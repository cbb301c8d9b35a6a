"""The arguments of `bijax test-deterministic`."""

import argparse
import importlib.util

from bijax.serving.model_options import ModelOptions
from bijax.serving.options import EngineOptions

MODES = ("single", "mixed", "prefix", "radix", "chunk", "preempt", "speculative", "restart")
PACKAGES = ("flax", "gguf", "rich", "safetensors", "tokenizers")
TOY, TOY_HYBRID = "toy", "toy-hybrid"


class DeterminismError(Exception):
    """The test could not run."""


def add_determinism_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command `test-deterministic` to `bijax`."""
    parser = commands.add_parser(
        "test-deterministic",
        help="serve one request many times among others and count the different answers",
        description="Serves the same requests again and again while the batch, the cache and the engine around them"
        " change, and counts different outputs: tokens, and bits of log-probabilities. The exit code is 0 if there is"
        " one of each, and 1 if there are more.",
    )
    parser.add_argument("--mode", choices=(*MODES, "all"), default="single", help="what changes (default: single)")
    parser.add_argument(
        "--url",
        action="append",
        metavar="URL",
        help="a server of `bijax serve` to ask, instead of an engine of this process; given again, several servers are"
        " asked and must answer alike",
    )
    parser.add_argument("--api-key", default=None, metavar="KEY", help="of the servers; also BIJAX_API_KEY")
    parser.add_argument(
        "--model",
        default=None,
        metavar="MODEL",
        help=f"a file, a folder, a name on the Hugging Face hub, '{TOY}', or '{TOY_HYBRID}', which has linear attention"
        " (default: SmolLM2)",
    )
    parser.add_argument("--trials", type=int, default=50, metavar="N", help="rounds (default: 50)")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="tokens of an output (default: 32)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default: 1)")
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="seed of every request (default: 42)")
    parser.add_argument("--json", action="store_true", help="print the counts and the verdict as JSON")
    parser.add_argument("--plain", action="store_true", help="use JAX's own operations, to see what they do")
    ModelOptions.add_flags(parser.add_argument_group("model"))
    EngineOptions.add_flags(parser.add_argument_group("engine"))


def run_determinism(parsed: argparse.Namespace) -> int:
    """Runs the command; returns the exit code.

    Raises:
        DeterminismError: If it cannot run.
    """
    packages = ("rich",) if parsed.url else PACKAGES
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise DeterminismError(
            f"packages are not installed: {', '.join(missing)}; install them with `pip install {' '.join(missing)}`"
        )
    for name in ("trials", "max_new_tokens"):
        if getattr(parsed, name) < 1:
            raise DeterminismError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(parsed, name)}")
    # Here, because it imports those packages.
    from bijax.determinism.run import run

    return run(parsed)

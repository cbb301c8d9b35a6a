"""The figures of a run as JSON."""

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from bijax.demo.compute import SideResult
from bijax.demo.quality import Quality
from bijax.demo.report import example


def device_name() -> str:
    """Names the device that computes, as JAX does: "cpu", "NVIDIA H200"."""
    return str(jax.devices()[0].device_kind)


def as_json(
    sides: Sequence[SideResult],
    *,
    model: str,
    arguments: dict[str, Any],
    prompts: Sequence[str],
    prompt_tokens: Sequence[int],
    quality: tuple[Quality, Quality] | None,
    decode: Callable[[np.ndarray], str],
) -> dict[str, Any]:
    """Collects what `--json` writes.

    Args:
        sides: The results.
        model: Name of the checkpoint.
        arguments: The arguments of the run.
        prompts: The prompts as the user wrote them.
        prompt_tokens: Their lengths with the chat template around them.
        quality: Before and after quantisation; None for a model that is not quantised.
        decode: Turns token ids into text.

    Returns:
        An object of plain numbers, strings, lists and dictionaries. `seconds` includes compilation; the other figures
        come from `bijax.demo.compare.Figures`.
    """
    return {
        "demo": "bijax demo",
        "device": device_name(),
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model,
        "arguments": arguments,
        "prompts": [{"text": text, "tokens": tokens} for text, tokens in zip(prompts, prompt_tokens, strict=True)],
        "quality": quality
        and [{"perplexity": q.perplexity, "tokens": q.tokens, "text": decode(q.text)} for q in quality],
        "sides": [_side(side, decode) for side in sides],
    }


def _side(side: SideResult, decode: Callable[[np.ndarray], str]) -> dict[str, Any]:
    return {
        "side": side.side,
        "identical": side.total.identical,
        "total": dataclasses.asdict(side.total),
        "alone": {
            "seconds": round(side.alone_seconds, 3),
            "texts": [decode(text.tokens) for text in side.alone],
        },
        "ways": [
            {
                "way": result.way.name,
                "batches": result.way.batches,
                "prefill_chunk": result.way.prefill_chunk,
                "cache": result.way.cache,
                "seconds": round(result.seconds, 3),
                **dataclasses.asdict(result.figures),
            }
            for result in side.ways
        ],
        "example": _example(side, decode) if side.total.texts_differing else None,
    }


def _example(side: SideResult, decode: Callable[[np.ndarray], str]) -> dict[str, Any]:
    way, found = example(side)
    return {
        "way": way,
        "prompt": found.prompt,
        "alone": decode(side.alone[found.prompt].tokens),
        "other": decode(found.other.tokens),
    }

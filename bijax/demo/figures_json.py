"""The figures of a run as JSON."""

import dataclasses
import datetime
from typing import Any

import jax

from bijax.demo.compute import SideResult
from bijax.demo.measure import Demo


def as_json(demo: Demo) -> dict[str, Any]:
    """Collects what `--json` writes.

    Returns:
        An object of plain numbers, strings, lists and dictionaries. `seconds` includes compilation; the other figures
        are those of `bijax.demo.compare.Figures`, and `examples` those of `bijax.demo.example.Example`.
    """
    prompts = zip(demo.arguments.prompts, demo.prompt_tokens, strict=True)
    return {
        "demo": "bijax demo",
        "device": demo.device,
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": demo.model,
        "arguments": demo.arguments.figures(),
        "prompts": [{"text": text, "tokens": tokens} for text, tokens in prompts],
        "quality": demo.quality
        and [{"perplexity": q.perplexity, "tokens": q.tokens, "text": demo.decode(q.text)} for q in demo.quality],
        "sides": [_side(side, demo) for side in demo.sides],
        "examples": [dataclasses.asdict(example) for example in demo.examples],
    }


def _side(side: SideResult, demo: Demo) -> dict[str, Any]:
    return {
        "side": side.side,
        "identical": side.total.identical,
        "total": dataclasses.asdict(side.total),
        "alone": {
            "seconds": round(side.alone_seconds, 3),
            "texts": [demo.decode(text.tokens) for text in side.alone],
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
    }

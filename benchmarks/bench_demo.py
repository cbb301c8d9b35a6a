"""`bijax demo` with its default arguments: the texts and figures of README and site, and the pictures in `docs`."""

import argparse
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from benchmarks.harness import add_json, save
from benchmarks.record import RESULTS
from bijax.demo.arguments import Arguments, add_demo_parser
from bijax.demo.colours import DARK, LIGHT
from bijax.demo.measure import Demo, measure
from bijax.demo.picture import draw_picture
from bijax.demo.run import print_demo

DOCS = RESULTS.parents[1] / "docs"


def cells(demo: Demo, seconds: float) -> Iterator[dict[str, Any]]:
    """Yields a cell for the run, for each way of computing and their sum by side, and for each example."""
    run = {"prompts": len(demo.prompt_tokens), "tokens": demo.arguments.tokens, "dtype": demo.arguments.dtype}
    yield {"what": "run", "model": demo.model, **run, "seconds": round(seconds, 1)}
    for side in demo.sides:
        for result in side.ways:
            yield {"what": "way", "side": side.side, "way": result.way.name, **dataclasses.asdict(result.figures)}
        yield {"what": "total", "side": side.side, **dataclasses.asdict(side.total)}
    for example in demo.examples:
        yield {"what": "example", **dataclasses.asdict(example)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_json(parser)
    path = parser.parse_args().json
    console = Console(width=100)
    command = argparse.ArgumentParser()
    add_demo_parser(command.add_subparsers())
    start = time.perf_counter()
    demo = measure(console, Arguments.from_namespace(command.parse_args(["demo"])))
    found = list(cells(demo, time.perf_counter() - start))
    print_demo(console, demo)
    save("demo", found, path)
    for name, scheme in (("light", LIGHT), ("dark", DARK)):
        draw_picture(DOCS / f"demo-{name}.png", demo, scheme)


if __name__ == "__main__":
    main()

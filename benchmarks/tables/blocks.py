"""The blocks by name, and the files in which they stand."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.tables import (
    cpu,
    demo,
    front_page,
    gpu,
    hybrid,
    latent,
    operators,
    parallel,
    programs,
    reliability,
    serving,
    shares,
)

ROOT: Final = Path(__file__).parents[2]
FILES: Final = (
    *("README.md", "docs/guide/gpu.md", "docs/guide/limits.md", "docs/operators.md", "docs/serving.md"),
    *("docs/reliability.md", "docs/index.md", "docs/guide/devices.md", "docs/guide/hybrids.md"),
    "docs/guide/latent-attention.md",
)
BLOCKS: Final[dict[str, Callable[[], str]]] = {
    "demo texts": demo.texts,
    "demo figures": demo.totals,
    "demo ways": demo.ways,
    "three numbers": front_page.numbers,
    "other GPUs": front_page.other_gpus,
    "programs": programs.sentence,
    "cost": gpu.short,
    "cost on a CPU": cpu.readme,
    "GPU": gpu.whole,
    "shares of the limits": shares.limits,
    "compiling on a GPU": gpu.compiling,
    "matmul on a CPU": cpu.matmul,
    "models on a CPU": cpu.models,
    "compiling on a CPU": cpu.compiling,
    "products": operators.products,
    "row operators": operators.rows,
    "layers of experts": operators.layers,
    "row operators on a CPU": operators.on_cpu,
    "the engine on a GPU": serving.gpu,
    "the engine on a CPU": serving.cpu,
    "a hybrid": hybrid.steps,
    "latents": latent.cases,
    "two GPUs": parallel.steps,
    "overlap on two GPUs": parallel.overlap,
    "traffic": reliability.traffic,
    "servers": reliability.servers,
}
_BLOCK: Final = re.compile(r"(<!-- made by benchmarks\.tables: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """Returns the text of a page with its blocks made anew.

    Raises:
        KeyError: If a block has a name that `BLOCKS` lacks.
    """
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}", text)


def names(text: str) -> list[str]:
    """Returns the names of the blocks of a page."""
    return [found[2] for found in _BLOCK.finditer(text)]

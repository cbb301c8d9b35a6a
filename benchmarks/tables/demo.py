"""The texts and figures of `bijax demo`."""

import re
from typing import Any

from benchmarks.tables.figures import of, paragraph, table

_MARKUP = re.compile(r"([\\`*_\[\]<>|#])")
PLAIN, INVARIANT = "plain JAX", "bijax"


def texts() -> str:
    """The first example: one prompt's text alone and in a batch, by side."""
    figures = of("demo", "cpu")
    example = figures.where(lambda c: c["what"] == "example").cells[0]
    run = figures.one(what="run")
    rows = [[f"**{pair['side']}**", _text(pair["alone"]), _text(pair["batch"])] for pair in example["pairs"]]
    parted = next(pair["parts_at"] for pair in example["pairs"] if pair["side"] == PLAIN)
    before = paragraph(
        f"One prompt, “{_escaped(example['prompt'])}”, one model (SmolLM2-135M, {run['dtype']}), temperature 0. Plain",
        f"JAX writes a different text when the prompt shares a batch with others; the two part at token {parted}.",
    )
    head = ["", "generated alone", f"generated in {example['way']}"]
    return f"{before}\n\n{table(head, rows)}"


def totals() -> str:
    """How many texts and log-probabilities change, in a sentence."""
    figures = of("demo", "cpu")
    plain, ours = (figures.one(what="total", side=side) for side in (PLAIN, INVARIANT))
    return paragraph(
        f"Of {plain['texts']} texts that were generated in batches, **{plain['texts_differing']}** are not the ones",
        f"generated alone in plain JAX, and **{ours['texts_differing']}** with bijax; of the log-probabilities",
        f"compared, {plain['tokens_differing']} of {plain['tokens']} differ, by up to {shown(plain)}, and",
        f"{ours['tokens_differing']} of {ours['tokens']} with bijax ({figures.source}).",
    )


def _text(pieces: dict[str, str]) -> str:
    """Returns a text with the first differing token in bold, in a cell of a table."""
    token = pieces["token"]
    word = token.strip()
    if not word:
        return _escaped(pieces["before"] + token + pieces["after"]) + " …"
    lead, trail = token[: len(token) - len(token.lstrip())], token[len(token.rstrip()) :]
    # Tags: stars do not make a comma bold that follows a letter.
    marked = f"{_escaped(lead)}<b>{_escaped(word)}</b>{_escaped(trail)}"
    return f"{_escaped(pieces['before'])}{marked}{_escaped(pieces['after'])} …"


def _escaped(text: str) -> str:
    return _MARKUP.sub(r"\\\1", text).replace("\n", " ")


def shown(cell: dict[str, Any]) -> str:
    """Returns a difference with two digits."""
    return f"{cell['largest_difference']:.2g}"


def ways() -> str:
    """A row for each way of computing, with the figures of both sides."""
    figures = of("demo", "cpu")
    names = list(dict.fromkeys(figures.where(lambda c: c["what"] == "way").column("way")))
    rows = []
    for name in names:
        row = [name]
        for side in (PLAIN, INVARIANT):
            cell = figures.one(what="way", way=name, side=side)
            row.append(f"{cell['texts_differing']} of {cell['texts']}")
            row.append(f"{cell['tokens_differing']} of {cell['tokens']}")
        row.append(shown(figures.one(what="way", way=name, side=PLAIN)))
        rows.append(row)
    head = ["compared with alone", "texts that change, plain JAX", "log-probabilities that change", "texts, bijax"]
    head += ["log-probabilities, bijax", "largest change of a log-probability, plain JAX"]
    return table(head, rows, "lrrrrr")

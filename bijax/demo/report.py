"""The table and the lines at the end."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text as Line

from bijax.demo.compare import Comparison, Figures
from bijax.demo.compute import SideResult


def print_table(console: Console, sides: Sequence[SideResult]) -> None:
    """Prints one row for each way of computing and three columns for each side."""
    # Narrow enough for 80 columns, with a wider gap between the sides.
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, show_footer=True, footer_style="bold")
    table.add_column("\n\nway of computing", "all together", no_wrap=True)
    for side in sides:
        headers = ("\nunique\ntexts", f"{side.side}\ntokens\ndiffering", "\nlargest\nULP")
        for header, footer, width in zip(headers, _cells(side.total), (8, None, None), strict=True):
            table.add_column(header, footer, justify="right", overflow="fold", min_width=width)
    reference = [cell for side in sides for cell in (str(len(side.alone)), "reference", "")]
    table.add_row("alone", *reference)
    for results in zip(*(side.ways for side in sides), strict=True):
        table.add_row(results[0].way.name, *(cell for result in results for cell in _cells(result.figures)))
    console.print()
    console.print(table)
    console.print()
    prompts = len(sides[0].alone)
    console.print(
        f"unique texts: {prompts}, one for each prompt, if no text differs from the one generated alone. "
        "tokens differing: those whose log-probability is not, bit for bit, the one that they have alone. Texts are "
        "compared up to the token at which they part; +n counts the tokens from there on. largest ULP: the largest "
        "distance of two log-probabilities, counted in float32 numbers.",
        style="dim",
        highlight=False,
    )


def _cells(found: Figures) -> tuple[Line, Line, Line]:
    style = "green" if found.identical else "red"
    parted = f" +{found.tokens_parted}" if found.tokens_parted else ""
    return (
        Line(str(found.unique_texts), style="red" if found.texts_differing else "green"),
        Line(f"{found.tokens_differing}/{found.tokens}{parted}", style=style),
        Line(f"{found.largest_ulp:,}", style=style),
    )


def text_lines(side: SideResult, prompts: Sequence[str], decode: Callable[[np.ndarray], str]) -> Iterator[str]:
    """Yields lines on the texts of one side: how many differ, and an example if one does.

    Args:
        side: The side.
        prompts: The prompts as the user knows them.
        decode: Turns token ids into text.
    """
    total = side.total
    if not total.texts_differing:
        yield f"{side.side}: all {total.texts} texts hold the same tokens as the ones generated alone."
        return
    yield f"{side.side}: {total.texts_differing} of {total.texts} texts are not the ones generated alone. An example:"
    way, found = example(side)
    width = max(map(len, ("prompt", "alone", way)))
    yield f"  {'prompt':{width}}  {prompts[found.prompt]!r}"
    yield f"  {'alone':{width}}  {decode(side.alone[found.prompt].tokens)!r}"
    yield f"  {way:{width}}  {decode(found.other.tokens)!r}"


def example(side: SideResult) -> tuple[str, Comparison]:
    """Picks, of the texts that differ, the one that parts first, and names its way of computing.

    Raises:
        ValueError: If no text differs.
    """
    parted = [(result.way.name, found) for result in side.ways for found in result.comparisons if found.parted]
    return min(parted, key=lambda pair: pair[1].ulps.size)


def closing_line(sides: Sequence[SideResult]) -> str:
    """Summarises each side in one line, in the order passed."""
    counts = [f"{side.side}: {side.total.tokens_differing} of {side.total.tokens}" for side in sides]
    counts[0] += " log-probabilities differ in any bit"
    return " ".join(count + _parted(side.total) + "." for count, side in zip(counts, sides, strict=True))


def _parted(found: Figures) -> str:
    more = f", and {found.tokens_parted} tokens more come after texts have parted"
    return more if found.tokens_parted else ""

"""What the demo shows while it works."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bijax.demo.compare import Figures


class ProgressDisplay:
    """A progress bar on a terminal, and one plain line for each way of computing as it ends, there and in logs.

    Args:
        console: Where to write.
        total_tokens: Tokens to be generated in all.
    """

    def __init__(self, console: Console, total_tokens: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeElapsedColumn(),
            TextColumn("left:", style="dim"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total_tokens)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, side: str, way: str) -> None:
        """Names the current computation."""
        self._progress.update(self._task, description=f"{side}: {way}")

    def advance(self, tokens: int) -> None:
        """Counts tokens."""
        self._progress.advance(self._task, tokens)

    def end(self, side: str, way: str, found: Figures | None, seconds: float) -> None:
        """Prints the results of a way of computing; None for the reference."""
        outcome = (
            "what the others are compared with"
            if found is None
            else f"{found.texts_differing} of {found.texts} texts change"
        )
        line = f"{side:9}  {way:32} {seconds:6.1f} s  {outcome}"
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

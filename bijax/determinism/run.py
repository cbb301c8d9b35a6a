"""Runs the modes and prints their findings."""

import argparse
import dataclasses
import json
import os

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bijax.determinism.command import MODES, DeterminismError
from bijax.determinism.modes import MODES as RUNNERS
from bijax.determinism.modes import REMOTE_MODES, Run, Samples
from bijax.determinism.remote import RemoteEngine
from bijax.determinism.sources import LocalSource, RemoteSource
from bijax.serving import EngineOptions, ModelOptions, SamplingParams


def run(parsed: argparse.Namespace) -> int:
    """Runs the requested modes; returns 0 if each request had one output, else 1.

    Raises:
        DeterminismError: If an option is wrong, the model cannot be read, or a server cannot be reached.
    """
    console = Console(stderr=parsed.json)  # the progress of a run whose results are JSON
    try:
        params = SamplingParams(
            temperature=parsed.temperature,
            seed=parsed.seed,
            max_new_tokens=parsed.max_new_tokens,
            ignore_eos=True,
            logprobs=True,
        )
        given, model_options = EngineOptions.from_flags(parsed), ModelOptions.from_flags(parsed)
        if parsed.plain and not parsed.url:
            given = dataclasses.replace(given, enable_deterministic_inference=False)
    except (TypeError, ValueError) as error:
        raise DeterminismError(str(error)) from error
    sources: list[LocalSource | RemoteSource] = []
    if parsed.url:
        _check_remote(parsed)
        sources += [RemoteSource(RemoteEngine(url, _api_key(parsed))) for url in parsed.url]
    else:
        sources.append(LocalSource(parsed.model, model_options, given))
    every = REMOTE_MODES if parsed.url else MODES
    modes = every if parsed.mode == "all" else (parsed.mode,)
    found: dict[tuple[str, str], Samples] = {}
    with Progress(console=console, transient=True) as progress:
        for mode in modes:
            task = progress.add_task(mode, total=parsed.trials * len(sources))
            for number, source in enumerate(sources):
                before = number * parsed.trials
                work = Run(
                    source.open,
                    source.prompt,
                    params,
                    parsed.trials,
                    lambda done, task=task, before=before: progress.update(task, completed=before + done),  # type: ignore[misc]
                )
                try:
                    results = RUNNERS[mode](work)
                except ValueError as error:
                    raise DeterminismError(f"mode {mode}: {error}") from error
                for samples in results:
                    kept = found.setdefault((mode, samples.name), Samples(samples.name))
                    kept.completions += samples.completions
    title = ", ".join(parsed.url or ["plain JAX" if parsed.plain else "bijax"])
    is_one = all(samples.unique_bits == 1 for samples in found.values())
    if parsed.json:
        print(json.dumps(_figures(found, title, is_one), indent=2))
    else:
        console.print(_table(found, title=title))
        console.print(verdict(found))
    return 0 if is_one else 1


def verdict(found: dict[tuple[str, str], Samples]) -> str:
    """Returns the verdict in one line."""
    several = [f"{name} ({mode})" for (mode, name), samples in found.items() if samples.unique_bits > 1]
    total = sum(len(samples.completions) for samples in found.values())
    if several:
        return f"not deterministic: {len(several)} of {len(found)} requests have several outputs: {', '.join(several)}"
    requests = f"each of {len(found)} requests" if len(found) > 1 else "the request"
    return f"deterministic: {requests} had one output, to the last bit, in {total} sample{'s' * (total != 1)}"


def _figures(found: dict[tuple[str, str], Samples], title: str, is_one: bool) -> dict[str, object]:
    return {
        "of": title,
        "deterministic": is_one,
        "verdict": verdict(found),
        "requests": [
            {
                "mode": mode,
                "request": name,
                "samples": len(samples.completions),
                "unique_texts": samples.unique_texts,
                "unique_bits": samples.unique_bits,
            }
            for (mode, name), samples in found.items()
        ],
    }


def _check_remote(parsed: argparse.Namespace) -> None:
    if parsed.mode not in (*REMOTE_MODES, "all"):
        raise DeterminismError(
            f"--mode {parsed.mode} changes the engine itself; with --url the modes are {', '.join(REMOTE_MODES)}, and"
            " several servers with other options can be given"
        )
    if parsed.plain:
        raise DeterminismError(
            "--plain is an option of the server here: start it with --no-enable-deterministic-inference"
        )
    theirs = [f.name for options in (EngineOptions, ModelOptions) for f in dataclasses.fields(options)] + ["model"]
    for name in theirs:
        if getattr(parsed, name) is not None:
            raise DeterminismError(f"--{name.replace('_', '-')} is an option of the server, which --url does not start")


def _api_key(parsed: argparse.Namespace) -> str | None:
    key: str | None = parsed.api_key
    return os.environ.get("BIJAX_API_KEY") if key is None else key


def _table(found: dict[tuple[str, str], Samples], *, title: str) -> Table:
    table = Table(title=title)
    for name in ("mode", "request", "total samples", "unique samples", "unique bits"):
        table.add_column(name, justify="left" if name in ("mode", "request") else "right")
    for (mode, name), samples in found.items():
        numbers = (len(samples.completions), samples.unique_texts, samples.unique_bits)
        table.add_row(mode, name, *map(str, numbers))
    return table

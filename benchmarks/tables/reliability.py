"""Figures of the reliability run."""

from benchmarks.tables.figures import of, paragraph, table


def _count(number: int) -> str:
    return f"**{number}**"


def traffic() -> str:
    """Random traffic by engine."""
    figures = of("reliability", "cpu").where(lambda c: c["what"] == "traffic")
    rows = [
        [
            c["engine"],
            *(str(c[name]) for name in ("requests", "finished", "aborted")),
            _count(c["differing"]),
            *(str(c[name]) for name in ("preemptions", "prefix_hits")),
            str(c["accepted_drafts"] or ""),
            str(c["generated_tokens"]),
        ]
        for c in figures.cells
    ]
    head = ["engine", "requests", "finished", "aborted", "bits differ from solo run", "preemptions"]
    head += ["tokens from the prefix cache", "drafts accepted", "tokens"]
    returned = "All pages were returned" if all(figures.column("pages_returned")) else "Not all pages were returned"
    grown = ", ".join(f"{c['resident_mib'][-1] - c['resident_mib'][0]:.1f}" for c in figures.cells)
    least, most = (f(c["resident_mib"][-1] for c in figures.cells) for f in (min, max))
    part = figures.parts[0]
    text = paragraph(
        f"{returned} in each case. The resident memory of the process, without what the C library keeps",
        "of freed memory,",
        f"grew by {grown} MiB (of {least:.0f} to {most:.0f}) from the first to the last tenth of the",
        "requests; the table of",
        f"digests is part of that. ({part['device']}, {part['date']}, commit {part['commit']}, jax",
        f"{part['versions']['jax']}, Python {part['python']}.)",
    )
    return f"{table(head, rows)}\n\n{text}"


def servers() -> str:
    """Servers that are killed or overloaded."""
    figures = of("reliability", "cpu")
    kill, load = figures.one(what="kill"), figures.one(what="overload")
    number, other = kill["requests"], "a second server, with four sequences at once and no prefix cache"
    rows = {
        "requests, sent three times each by eight clients": number,
        "answered before SIGKILL; connections lost": f"{kill['answered_before_the_kill']}; {kill['lost_by_the_kill']}",
        "bits differ after the restart": f"{_count(kill['differing_after_the_restart'])} of {number}",
        f"bits differ on {other}": f"{_count(kill['differing_on_another_server'])} of {number}",
        f"overload: requests sent at once to a server that takes {load['capacity']}": load["requests"],
        "answered with status 200; with 429": f"{load['statuses']['200']}; {load['statuses']['429']}",
        f"most requests waiting, of {load['max_waiting']} allowed": load["most_waiting"],
        "accepted requests whose bits differ from their solo run": _count(load["accepted_differing"]),
        "share of pages in use afterwards": f"{load['pages_in_use_afterwards']:.0f}",
    }
    return table(["", ""], [[name, str(value)] for name, value in rows.items()])

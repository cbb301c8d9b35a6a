"""The table of operations that `bijax.invariant` refuses, from the code."""

from collections import defaultdict

from bijax.transform.rules.registry import refused


def table() -> str:
    """Returns the table in Markdown: the primitives that have one reason in one row."""
    names = defaultdict(list)
    for name, reason in refused().items():
        names[reason].append(f"`{name}`")
    rows = [f"| {', '.join(group)} | {reason} |" for reason, group in names.items()]
    return "\n".join(["| primitive | why, and what to do |", "|---|---|", *rows, ""])

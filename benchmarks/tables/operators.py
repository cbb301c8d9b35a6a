"""Figures of the operators of an inference engine: the tables of `docs/operators.md`."""

from typing import Any

from benchmarks.tables.figures import Figures, count, of, on_gpu, paragraph, span, table


def _us(value: float) -> str:
    """Returns a time in µs with three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _source(*found: Figures) -> str:
    texts = dict.fromkeys(f"{figures.source}: {figures.commits}" for figures in found)
    return f"*{'; '.join(texts)}.*"


def products() -> str:
    """Products of groups, of int8 and of float8."""
    groups, int8, float8 = (on_gpu(name) for name in ("group_matmul", "quant_matmul", "float8_matmul"))
    even = groups.where(lambda c: c["load"] == "balanced")
    one = groups.where(lambda c: c["load"] == "one expert")
    lines = []
    for c in sorted(even.cells, key=lambda c: (c["layer"], c["experts"], c["rows"])):
        name = f"`group_matmul`, {c['layer']} ({c['k']} → {c['n']}), {c['experts']} experts, {count(c['rows'], 'row')}"
        lines.append([name, _us(c["ours_us"]), _us(c["xla_us"]), ""])
    for figures in (int8, float8):
        for c in sorted(figures.cells, key=lambda c: (c["n"] * c["k"], c["m"])):
            name = f"`quant_matmul`, {c['dtype']}, {count(c['m'], 'row')}, {c['k']} → {c['n']}, weights {c['weights']}"
            lines.append([name, *(_us(c[column]) for column in ("ours_us", "xla_us", "bfloat16_us"))])
    text = paragraph(
        "Rows of `group_matmul` are divided evenly among the experts. With all rows for one expert,",
        "XLA's time (one dot)",
        f"over ours is {span(one.column('ratio'))}.",
    )
    head = ["product", "ours, µs", "XLA, µs", "`matmul` in bfloat16, µs"]
    return f"{table(head, lines, 'lrrr')}\n\n{text}\n\n{_source(groups, int8, float8)}"


def rows() -> str:
    """Row operators on a GPU."""
    figures = on_gpu("engine_rows")
    few, many = 8, max(figures.column("tokens"))
    lines = []
    for name in dict.fromkeys(figures.column("operator")):
        large, small = (figures.one(operator=name, tokens=tokens) for tokens in (many, few))
        times = [_us(large[column]) for column in ("floor_us", "ours_us", "xla_us")]
        lines.append([f"`{name}`", str(large["columns"]), *times, _us(small["ours_us"]), _us(small["xla_us"])])
    head = ["operator", "columns", f"{many} tokens: floor", "ours", "XLA", f"{few} tokens: ours", "XLA"]
    return f"{table(head, lines, 'lrrrrrr')}\n\n{_source(figures)}"


def layers() -> str:
    """Whole layers of experts."""
    figures = on_gpu("moe_layer")
    tokens = sorted(set(figures.column("tokens")))
    lines = []
    for layer, dtype in dict.fromkeys((c["layer"], c["dtype"]) for c in figures.cells):
        found = {c["tokens"]: c for c in figures.cells if (c["layer"], c["dtype"]) == (layer, dtype)}
        lines.append([f"{layer}, {dtype}", *(_pair(found.get(number)) for number in tokens)])
    head = ["ours; plain JAX", *(count(number, "token") for number in tokens)]
    return f"{table(head, lines)}\n\n{_source(figures)}"


def _pair(cell: dict[str, Any] | None) -> str:
    return "" if cell is None else f"{_us(cell['ours_us'])}; {_us(cell['xla_us'])}"


def on_cpu() -> str:
    """Row operators on a CPU."""
    figures = of("engine_rows", "cpu")
    tokens = sorted(set(figures.column("tokens")))
    lines = [
        [f"`{name}`", *(f"{figures.one(operator=name, tokens=number)['ratio']:.2f}" for number in tokens)]
        for name in dict.fromkeys(figures.column("operator"))
    ]
    head = ["operator", *(count(number, "token") for number in tokens)]
    return f"{table(head, lines, 'l' + 'r' * len(tokens))}\n\n{_source(figures)}"

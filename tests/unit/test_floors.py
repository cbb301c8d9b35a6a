"""Imports run downwards only: the floors of the design, read from the sources."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pallas_kernels", "bijax", "flax_layers")
FLOOR_0_IMPORTS = {"numpy", "pallas_kernels"}

# The first prefix that fits gives the floor of a module.
FLOORS = (
    ("pallas_kernels.contract", 0),
    ("pallas_kernels._contract_attention", 0),
    ("pallas_kernels._contract_matmul", 0),
    ("pallas_kernels._contract_order", 0),
    ("pallas_kernels._contract_rows", 0),
    ("pallas_kernels._contract_shards", 0),
    ("pallas_kernels.schedule", 0),
    ("pallas_kernels.errors", 0),
    ("pallas_kernels", 1),
    ("bijax.ops", 2),
    ("bijax.testing", 2),
    ("bijax.hlo", 2),
    ("bijax.transform", 3),
    ("bijax.parallel", 3),
    ("flax_layers", 4),
    ("bijax.serving", 5),
    ("bijax.server", 5),
    ("bijax.cli", 5),
    ("bijax.demo", 5),
    ("bijax.__main__", 5),
    ("bijax", 3),
)


def floor(module: str) -> int:
    return next(f for prefix, f in FLOORS if module == prefix or module.startswith(prefix + "."))


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Every module that the source imports, those inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".") if is_package else module.split(".")[:-1]
            base = base[: len(base) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                yield name if is_module(name) else origin


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def operation(module: list[str]) -> str | None:
    """The operation whose kernels a module of pallas_kernels holds; None for what operations share."""
    parts = module[2:] if module[1:2] == ["ops"] else module[1:]
    is_folder = len(parts) > 0 and (ROOT.joinpath(*module[: len(module) - len(parts) + 1])).is_dir()
    return parts[0] if is_folder and module[1:2] != ["parts"] else None


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    found = []
    here = floor(module)
    for name in imports(source, module, is_package):
        top = name.split(".")[0]
        if here == 0 and top not in FLOOR_0_IMPORTS and top not in __import__("sys").stdlib_module_names:
            found.append(f"{module} (floor 0) imports {name}; contracts and schedules know numpy and themselves only")
        if top == "flax" and here < 4:
            found.append(f"{module} (floor {here}) imports flax")
        if top not in PACKAGES:
            continue
        if floor(name) > here:
            found.append(f"{module} (floor {here}) imports {name} (floor {floor(name)})")
        if here == 1 and floor(name) == 1:
            ours, theirs = module.split("."), name.split(".")
            if operation(theirs) not in (None, operation(ours)):
                found.append(f"{module} imports another operation's kernels: {name}")
    return found


def test_imports_run_downwards() -> None:
    found = [v for module, path in modules() for v in violations(module, path.read_text(), path.name == "__init__.py")]
    assert not found, "\n".join(found)


def test_every_package_is_read() -> None:
    names = [module for module, _ in modules()]
    assert {name.split(".")[0] for name in names} == set(PACKAGES)
    assert "pallas_kernels.contract" in names
    assert "bijax.ops.matmul" in names


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pallas_kernels.contract", "import jax"),
        ("pallas_kernels.contract", "from pallas_kernels.matmul import cpu"),
        ("pallas_kernels.schedule.cpu", "from jax import numpy"),
        ("pallas_kernels.matmul.cpu", "from bijax.ops import matmul"),
        ("pallas_kernels.matmul.cpu", "def f():\n    from pallas_kernels.rows.tiled import sum_rows"),
        ("pallas_kernels.matmul.cpu", "from ..rows import tiled"),
        ("pallas_kernels.matmul.cpu", "from pallas_kernels.ops.attention import hopper"),
        ("pallas_kernels.ops.attention.hopper.launch", "from pallas_kernels.matmul import cpu"),
        ("pallas_kernels.parts.hopper.tile", "from pallas_kernels.ops.attention import hopper"),
        ("bijax.ops.matmul", "import flax.nnx"),
        ("bijax.testing._bits", "import flax_layers"),
        ("flax_layers.models.llama", "from bijax.cli import main"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pallas_kernels.contract", "import numpy, dataclasses"),
        ("pallas_kernels.matmul.cpu", "from pallas_kernels._tiles import isolate\nimport jax"),
        ("pallas_kernels.ops.attention.hopper.launch", "from pallas_kernels.parts.hopper import tile"),
        ("bijax.ops.matmul", "from pallas_kernels.matmul import cpu, stacked"),
        ("flax_layers.models.llama", "import bijax\nfrom bijax.ops import matmul\nimport flax.nnx"),
        ("bijax.cli", "import flax_layers"),
    ],
)
def test_a_right_import_is_not(module: str, source: str) -> None:
    assert not violations(module, source)


def test_the_bits_are_chosen_without_the_batch() -> None:
    """No function that chooses a contract takes a parameter that could tell the size of the batch."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "pallas_kernels").glob("_contract_*.py")]
    functions = [f for tree in trees for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
    choosers = [f for f in functions if f.name.endswith("_contract") or f.name == "split_shards"]
    assert len(choosers) >= 7
    for chooser in choosers:
        names = {a.arg for a in (*chooser.args.args, *chooser.args.kwonlyargs)}
        assert not names & {"m", "rows", "batch", "batch_size", "queries", "sequences", "lengths", "x"}

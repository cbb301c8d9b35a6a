"""Imports run downwards only: the floors of the design, read from the sources; tests do not import each other."""

import ast
import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pallas_kernels", "bijax", "flax_layers")
FLOOR_0_IMPORTS = {"numpy", "pallas_kernels"}

# The first prefix that fits gives the floor of a module.
FLOORS = (
    ("pallas_kernels.contract", 0),
    ("pallas_kernels.base_contract", 0),
    ("pallas_kernels.errors", 0),
    ("pallas_kernels.packages", 0),
    ("pallas_kernels.target", 0),
    ("pallas_kernels.registry", 0),
    ("pallas_kernels.backends", 0.25),
    ("pallas_kernels.parts", 0.5),
    ("pallas_kernels.runtime", 0.5),
    ("pallas_kernels", 1),
    ("bijax.core", 2),
    ("bijax.testing", 2),
    ("bijax.dispatch", 2.25),
    ("bijax.lax", 2.5),
    ("bijax.ops", 2.75),
    ("bijax.hlo", 2.75),
    ("bijax.transform", 3),
    ("bijax.sampling", 3),
    ("bijax.parallel", 3.125),
    ("bijax.inspect", 3.25),
    ("flax_layers", 4),
    ("bijax.serving", 5),
    ("bijax.server", 5),
    ("bijax.determinism", 5),
    ("bijax.integrations", 5),
    ("bijax.cli", 5),
    ("bijax.completion", 5),
    ("bijax.demo", 5),
    ("bijax.__main__", 5),
)
ROOT_FLOOR = 3.5  # of `bijax` itself, which exports what is below
OF_KERNELS = {"contract": 0, "schedule": 0.25}  # in every operation's folder, and for what several share
SHARED = {*OF_KERNELS, "base_contract", "errors", "packages", "target", "registry", "backends", "parts", "runtime"}
BACKENDS = {"portable", "cpu", "hopper", "jax_triton"}


def floor(module: str) -> float:
    if module == "bijax":
        return ROOT_FLOOR
    if module.startswith("pallas_kernels."):
        own = [f for name, f in OF_KERNELS.items() if name in module.split(".")[1:3]]
        if own:
            return own[0]
    found = [f for prefix, f in FLOORS if module == prefix or module.startswith(prefix + ".")]
    assert found, f"{module} has no floor: choose one, here and in CONTRIBUTING.md"
    return found[0]


def modules() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Every module that the source imports, those inside functions included."""
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".") if is_package else module.split(".")[:-1]
            base = base[: len(base) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                yield name if is_module(name) else origin


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement inside of another, of which expressions, most of a program, are not looked at."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
            yield from statements(child)


@functools.cache
def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def place(module: str) -> tuple[str | None, str | None]:
    """The operation and the backend whose kernels a module holds; None for what several share."""
    parts = [*module.split("."), None, None, None]
    if parts[0] != "pallas_kernels" or parts[1] is None or parts[1] in SHARED:
        return None, None
    return parts[1], parts[2] if parts[2] in BACKENDS else None


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    found = []
    here = floor(module)
    for name in imports(source, module, is_package):
        top = name.split(".")[0]
        if here < 0.5 and top not in FLOOR_0_IMPORTS and top not in __import__("sys").stdlib_module_names:
            found.append(f"{module} imports {name}; contracts and schedules know numpy and themselves only")
        if top == "flax" and here < 4:
            found.append(f"{module} (floor {here:g}) imports flax")
        if top not in PACKAGES:
            continue
        if floor(name) > here:
            found.append(f"{module} (floor {here:g}) imports {name} (floor {floor(name):g})")
        if here == 1 and floor(name) == 1:
            (op, backend), (other_op, other_backend) = place(module), place(name)
            if other_op not in (None, op):
                found.append(f"{module} imports another operation's kernels: {name}")
            elif backend and other_backend not in (None, backend):
                found.append(f"{module} imports another backend's kernels: {name}")
    return found


def test_imports_run_downwards() -> None:
    found = [v for module, path in modules() for v in violations(module, path.read_text(), path.name == "__init__.py")]
    assert not found, "\n".join(found)


def test_a_new_package_needs_a_floor() -> None:
    with pytest.raises(AssertionError, match=r"bijax\.new\.part has no floor"):
        floor("bijax.new.part")


def test_contributing_names_every_package() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    packages = {path.parent.name for path in (ROOT / "bijax").glob("*/__init__.py")}
    assert len(packages) > 10
    missing = [name for name in sorted(packages) if f"`bijax/{name}/`" not in page]
    assert not missing, f"the floors in CONTRIBUTING.md lack {missing}"


def imported_tests(source: str, module: str) -> list[str]:
    """Returns the test modules that a module imports, in texts that it runs as programs as well."""
    if not re.search(r"(from|import)\b.*\btest_", source):  # most files: they need not be parsed
        return []
    trees = [ast.parse(source)]
    texts = [n.value for n in ast.walk(trees[0]) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    for text in texts:
        with contextlib.suppress(SyntaxError, ValueError):
            trees += [ast.parse(text)] if "import" in text else []
    names = [name for tree in trees for name in imports(ast.unparse(tree), module, is_package=False)]
    return [name for name in names if any(part.startswith("test_") for part in name.split("."))]


def test_no_module_imports_a_test() -> None:
    """What several tests use is a module of its own: a test that moves, or that is left out, takes nothing along."""
    found = {}
    for folder in ("tests", "benchmarks", "examples", "scripts", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            if path != Path(__file__) and (names := imported_tests(path.read_text(), module)):
                found[module] = names
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "from tests.core.test_floors import floor",
        "from tests.core import test_floors",
        "import tests.core.test_floors",
        "from .test_floors import floor",
        "def f():\n    from tests.core import test_floors as floors",
        "PROGRAM = 'from tests.core import test_floors'",
    ],
)
def test_an_imported_test_is_found(source: str) -> None:
    assert imported_tests(source, "tests.core.test_shapes")


def test_every_package_is_read() -> None:
    names = [module for module, _ in modules()]
    assert {name.split(".")[0] for name in names} == set(PACKAGES)
    assert "pallas_kernels.contract" in names
    assert "bijax.ops.matmul" in names


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pallas_kernels.rows.contract.rows", "import jax"),
        ("pallas_kernels.rows.contract.rows", "from pallas_kernels.schedule.cpu import rows"),
        ("pallas_kernels.matmul.schedule.cpu", "from jax import numpy"),
        ("pallas_kernels.matmul.schedule.cpu", "from pallas_kernels.parts.xla import tiles"),
        ("pallas_kernels.parts.hopper.tile", "from pallas_kernels.attention import hopper"),
        ("pallas_kernels.matmul.cpu.launch", "from bijax.ops import matmul"),
        ("pallas_kernels.matmul.cpu.launch", "def f():\n    from pallas_kernels.rows.portable import sum_rows"),
        ("pallas_kernels.matmul.cpu.launch", "from ...rows import portable"),
        ("pallas_kernels.matmul.cpu.launch", "from pallas_kernels.matmul.hopper import operands"),
        ("pallas_kernels.norm.hopper", "from pallas_kernels.norm import portable"),
        ("pallas_kernels.attention.contract.attention", "from pallas_kernels.attention import call"),
        ("bijax.ops.matmul", "import flax.nnx"),
        ("bijax.core.primitive", "from bijax.dispatch import matmul"),
        ("bijax.lax.conv", "from bijax.ops import matmul"),
        ("bijax.testing._bits", "import flax_layers"),
        ("flax_layers.models.llama", "from bijax.cli import main"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pallas_kernels.rows.contract.rows", "import numpy, dataclasses"),
        ("pallas_kernels.schedule.hopper.rows", "from pallas_kernels.contract import LANES"),
        ("pallas_kernels.matmul.cpu.launch", "from pallas_kernels.parts.xla.tiles import isolate\nimport jax"),
        ("pallas_kernels.matmul.hopper.launch", "from pallas_kernels.matmul.activations import activate"),
        ("bijax.ops.matmul", "from pallas_kernels.matmul.cpu import stacked"),
        ("flax_layers.models.llama", "import bijax\nfrom bijax.ops import matmul\nimport flax.nnx"),
        ("bijax.cli", "import flax_layers"),
    ],
)
def test_a_right_import_is_not(module: str, source: str) -> None:
    assert not violations(module, source)


def test_the_bits_are_chosen_without_the_batch() -> None:
    """No function that chooses a contract takes a parameter that could tell the size of the batch."""
    trees = [
        ast.parse(path.read_text()) for path in (ROOT / "pallas_kernels").rglob("*.py") if "contract" in path.as_posix()
    ]
    functions = [f for tree in trees for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
    choosers = [f for f in functions if f.name.endswith("_contract") or f.name == "split_shards"]
    assert len(choosers) >= 7
    for chooser in choosers:
        names = {a.arg for a in (*chooser.args.args, *chooser.args.kwonlyargs)}
        assert not names & {"m", "rows", "batch", "batch_size", "queries", "sequences", "lengths", "x"}

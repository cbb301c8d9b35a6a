"""Targets, and the registry of kernels: which kernel serves a call, and that nothing is tried in its place."""

import ast
import importlib
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import bijax
from bijax.core.architecture import target_for
from bijax.core.contracts import recording
from pallas_kernels import registry
from pallas_kernels.contract import RowContract, row_contract
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.packages import Packages
from pallas_kernels.registry import Kernel, find, registered
from pallas_kernels.target import Target, rank

ROOT = Path(__file__).parents[2]
MADE_UP = "sm_777"
"""No architecture, and so in no cache: JAX keeps what it has traced for each."""
X = jax.ShapeDtypeStruct((8, 256), "float32")


def test_targets_are_ordered() -> None:
    ampere, hopper, blackwell = map(Target.parse, ("sm_80", "sm_90", "sm_100"))
    assert blackwell.is_at_least(hopper)
    assert not ampere.is_at_least(hopper)
    assert not Target("cpu").is_at_least(ampere)
    assert [t.generation for t in (ampere, hopper, blackwell)] == [80, 90, 100]
    assert ampere.features == {"mma"}
    assert blackwell.features == {"mma", "tma", "tcgen05"}
    assert not Target("cuda").features
    assert str(hopper) == "sm_90"
    for wrong in (("cpu", "sm_90"), ("cuda", "9.0"), ("cuda", "sm_9")):
        with pytest.raises(ValueError, match="architecture of 'cuda' such as 'sm_90'"):
            Target(*wrong)


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("cpu", ("cpu",)),
        ("cuda", ("cuda",)),
        ("sm_80", ("sm_80", "sm_80+", "mma", "cuda")),
        ("sm_100", ("sm_100", "sm_90+", "sm_80+", "tma", "cuda")),
        ("sm_120", ("sm_90+", "sm_80+", "tma", "cuda")),
    ],
)
def test_closer_patterns_rank_higher(name: str, patterns: tuple[str, ...]) -> None:
    target = Target.parse(name)
    ranks = [rank(pattern, target) for pattern in patterns]
    assert None not in ranks
    assert ranks == sorted(ranks, reverse=True)  # type: ignore[type-var]
    everything = {"cpu", "cuda", "sm_80", "sm_100", "sm_80+", "sm_90+", "mma", "tma"}
    unfit = {p for p in everything - {*patterns} if rank(p, target) is not None}
    assert unfit <= {"mma", "tma"}  # wider than another pattern of this one
    assert rank("wgmma", target) is None


def test_every_kernel_that_is_listed_exists() -> None:
    for kernel in registry.kernels():
        assert callable(kernel.function()), kernel.name
        assert kernel.patterns


def test_an_architecture_must_be_known_where_kernels_differ_by_it() -> None:
    with pytest.raises(UnsupportedError, match="lowering_for"):
        find("rms_norm", Target("cuda"), 256, X)


def kernel(on: str, number: int, **options: Any) -> Kernel:
    return Kernel("number", on, lambda: number, **options)


def test_the_closest_kernel_that_serves_is_found() -> None:
    ours = [kernel("cuda", 0), kernel("sm_80+", 80), kernel("sm_90+", 90), kernel("sm_100", 100)]
    with registered(*ours):
        numbers = {a: find("number", Target("cuda", a), None).function() for a in ("sm_75", "sm_86", "sm_90", "sm_100")}
    assert numbers == {"sm_75": 0, "sm_86": 80, "sm_90": 90, "sm_100": 100}
    picky = kernel("sm_100", 1, serves=lambda *_, **__: False), kernel("sm_100", 2, contract=lambda _: None)
    with registered(kernel("cuda", 0), *picky):
        assert find("number", Target("cuda", "sm_100"), None).function() == 0


def test_a_backend_is_the_module_that_lists_a_kernel_or_stated() -> None:
    listed = importlib.import_module("pallas_kernels.backends.portable").KERNELS
    found = {k.name: k.backend for k in registry.kernels()}
    assert all(found[k.name] == "portable" for k in listed)  # also where another module of the operation has the code
    ours = kernel("cuda", 1, by_name=True, backend="mine"), kernel("cuda", 2)
    with registered(*ours):
        assert "mine" in registry.backends()
        with bijax.prefer_backend("mine"), bijax.lowering_for("sm_90"):
            assert find("number", target_for("cuda"), None).function() == 1
        assert find("number", Target("cuda", "sm_90"), None).function() == 2
    assert "mine" not in registry.backends()


def test_a_kernel_by_name_may_serve_calls_instead() -> None:
    """Where another backend is requested, or its packages are missing, it does not, and nothing warns."""
    missing = Packages(("no-such-package",), "cuda13")

    def instead(target: Target, *, few: bool) -> bool:
        return few and not target.several

    for served, packages in ((True, None), (False, None), (True, missing)):
        options = {"by_name": True, "backend": "mine", "instead": instead, "packages": packages}
        with registered(kernel("cuda", 1, **options), kernel("cuda", 2, backend="theirs"), kernel("sm_90", 3)):
            with warnings.catch_warnings(action="error"):
                found = find("number", Target("cuda", "sm_90"), None, few=served)
                on_several = find("number", Target("cuda", "sm_90", several=True), None, few=served)
            assert found.function() == (1 if served and packages is None else 3)
            assert on_several.function() == 3
            assert find("number", Target("cuda", "sm_90", "theirs"), None, few=served).kernel.backend == "theirs"


def test_a_kernel_for_some_calls_comes_first() -> None:
    for serves in (True, False):
        choosy = kernel("sm_90", 1, serves=lambda serves=serves, **_: serves)
        with registered(choosy, kernel("sm_90", 2)):
            assert find("number", Target("cuda", "sm_90"), None).function() == (1 if serves else 2)


@pytest.mark.parametrize("options", [{}, {"serves": lambda: True}])
def test_two_kernels_for_one_call_are_an_error(options: dict[str, Any]) -> None:
    ours = kernel("sm_90", 1, **options), kernel("sm_90", 2, **options)
    with registered(*ours), pytest.raises(ValueError, match="expected one kernel"):
        find("number", Target("cuda", "sm_90"), None)


def test_no_other_target_is_tried() -> None:
    with registered(kernel("sm_90", 1)), pytest.raises(UnsupportedError, match=r"number.* on sm_80.*on sm_90"):
        find("number", Target("cuda", "sm_80"), None)
    assert not registry.kernels("number")


def test_kernels_without_a_target_are_refused() -> None:
    with pytest.raises(ValueError, match="architecture of 'cuda' such as"):
        registry.register(kernel("cpu", 2), kernel("sm_9000", 1))
    with pytest.raises(ValueError, match=r"before the '\+'"):
        registry.register(kernel("cpu+", 1))
    with pytest.raises(ValueError, match="expected targets"):
        registry.register(Kernel("number", (), lambda: 1))
    assert not registry.kernels("number")


def _tangent(x: jax.Array, *, contract: RowContract, mean: bool) -> jax.Array:
    del contract, mean
    return jnp.tan(x[:, 0].astype(jnp.float32))


def _first_norm(x: jax.Array, *, contract: RowContract, eps: float, **others: jax.Array) -> tuple[jax.Array, ...]:
    del contract, eps, others
    return jnp.sinh(x), x[:, :1].astype(jnp.float32)


def _lowered(function: Any, *arrays: Any, architecture: str = MADE_UP) -> str:
    with bijax.lowering_for(architecture):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_the_kernels_of_a_third_target() -> None:
    """They are chosen, and recorded, without a change of any other file; calls that they do not serve fail."""
    ours = (
        Kernel("sum_axis", MADE_UP, _tangent, row_contract(), serves=lambda x, **_: x.shape[1] == 256),
        Kernel("rms_norm", MADE_UP, _first_norm, row_contract()),
    )
    with registered(*ours):
        assert "stablehlo.tan" in _lowered(lambda x: bijax.sum(x, axis=1), X)
        assert "sinh" in _lowered(bijax.rms_norm, X)
        assert "stablehlo.tan" not in _lowered(lambda x: bijax.sum(x, axis=1), X, architecture="sm_80")
        assert "stablehlo.tan" not in _lowered(
            lambda x: bijax.sum(x, axis=1), jax.ShapeDtypeStruct((8, 128), "float32")
        )
        with bijax.lowering_for(MADE_UP), recording() as found:
            bijax.core.primitive.KERNELS["bijax_rms_norm"]["cuda"](jnp.ones((2, 256)), names=("x",), eps=1e-6)
    assert [(use.contract, use.kernel.rpartition(".")[2]) for use in found] == [(row_contract().id, "_first_norm")]


def test_an_operation_without_a_kernel_for_a_target_fails() -> None:
    with pytest.raises(UnsupportedError, match=r"rms_norm: no kernel serves \(float32\[8, 256\]\) on tpu"):
        find("rms_norm", Target("tpu"), 256, X)


_WITHOUT_IMPORTS = """
import sys
import warnings
from pallas_kernels import registry
registry.kernels()
backends = ("portable", "cpu", "hopper", "jax_triton")
kernels = [m for m in sys.modules if m.startswith("pallas_kernels.") and m.split(".")[2:3] in [[b] for b in backends]]
loaded = [m for m in kernels if ".backends." not in m]
loaded += [m for m in sys.modules if m.startswith(("pallas_kernels.parts.", "jax.", "triton", "jax_triton"))]
assert not loaded, loaded
"""


def test_the_registry_imports_no_kernel() -> None:
    subprocess.run([sys.executable, "-c", _WITHOUT_IMPORTS], check=True, cwd=ROOT)


_FOR_AMPERE = """
import importlib.abc, importlib.util, sys

class Refused(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        own = name.startswith("pallas_kernels.") and name != "pallas_kernels.backends.hopper"
        if own and any(part.startswith("hopper") for part in name.split(".")):
            raise ImportError(f"refused: {name}")

sys.meta_path.insert(0, Refused())
import jax, jax.numpy as jnp
from flax import nnx
import bijax
from tests.layers.small_llama import SHALLOW, model

graph, state = nnx.split(model(config=SHALLOW))
state = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
tokens = jax.ShapeDtypeStruct((2, 40), jnp.int32)

def step(state, tokens):
    def loss(state):
        return bijax.mean(bijax.softmax_cross_entropy(nnx.merge(graph, state)(tokens), tokens))

    return jax.value_and_grad(loss)(state)

def lowered(architecture):
    with bijax.lowering_for(architecture):
        return jax.jit(step).trace(state, tokens).lower(lowering_platforms=("cuda",)).as_text()

text = lowered("sm_80")
packages = ("triton", "jax_triton", "jax_cuda13_plugin")  # without them XLA's programs serve
launches = "triton_kernel_call" in text or "xla.gpu.ptx" in text
assert launches == all(importlib.util.find_spec(name) for name in packages)
assert "mosaic_gpu" not in text and "stablehlo.dot" not in text
assert "jax.experimental.pallas.mosaic_gpu" not in sys.modules
try:
    lowered("sm_90")
except ImportError as error:
    assert "refused: pallas_kernels." in str(error)
else:
    raise AssertionError("the control: a program for sm_90 imports kernels for Hopper")
"""


def test_a_model_is_lowered_for_another_gpu_without_the_modules_of_hopper() -> None:
    subprocess.run([sys.executable, "-c", _FOR_AMPERE], check=True, cwd=ROOT)


def _compared(tree: ast.AST) -> Iterator[str]:
    """Yields the places where a program asks which architecture it has."""
    for node in ast.walk(tree):
        requested: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            requested = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            requested = [node.value]
        elif isinstance(node, ast.Subscript):
            requested = [node.slice]
        if any(_is_architecture(part) for expression in requested for part in ast.walk(expression)):
            yield ast.unparse(node)


def _is_architecture(part: ast.AST) -> bool:
    match part:
        case ast.Constant(value=str() as text):
            return text.startswith("sm_")
        case ast.Attribute(attr=name):
            return name in ("architecture", "compute_capability", "generation")
        case ast.Call(func=ast.Name(id=name)):
            return name == "cuda_architecture"
    return False


_MAY_COMPARE = {
    "pallas_kernels/target.py",
    "pallas_kernels/registry.py",
    "bijax/core/architecture.py",  # a device of this process with the target
}


def test_nothing_else_compares_architectures() -> None:
    sources = (
        path for package in ("bijax", "pallas_kernels", "flax_layers") for path in (ROOT / package).rglob("*.py")
    )
    # Most files name no architecture, and need not be parsed.
    texts = {str(p.relative_to(ROOT)): p.read_text() for p in sources}
    names = re.compile("architecture|sm_|compute_capability|generation")
    found = {name: [*_compared(ast.parse(text))] for name, text in texts.items() if names.search(text)}
    assert {name: places for name, places in found.items() if places and name not in _MAY_COMPARE} == {}


@pytest.mark.parametrize(
    "source",
    ["cuda_architecture() != HOPPER", "target.architecture == x", "TABLE['sm_90', dtype]", "a in ('sm_90', 'sm_100')"],
)
def test_a_comparison_is_found(source: str) -> None:
    assert [*_compared(ast.parse(source))]

"""What README says of an extra works with the packages that this extra installs, and no others."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("bare_install.py")

PROGRAMS = """
import bijax, jax, pallas_kernels
from bijax import audit, cli, contracts, hlo, testing
for name in dir(bijax):
    getattr(bijax, name)
f = bijax.invariant(lambda x: jax.nn.softmax(x @ x.T))
testing.assert_batch_invariant(jax.vmap(lambda x: x * 2), jax.numpy.ones((3, 4)), batch_sizes=(2,), modes=("jit",))
print(f(jax.numpy.ones((2, 3))).shape)
"""

LAYERS = """
import bijax, flax_layers, jax
from flax import nnx
for module in (flax_layers, flax_layers.nnx, flax_layers.linen, flax_layers.models):
    for name in dir(module):
        getattr(module, name)
model = nnx.Sequential(nnx.Linear(3, 5, rngs=nnx.Rngs(0)), nnx.LayerNorm(5, rngs=nnx.Rngs(0)))
print(flax_layers.convert(model)(jax.numpy.ones((2, 3))).shape)
"""


def run(extras: str, code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, str(SCRIPT), extras, code], capture_output=True, text=True)


@pytest.mark.parametrize(("extras", "code", "shape"), [("", PROGRAMS, "(2, 2)"), ("flax", LAYERS, "(2, 5)")])
def test_an_extra_has_what_its_code_imports(extras: str, code: str, shape: str) -> None:
    done = run(extras, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == shape


@pytest.mark.parametrize(("extras", "module"), [("", "flax"), ("flax", "gguf"), ("flax", "starlette")])
def test_other_packages_are_refused(extras: str, module: str) -> None:
    done = run(extras, f"import {module}")
    assert f"No module named '{module}' in this installation" in done.stderr


def test_reading_checkpoints_says_what_it_needs() -> None:
    code = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("gguf", "tokenizers") else find(name)
import flax_layers.checkpoint
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "expected the packages gguf, tokenizers, which are not installed" in done.stderr
    assert "`pip install gguf tokenizers`" in done.stderr

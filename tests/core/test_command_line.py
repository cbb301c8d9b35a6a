"""`bijax` itself: help, version, what is imported, suggestions; `info`, `contracts`, `completion`; lazy names."""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import bijax
from bijax import cli
from bijax.determinism.modes import Samples
from bijax.determinism.run import verdict

ROOT = Path(__file__).parents[2]

MODULE = """
import bijax, jax, jax.numpy as jnp

def plain(x, w):
    return x @ w

invariant = bijax.invariant(plain)

def arguments():
    return jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8, 2), jnp.float32)
"""


def test_help_and_version_do_not_import_jax() -> None:
    code = (
        "import sys, bijax\n"
        "from bijax import cli\n"
        "for arguments in (['--help'], ['--version'], []):\n"
        "    try: cli.main(arguments)\n"
        "    except SystemExit: pass\n"
        "print('jax' in sys.modules, bijax.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == f"False {bijax.__version__}"
    assert sum(line.startswith("usage: bijax") for line in lines) == 2  # without arguments, too
    assert any(line.startswith(f"bijax {bijax.__version__} (jax ") for line in lines)
    assert all(any(line.split()[:1] == [c.name] for line in lines) for c in cli.COMMANDS)


def test_suggestions(capsys: pytest.CaptureFixture[str]) -> None:
    for word, meant in (("audti", "did you mean 'audit'?"), ("server", "did you mean 'serve'?"), ("x", "command 'x'.")):
        with pytest.raises(SystemExit) as stopped:
            cli.main([word])
        assert stopped.value.code == 2
        assert meant in capsys.readouterr().err


def test_an_unknown_argument_of_a_command_shows_its_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["kernels", "--nope"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: bijax kernels [-h]")
    assert error.endswith("bijax kernels: error: unrecognized arguments: --nope\n")


def test_the_table_of_commands_is_that_of_their_parsers(capsys: pytest.CaptureFixture[str]) -> None:
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit) as stopped:
            cli.main([command.name, "--help"])
        assert stopped.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: bijax {command.name}")
        error = cli._load(*command.error.split(":"))
        assert issubclass(error, Exception)
        (action,) = (a for a in cli._parser((command,))._actions if isinstance(a.choices, dict))
        helps = {a.dest: a.help for a in action._choices_actions}  # type: ignore[attr-defined]
        assert helps[command.name] == command.help


def test_a_closed_pipe_ends_a_command_quietly() -> None:
    listing = [sys.executable, "-m", "bijax", "kernels", "--json"]
    reading, writing = os.pipe()
    os.close(reading)  # before the command starts: a reader that stops later may come after the last line
    try:
        ended = subprocess.run(listing, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    finally:
        os.close(writing)
    assert ended.stderr == ""
    assert ended.returncode == cli.PIPE_CLOSED


def test_a_terminal_that_is_not_unicode(tmp_path: Path) -> None:
    (tmp_path / "programs.py").write_text("def f(): import jax.numpy as jnp; return jnp.zeros(3)[::-1] * jnp.ones(3)")
    done = subprocess.run(
        [sys.executable, "-m", "bijax", "audit", "programs:f"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        check=False,
    )
    assert "\\xd72" in done.stdout  # a multiplication sign
    assert done.stdout.splitlines()[-2].startswith("not invariant: 1 variant")


def test_info_without_a_backend() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bijax", "info", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "rocm"},
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["devices"][0].startswith("none, JAX raises ")
    assert (found["target"], found["settings"]["JAX_PLATFORMS"]) == ("none", "rocm")
    assert found["versions"]["jax"]


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["jax"]
    assert found["devices"]
    assert "matmul" in {name for names in found["served by"].values() for name in names}
    assert cli.main(["info"]) == 0
    assert f"target: {found['target']}" in capsys.readouterr().out.splitlines()


def test_contracts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "with_contracts.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)

    def run(function: str, *options: str) -> int:
        return cli.main(["contracts", function, "--args", "with_contracts:arguments", *options])

    assert run("with_contracts:invariant", "--platform", "cpu") == 0
    first, *ids = capsys.readouterr().out.splitlines()
    assert run("with_contracts:invariant", "--platform", "cpu", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert first.startswith(found["fingerprint"])
    assert ids == found["ids"]
    assert [i.partition("/")[0] for i in ids] == ["matmul"]
    assert run("with_contracts:plain") == 1
    assert "dot_general" in capsys.readouterr().err
    assert run("with_contracts:invariant", "--platform", "cuda", "--architecture", "sm_90") == 0
    if jax.default_backend() != "gpu":
        assert run("with_contracts:invariant", "--platform", "cuda") == 2
        assert "needs --architecture" in capsys.readouterr().err
    assert run("with_contracts:nothing") == 2
    assert "has no attribute 'nothing'" in capsys.readouterr().err


def test_completion(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Shtab:
        @staticmethod
        def complete(parser: object, shell: str) -> str:
            return f"complete for {shell}: {len(parser._subparsers._group_actions[0].choices)}"  # type: ignore[attr-defined]

    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "shtab", Shtab)
    assert cli.main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == f"complete for bash: {len(cli.COMMANDS) + 1}\n"


def test_verdicts_of_a_determinism_test() -> None:
    class Counted(Samples):
        unique_bits = property(lambda self: self.bits)  # type: ignore[assignment]

    one, two = Counted("first"), Counted("second")
    one.bits, two.bits = 1, 2  # type: ignore[attr-defined]
    assert verdict({("single", "first"): one}).startswith("deterministic: the request had one output")
    assert verdict({("single", "first"): one, ("mixed", "second"): two}) == (
        "not deterministic: 1 of 2 requests have several outputs: second (mixed)"
    )


def test_names_are_those_of_the_stub() -> None:
    stub = Path(bijax.__file__).with_name("__init__.pyi").read_text()
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    names = {(str(node.module), alias.name, alias.asname) for node in imports for alias in node.names}
    assert {name for _, name, _ in names} <= set(dir(bijax))
    assert len(names) > 60
    for module, name, exported in names:
        assert name == exported  # `import x as x` is what type checkers take for public
        defined = importlib.import_module(module) if module != "bijax" else None
        expected = getattr(defined, name) if defined else importlib.import_module(f"bijax.{name}")
        assert getattr(bijax, name) is expected
    with pytest.raises(AttributeError, match="no attribute 'matmull'"):
        bijax.matmull  # type: ignore[attr-defined]  # noqa: B018
    starred: dict[str, object] = {}
    exec("from bijax import *", starred)
    assert {name for _, name, _ in names} | {"__version__"} == set(starred) - {"__builtins__"}

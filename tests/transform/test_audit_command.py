"""`bijax audit`: arguments, exit codes, messages, what is printed."""

import json

import jax
import pytest

from bijax import cli
from tests.hlo import gpu_programs

MODULE = """
import jax
import jax.numpy as jnp
import bijax

def network(x, w):
    return jnp.maximum(x @ w, 0)

invariant = bijax.invariant(network)
number = 3

def arguments():
    return jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8, 2), jnp.float32)

def keywords():
    return dict(zip("xw", arguments()))

def wrong():
    return 3

def no_arguments():
    return ()

def raising():
    raise OSError("no weights")

def missing(x, w):
    return {}["a layer"]

def wanting(x, w):
    assert x.shape[0] == 1, "one row, please"

def editing(x, w):
    import sys
    sys.path.remove("")
    raise RuntimeError("after the path")
"""

BROKEN = {
    "broken_syntax": "def f(:",
    "broken_import": "raise RuntimeError('no device')",
    "broken_exit": "import sys; sys.exit(0)",
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs `bijax audit` in a folder with a module; returns the exit code and what was printed."""
    (tmp_path / "audited_network.py").write_text(MODULE)
    for name, text in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "gpu.hlo").write_text(gpu_programs.CUBLAS)
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = cli.main(["audit", *(a.replace("m:", "audited_network:") for a in arguments)])
        return code, capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("function", "options", "code"),
    [
        ("m:network", (), 1),
        ("m:invariant", (), 0),
        ("m:invariant", ("--compiled",), 0),
        ("m:invariant", ("--platform", "cuda"), 0),
        ("m:network", ("--platform", "cuda"), 1),
    ],
)
def test_the_exit_code_says_whether_something_is_variant(run, function, options, code):
    got, printed = run(function, "--args", "m:arguments", *options)
    assert got == code
    assert "dot_general" in printed.out
    assert printed.err == ""
    assert "\x1b" not in printed.out
    assert ("program for" in printed.out) == ("--compiled" in options)


def test_json(run):
    code, printed = run("m:network", "--args", "m:keywords", "--json", "--platform", "cuda")
    found = json.loads(printed.out)
    assert code == 1
    assert found["platform"] == "cuda"
    assert [o["primitive"] for o in found["operations"] if o["verdict"] == "variant"] == ["dot_general"]


def test_hlo_of_a_file(run):
    code, printed = run("--hlo", "gpu.hlo")
    assert code == 1
    assert "__cublas$gemm" in printed.out
    code, printed = run("--hlo", "gpu.hlo", "--json")
    assert json.loads(printed.out)["findings"][0]["kind"] == "library"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m:network"], "takes the arguments (x, w), and was given none: missing a required argument: 'x'; name a"),
        (["m:network"], "--args MODULE:ARGS_FUNCTION"),
        (["m:missing", "--args", "m:no_arguments"], "was given those that audited_network:no_arguments returns"),
        (["m:network", "--args", "m:wrong"], "it returned int"),
        (["m:number"], "expected a function, got int"),
        (["m:nothing"], "has no attribute 'nothing'"),
        (["no_such_module:f"], "No module named 'no_such_module'\n"),
        (["network"], "expected MODULE:FUNCTION"),
        (["broken_syntax:f"], "SyntaxError"),
        (["broken_import:f"], "RuntimeError: no device (broken_import.py:1)"),
        (["broken_exit:f"], "SystemExit: 0"),
        (["m:network", "--args", "m:raising"], "OSError: no weights (audited_network.py:25)"),
        (["m:missing", "--args", "m:arguments"], "KeyError: 'a layer' (audited_network.py:28)"),
        (["m:wanting", "--args", "m:arguments"], "AssertionError: one row, please"),
        (["m:editing", "--args", "m:arguments"], "RuntimeError: after the path"),
        ([".m:network"], "TypeError"),
        (["--hlo", "nowhere.hlo"], "nowhere.hlo"),
        (["--hlo", "audited_network.py"], "HloModule NAME"),
        (["--hlo", "gpu.hlo", "--compiled"], "compiled already"),
    ],
)
def test_what_cannot_be_audited_is_said(run, arguments, message):
    code, printed = run(*arguments)
    assert code == 2
    assert printed.err.startswith("bijax audit: error: ")
    assert message in printed.err
    assert printed.out == ""


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the architecture is known")
def test_a_gpu_that_the_machine_does_not_have(run):
    code, printed = run("m:network", "--args", "m:arguments", "--compiled", "--platform", "cuda")
    assert (code, printed.out) == (2, "")
    assert "needs --architecture, since kernels and bits depend on it: sm_90 for Hopper" in printed.err


@pytest.mark.parametrize("arguments", [[], ["m:network", "--hlo", "gpu.hlo"], ["m:network", "--platform", "tpu"]])
def test_bad_arguments_show_the_usage(run, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2
    assert "usage: bijax audit" in capsys.readouterr().err


ROWS = """
import jax.numpy as jnp
import bijax

@bijax.invariant
def centred(x, scale):
    return scale * (x - x.mean(0))

def arguments():
    return jnp.ones((4, 8)), jnp.ones(8)
"""


def test_rows_that_meet(run, tmp_path):
    (tmp_path / "rows_meet.py").write_text(ROWS)
    call = ("rows_meet:centred", "--args", "rows_meet:arguments")
    assert run(*call)[0] == 0
    code, (out, _) = run(*call, "--batch-axis", "0,none")
    assert code == 1
    assert "mixes rows  reduce_sum" in out
    assert out.splitlines()[-1] == "mixes rows: a row depends on other rows, or on its position (1 operation)"
    found = json.loads(run(*call, "--batch-axis", "0,None", "--json")[1].out)
    assert (found["rows"]["verdict"], found["invariant"]) == ("mixes rows", False)
    assert "argument 1 has 8 rows" in run(*call, "--batch-axis", "0")[1].err
    with pytest.raises(SystemExit):
        run(*call, "--batch-axis", "first")


def test_annotations(run, tmp_path):
    (tmp_path / "rows_noted.py").write_text(ROWS)
    code, (out, _) = run("rows_noted:centred", "--args", "rows_noted:arguments", "--batch-axis", "0,none", "--github")
    assert code == 1
    first, *_, last = out.splitlines()
    assert first.startswith("::error file=rows_noted.py,line=7,title=bijax audit%2C mixes rows::reduce_sum: it reduces")
    assert last.startswith("mixes rows: ")
    code, (out, _) = run("audited_network:network", "--args", "audited_network:arguments", "--github")
    assert code == 1
    assert "audited_network.py,line=7,title=bijax audit%2C variant::dot_general: left to XLA" in out

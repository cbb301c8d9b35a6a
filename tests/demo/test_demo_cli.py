"""The command line: arguments, exit codes, messages, what is printed and written."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bijax import cli
from bijax.demo import measure
from bijax.demo.compare import Text
from bijax.demo.prompts import BUILT_IN
from bijax.demo.quality import Quality
from flax_layers.checkpoint import CheckpointError
from pallas_kernels.errors import UnsupportedError
from tests.demo.demo_fakes import FakeModel, shift

ROOT = Path(__file__).parents[2]


class ByteTokenizer:
    eos_token_ids = (0,)
    has_chat_template = True

    def encode(self, text):
        return list(text.encode())

    def encode_chat(self, messages, *, add_generation_prompt):
        if messages[0]["content"] == "refused":
            raise ValueError("no token for this")
        return [*messages[0]["content"].encode(), 1]

    def decode(self, ids):
        return " ".join(map(str, ids))


@pytest.fixture
def demo(monkeypatch, tmp_path, capsys):
    """Runs `bijax demo` with fake models; returns the exit code, what it printed, and its JSON if it wrote one."""
    config = SimpleNamespace(max_position_embeddings=1000)
    checkpoint = SimpleNamespace(config=config, tokenizer=ByteTokenizer(), dtype="float16")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "smollm2_path", lambda: tmp_path / "fake.gguf")
    monkeypatch.setattr(measure, "load_checkpoint", lambda path: checkpoint)

    def call(*arguments, plain=None, bijax=None):
        def open_models(checkpoint, *, dtype, max_new_tokens):
            return tuple(FakeModel(max_new_tokens, *([] if f is None else [f])) for f in (plain, bijax))

        def open_quantized_models(checkpoint, tokenizer, prompt, *, dtype, max_new_tokens):
            quality = Quality(np.array([65]), 10.5, 7), Quality(np.array([66]), 11.25, 7)
            return open_models(checkpoint, dtype=dtype, max_new_tokens=max_new_tokens), quality

        monkeypatch.setattr(measure, "open_models", open_models)
        monkeypatch.setattr(measure, "open_quantized_models", open_quantized_models)
        code = cli.main(["demo", *arguments])
        written = tmp_path / "figures.json"
        return code, capsys.readouterr(), json.loads(written.read_text()) if written.exists() else None

    return call


def test_the_dtype_of_the_checkpoint(demo):
    code, printed, found = demo("--quick", "--dtype", "auto", "--json", "figures.json")
    assert code == 0
    assert "greedy, float16;" in printed.out
    assert found["arguments"]["dtype"] == "float16"


def test_texts_without_a_chat_template(demo, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "has_chat_template", False)
    code, printed, _ = demo("--quick")
    assert code == 2
    assert "has no chat template, as base models have none; run with --text" in printed.err
    code, printed, found = demo("--quick", "--text", "--json", "figures.json")
    assert code == 0
    assert "2 texts, up to 20 tokens each" in printed.out
    assert found["arguments"]["text"]
    assert [prompt["tokens"] for prompt in found["prompts"]] == [len(text.encode()) for text in BUILT_IN[:2]]


PAGED = "batches of 8, chunks of 7, paged"


def move(way, batch_size, place, text):
    return text if batch_size == 1 else Text(text.tokens, shift(text.logprobs, 3))


def part(way, batch_size, place, text):
    return text if way.name != PAGED else Text(text.tokens + 1, text.logprobs)


def test_no_difference_on_bijax_is_success(demo, tmp_path):
    code, printed, _ = demo("--tokens", "6", plain=move)
    assert code == 0
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert re.fullmatch(r"bijax: all \d+ texts stay the same; 0 of \d+ log-probabilities differ in any bit.", lines[-1])
    assert re.fullmatch(r"plain JAX: 0 of \d+ texts change; [1-9]\d* of \d+ log-prob.* in any bit.", lines[-2])
    assert "Picture: bijax-demo.png" in lines
    assert (tmp_path / "bijax-demo.png").read_bytes().startswith(b"\x89PNG")
    assert "\x1b" not in printed.out
    assert "\r" not in printed.out


@pytest.mark.parametrize("disturb", [move, part])
def test_a_difference_on_bijax_is_failure(demo, disturb):
    assert demo("--tokens", "6", bijax=disturb)[0] == 1


def test_plain_jax_without_differences_is_reported_so(demo):
    code, printed, _ = demo("--quick")
    assert code == 0
    assert printed.out.splitlines()[-2].startswith("plain JAX: all ")
    assert "prompt: " not in printed.out  # no text to show side by side


def test_a_text_that_differs_is_shown(demo):
    code, printed, found = demo("--prompts", "1", "--tokens", "6", "--json", "figures.json", plain=part)
    assert code == 0
    assert f"prompt: {BUILT_IN[0]}" in printed.out
    assert f"in {PAGED}" in printed.out
    plain = found["sides"][0]
    assert plain["total"]["texts_differing"] == 8  # one prompt fills the batch of 8
    (example,) = found["examples"]
    assert (example["prompt"], example["way"]) == (BUILT_IN[0], PAGED)
    plain, bijax = example["pairs"]
    assert (plain["parts_at"], bijax["parts_at"]) == (1, None)
    assert plain["alone"]["before"] == "" != plain["alone"]["token"]
    assert plain["alone"]["token"] != plain["batch"]["token"]
    assert bijax["alone"] == bijax["batch"]
    # The first differing token is marked where there are no colours.
    assert f"▶{plain['alone']['token']}" in printed.out
    assert f"▶{plain['batch']['token']}" in printed.out


def test_json_holds_the_same_figures(demo):
    _, printed, found = demo("--tokens", "6", "--seed", "5", "--json", "figures.json", plain=move)
    assert found["arguments"] == {"prompts": 8, "tokens": 6, "seed": 5, "quick": False} | {
        "dtype": "bfloat16",
        "quantize": None,
        "text": False,
    }
    assert found["model"] == "fake.gguf"
    assert {"device", "jax", "date"} <= found.keys()
    assert [prompt["text"] for prompt in found["prompts"]] == list(BUILT_IN)
    plain, bijax = found["sides"]
    assert not plain["identical"]
    assert bijax["identical"]
    for side in (plain, bijax):
        for key in ("tokens", "tokens_differing", "tokens_parted", "texts"):
            assert side["total"][key] == sum(way[key] for way in side["ways"])
    by_name = {way["way"]: way for way in plain["ways"]}
    assert by_name["batches of 4"]["tokens_differing"] == by_name["batches of 4"]["tokens"] > 0
    total = plain["total"]
    assert max(way["largest_difference"] for way in plain["ways"]) == total["largest_difference"] > 0
    assert bijax["total"]["largest_difference"] == 0
    closing = f" {total['tokens_differing']} of {total['tokens']} log-probabilities differ in any bit."
    assert printed.out.splitlines()[-2].endswith(closing)


def test_a_quantised_model_stands_beside_the_float_one(demo):
    code, printed, found = demo("--quick", "--quantize", "int8", "--json", "figures.json")
    assert code == 0
    assert "perplexity of a passage of 7 tokens: bfloat16 10.500, int8 11.250" in printed.out
    assert found["arguments"]["quantize"] == "int8"
    assert [quality["text"] for quality in found["quality"]] == ["65", "66"]
    assert demo("--quick", "--json", "figures.json")[2]["quality"] is None


def test_quick_gives_way_to_numbers(demo):
    _, _, found = demo("--quick", "--tokens", "4", "--json", "figures.json")
    assert (found["arguments"]["prompts"], found["arguments"]["tokens"]) == (2, 4)
    assert [way["way"] for way in found["sides"][0]["ways"]] == ["batches of 4", "batches of 4, chunks of 7, paged"]


def test_prompts_from_a_file(demo, tmp_path):
    (tmp_path / "prompts.txt").write_text("Grüße\n\n  zwei \r\n", encoding="utf-8")
    _, _, found = demo("--prompts", "prompts.txt", "--tokens", "4", "--json", "figures.json")
    assert [prompt["text"] for prompt in found["prompts"]] == ["Grüße", "zwei"]


@pytest.mark.parametrize(
    "arguments", [["--tokens", "0"], ["--tokens", "x"], ["--dtype", "int8"], ["--seed", "-1"], ["--nonsense"], ["more"]]
)
def test_bad_arguments_show_the_usage(demo, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo(*arguments)
    assert stopped.value.code == 2
    assert "usage: bijax" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "0"], "from 1 to 8"),
        (["--prompts", "9"], "got 9"),
        (["--prompts", "nowhere.txt"], "'nowhere.txt'"),
        (["--prompts", "empty.txt"], "empty.txt holds no prompt"),
        (["--prompts", "binary.txt"], "UTF-8"),
        (["--prompts", "refused.txt"], "prompt 1 ('refused'): no token for this"),
        (["--tokens", "1000"], "the longest sequence of this model"),
        (["--picture", "nowhere/picture.png"], "--picture must be a file in an existing folder"),
        (["--json", "."], "--json must be a file in an existing folder"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(demo, tmp_path, arguments, message):
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "refused.txt").write_text("refused")
    code, printed, _ = demo(*arguments)
    assert code == 2
    assert printed.err.startswith("bijax demo: error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "bijax-demo.png").exists()


@pytest.mark.parametrize("error", [CheckpointError("damaged"), FileNotFoundError("no such model")])
def test_a_model_that_cannot_be_read(demo, monkeypatch, error):
    def load_checkpoint(path):
        raise error

    monkeypatch.setattr(measure, "load_checkpoint", load_checkpoint)
    code, printed, _ = demo("--model", "some.gguf")
    assert code == 2
    assert printed.err == f"bijax demo: error: {error}\n"


@pytest.mark.parametrize("error", [CheckpointError("damaged"), UnsupportedError("no such backend")])
def test_a_model_that_cannot_be_computed(demo, error):
    def fail(way, batch_size, place, text):
        raise error

    code, printed, _ = demo("--quick", bijax=fail)
    assert code == 2
    assert printed.err == f"bijax demo: error: {error}\n"


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_numbers_that_are_not_finite_prove_nothing(demo, value):
    def break_all(way, batch_size, place, text):
        return Text(text.tokens, np.full_like(text.logprobs, value))

    code, printed, _ = demo("--quick", bijax=break_all)
    assert code == 2
    assert "bijax, alone, prompt 1: every log-probability must be finite" in printed.err


def test_an_interruption_ends_quietly(demo):
    def interrupt(way, batch_size, place, text):
        raise KeyboardInterrupt

    code, printed, _ = demo("--quick", plain=interrupt)
    assert code == 130
    assert printed.err == "bijax demo: interrupted\n"


def test_missing_packages_are_named(demo, monkeypatch):
    find_spec = cli.importlib.util.find_spec
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == "rich" else find_spec(name))
    code, printed, _ = demo("--quick")
    assert code == 2
    assert "not installed: rich" in printed.err
    assert "`pip install rich`" in printed.err


def test_version_and_help(capsys):
    for argument, expected in (("--version", "bijax "), ("--help", "demo")):
        with pytest.raises(SystemExit) as stopped:
            cli.main([argument])
        assert stopped.value.code == 0
        assert expected in capsys.readouterr().out


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "bijax", "demo", "--prompts", "99"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("bijax demo: error: --prompts")


def test_importing_bijax_imports_nothing_of_the_extras():
    extras = ("rich", "matplotlib", "flax", "gguf", "tokenizers", "safetensors", "bijax.demo", "bijax.cli")
    code = f"import sys, bijax, bijax.testing; print([name for name in {extras} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_command_line_alone_imports_nothing_of_the_extras():
    code = f"import sys, bijax.cli; print([name for name in {cli.DEMO_PACKAGES} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

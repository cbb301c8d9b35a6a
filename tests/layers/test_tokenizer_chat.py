"""Chat templates: what they see, how they render, what they refuse."""

import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest

from flax_layers.checkpoint import CheckpointError, load_checkpoint
from flax_layers.checkpoint.chat_template import ChatTemplate
from tests.layers import checkpoint_files as files

HI = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(HI if messages is None else messages)


def test_blocks_take_their_line_with_them() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend"
    assert render(source) == "Hi\nend"


def test_what_a_template_sees() -> None:
    assert (
        render("{{ bos_token }}|{{ messages[0].role }}|{{ eos_token }}|{{ pad_token }}", bos_token="<s>")
        == "<s>|user||"
    )
    assert ChatTemplate("{{ add_generation_prompt }}", {}).render(HI, add_generation_prompt=True) == "True"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "<b>&'\""}]) == "<b>&'\""


def test_functions_filters_and_loops() -> None:
    assert render("{{ {'b': 'é<&', 'a': 1} | tojson }}") == '{"b": "é<&", "a": 1}'
    assert render("{{ {'b': 1} | tojson(indent=2) }}") == '{\n  "b": 1\n}'
    jumps = "{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}"
    assert render("{% for i in range(9) %}" + jumps + "{{ i }}{% endfor %}") == "02"
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.datetime.now().year + step) for step in (-1, 0)}


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('no such role') }}",
        "{{ 'a' + 1 }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_refused_by_the_template_or_the_sandbox(source: str) -> None:
    with pytest.raises(ValueError, match=r"cannot render these 1 messages with the roles \['user'\]: "):
        render(source)


def test_template_that_does_not_compile() -> None:
    with pytest.raises(CheckpointError, match="does not compile"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a list of one or more messages, got []"),
        ("Hi", "messages must be a list of one or more messages, got 'Hi'"),
        ({"role": "user", "content": "Hi"}, "messages must be a list"),
        (["Hi"], "messages[0] must be a mapping with a string under 'role', got 'Hi'"),
        ([*HI, {"content": "Hi"}], "messages[1] must be a mapping with a string under 'role'"),
        ([{"role": "user", "contents": "Hi"}], "messages[0] must have a string under 'content'"),
        ([{"role": "user", "content": None}], "messages[0] must have a string under 'content'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0] must have a string under 'content'"),
    ],
)
def test_bad_messages(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        render("{{ messages }}", messages)


def test_message_with_tool_calls_needs_no_content() -> None:
    assert render("{{ messages[0].tool_calls }}", [{"role": "assistant", "content": None, "tool_calls": 7}]) == "7"


def test_where_a_folder_keeps_its_template(tmp_path: Path) -> None:
    folder = files.write_folder(tmp_path)
    config = folder / "tokenizer_config.json"

    def template() -> str:
        return load_checkpoint(folder).tokenizer.apply_chat_template(HI)

    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "several {{ bos_token }}"}]
    config.write_text(json.dumps({"bos_token": {"content": "<s>"}, "chat_template": named}))
    assert template() == "several <s>"
    (folder / "chat_template.jinja").write_text("own file")
    assert template() == "own file"
    (folder / "chat_template.jinja").unlink()
    for broken, message in (
        ({"chat_template": named[:1]}, "must be named 'default', got ['rag']"),
        ({"chat_template": 3}, "chat_template must be a string, got 3"),
        ({"bos_token": {"text": "<s>"}}, "bos_token must be a string or an object with 'content'"),
    ):
        config.write_text(json.dumps(broken))
        with pytest.raises(CheckpointError, match=re.escape(message)):
            load_checkpoint(folder)
    for absent in (config.unlink, lambda: config.write_text("{}")):
        absent()
        with pytest.raises(ValueError, match="has no chat template"):
            template()

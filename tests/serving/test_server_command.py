"""The command `bijax serve`: options, errors, signals."""

import socket
from pathlib import Path

import pytest

from bijax import cli
from bijax.server import start
from bijax.server.errors import ServeError
from bijax.server.options import ServerOptions
from bijax.serving import EngineOptions, ModelOptions
from tests.layers import checkpoint_files

ROOT = Path(__file__).parents[2]


def test_an_argument_counts_before_the_environment_and_that_before_the_default():
    environ = {"BIJAX_PORT": "8000", "BIJAX_DRAIN_TIMEOUT": "2.5", "BIJAX_API_KEY": "key", "BIJAX_PREFIX_CACHE": "off"}
    options = ServerOptions.read(environ=environ, port=9000)
    assert (options.port, options.drain_timeout, options.api_key, options.host) == (9000, 2.5, "key", "127.0.0.1")
    assert not EngineOptions.read(environ=environ).prefix_cache
    assert EngineOptions.read(environ=environ, prefix_cache=True).prefix_cache
    assert ServerOptions().port == 30000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": -1}, "port must be from 0 to 65535, got -1"),
        ({"port": "80"}, "port must be an integer, got '80'"),
        ({"drain_timeout": float("nan")}, "drain_timeout must be from 0.0 to 86400.0, got nan"),
        ({"log_format": "xml"}, "log_format must be one of text, json, got 'xml'"),
        ({"api_key": " "}, "api_key must not be empty"),
        ({"max_prompts": 0}, "max_prompts must be at least 1, got 0"),
        ({"environ": {"BIJAX_PORT": "http"}}, "BIJAX_PORT must be an integer, got 'http'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ServerOptions.read(**{"environ": {}} | options)


def test_a_model_that_is_not_there(capsys, tmp_path):
    assert cli.main(["serve", "--model", str(tmp_path / "nothing.gguf")]) == 2
    assert "there is no checkpoint at" in capsys.readouterr().err
    (tmp_path / "broken.gguf").write_bytes(b"not a model")
    assert cli.main(["serve", "--model", str(tmp_path / "broken.gguf")]) == 2
    assert "broken.gguf" in capsys.readouterr().err


def test_wrong_arguments(capsys, monkeypatch):
    assert cli.main(["serve", "--page-size", "0"]) == 2
    assert "page_size must be at least 1, got 0" in capsys.readouterr().err
    monkeypatch.setenv("BIJAX_NUM_PAGES", "many")
    assert cli.main(["serve"]) == 2
    assert "BIJAX_NUM_PAGES must be an integer, got 'many'" in capsys.readouterr().err
    monkeypatch.delenv("BIJAX_NUM_PAGES")
    with pytest.raises(SystemExit):
        cli.main(["serve", "--port", "http"])


def test_a_port_that_is_taken(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert cli.main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1 port" in capsys.readouterr().err


def test_the_help_and_the_page_name_every_option(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text, page = capsys.readouterr().out, (ROOT / "docs" / "server.md").read_text()
    for options, documented in ((ServerOptions, page), (EngineOptions, "")):
        for name in options.__dataclass_fields__:
            assert f"--{name.replace('_', '-')}" in text
            if documented:
                assert f"| `--{name.replace('_', '-')}` | `BIJAX_{name.upper()}` |" in documented


def test_the_default_model_is_named_by_its_path(tmp_path, monkeypatch):
    """Clients give the path that the server tells back to it, for example to load the first weights again."""
    folder = checkpoint_files.write_folder(tmp_path / "model")
    seen = []

    def served(checkpoint, path, *more):
        seen.append(path)
        raise ServeError("enough")

    monkeypatch.setattr(start, "find_model", lambda name: folder)
    monkeypatch.setattr(start, "_served_model", served)
    with pytest.raises(ServeError, match="enough"):
        start.start(None, ServerOptions(), ModelOptions(), EngineOptions())
    assert seen == [str(folder)]

"""`bijax test-deterministic --url`: against running servers."""

import pytest

from bijax.cli import main
from bijax.determinism.modes import REMOTE_MODES
from tests.serving.engine_server import serve
from tests.serving.live import live


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[list[str]]]:
    """Returns the exit code and the rows of the table."""
    code = main(["test-deterministic", "--trials", "3", "--max-new-tokens", "5", *arguments])
    lines = capsys.readouterr().out.splitlines()
    return code, [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


@pytest.mark.tier("full")
def test_servers(capsys: pytest.CaptureFixture[str]) -> None:
    """One server in all modes; two that are built in other ways; two with other weights, which do not answer alike."""
    with serve(longest=200) as server, serve(longest=200, prefix_cache=False, dispatch_ahead=False) as other:
        code, rows = ask(capsys, "--mode", "all", "--url", server.url)
        assert code == 0
        assert {row[0] for row in rows} == set(REMOTE_MODES)
        assert all(row[3:] == ["1", "1"] for row in rows)
        stats = server.engine.stats()
        assert stats.prefix_hits > 0
        code, rows = ask(capsys, "--mode", "single", "--url", server.url, "--url", other.url)
        assert (code, rows) == (0, [["single", "prompt", "8", "1", "1"]])
        with serve(seed=1, longest=200) as third:
            code, rows = ask(capsys, "--mode", "single", "--url", server.url, "--url", third.url)
        assert (code, rows) == (1, [["single", "prompt", "8", "2", "2"]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "restart"], "with --url the modes are single, mixed, prefix, radix, chunk"),
        (["--plain"], "start it with --no-enable-deterministic-inference"),
        (["--page-size", "8"], "--page-size is an option of the server"),
        (["--model", "toy"], "--model is an option of the server"),
        ([], "could not reach http://127.0.0.1:1/get_server_info"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test-deterministic", "--url", "http://127.0.0.1:1", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_server_that_is_not_one_of_bijax(capsys: pytest.CaptureFixture[str]) -> None:
    with live(api_key="key") as server:
        assert main(["test-deterministic", "--url", server.url]) == 2
        assert "answers with status 401" in capsys.readouterr().err
        assert main(["test-deterministic", "--url", server.url, "--api-key", "key"]) == 2
        assert "is not a server of bijax" in capsys.readouterr().err

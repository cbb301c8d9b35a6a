"""`bijax serve` in two processes, with a device of a CPU each, that serve one model: bits, and lost processes."""

import signal
from pathlib import Path

import pytest

from bijax import cli
from flax_layers.checkpoint import load_checkpoint
from tests.layers import adapter_files
from tests.serving import mesh_engines
from tests.serving.processes_of_a_server import TIMEOUT_S, answer, serving


@pytest.mark.tier("full")
def test_two_processes_answer_as_one_and_end_when_one_is_lost(tmp_path: Path) -> None:
    model = mesh_engines.folder(tmp_path / "m")
    with serving(model) as (port, [alone]):
        expected = answer(port, alone)
    with serving(model, model) as (port, (leader, follower)):
        assert answer(port, leader) == expected
        follower.send_signal(signal.SIGTERM)  # left to process 0
        assert answer(port, leader) == expected
        follower.kill()
        _, log = leader.communicate(timeout=60)
        assert leader.returncode == 1
        assert "process 1 is lost: it ended; this process ends" in log
    with serving(model, model) as (port, (leader, follower)):
        assert answer(port, leader) == expected
        leader.send_signal(signal.SIGTERM)
        assert leader.wait(60) == 0
        assert follower.wait(60) == 0


@pytest.mark.tier("full")
def test_two_processes_with_an_adapter_answer_as_one(tmp_path: Path) -> None:
    model = mesh_engines.folder(tmp_path / "m")
    red = adapter_files.write(tmp_path / "red", load_checkpoint(model).config)
    found = []
    for models in ((model,), (model, model)):
        with serving(*models, flags=f"--lora-paths red={red}") as (port, (leader, *_)):
            found.append([answer(port, leader, lora_path=name) for name in ("red", None)])
    assert found[1] == found[0]
    assert found[0][0] != found[0][1]


@pytest.mark.tier("full")
def test_processes_with_other_weights_do_not_start(tmp_path: Path) -> None:
    models = [mesh_engines.folder(tmp_path / str(seed), seed) for seed in (0, 1)]
    with serving(*models) as (_, (leader, follower)):
        logs = [process.communicate(timeout=TIMEOUT_S)[1] for process in (leader, follower)]
        assert (leader.returncode, follower.returncode) == (1, 2)
        for log in logs:
            assert "got other weights in process 1 (sha256 " in log


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--node-rank 1", "node_rank must be less than nnodes, got 1 of 1 processes"),
        ("--nnodes 2 --node-rank 2 --dist-init-addr a:1", "must be less than nnodes, got 2 of 2 processes"),
        ("--nnodes 2", "must be HOST:PORT of process 0 with several processes, got None"),
        (
            "--nnodes 2 --dist-init-addr localhost",
            "must be HOST:PORT of process 0 with several processes, got 'loc",
        ),
        ("--nnodes 2 --dist-init-addr localhost:x", "got 'localhost:x'"),
        ("--dist-init-addr localhost:1", "must be left out with one process, got 'localhost:1'; set nnodes"),
        (
            "--nnodes 2 --dist-init-addr a:1 --speculative-algorithm mtp --speculative-tokens 2",
            "speculative_algorithm must be 'prompt_lookup' with several processes, got 'mtp'",
        ),
        (
            "--nnodes 2 --dist-init-addr a:1 --data-parallel-size 2",
            "data_parallel_size must be 1 with several",
        ),
    ],
)
def test_bad_flags(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", *flags.split()]) == 2
    assert message in capsys.readouterr().err

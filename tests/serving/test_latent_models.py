"""The engine with a model of latent attention: every mode of `bijax test-deterministic` has one answer."""

from pathlib import Path

import jax
import pytest

from bijax.cli import main
from bijax.determinism.command import MODES
from bijax.serving import ModelOptions
from bijax.serving.load import find_model, load_model
from flax_layers.checkpoint import load_checkpoint
from tests.layers.deepseek_files import V3, write_model

SMALL = "--max-running 2 --max-prefill-tokens 16 --num-pages 40 --page-size 4 --max-new-tokens 12 --trials 4".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), V3)


@pytest.mark.tier("full")
@pytest.mark.parametrize("mode", MODES)
def test_one_answer_each(folder: Path, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches, prefix cache, chunks, preemption, speculation, a restart; read from the folder as `bijax serve` does."""
    assert main(["test-deterministic", "--mode", mode, "--model", str(folder), *SMALL]) == 0
    assert "plain JAX" not in capsys.readouterr().out


@pytest.mark.tier("full")
def test_plain_operations_give_several(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The control."""
    assert main(["test-deterministic", "--mode", "single", "--plain", "--model", str(folder), *SMALL]) == 1
    assert "plain JAX" in capsys.readouterr().out


@pytest.mark.tier("full")
def test_weights_of_8_bits(folder: Path) -> None:
    assert (
        main(["test-deterministic", "--mode", "single", "--quantization", "int8", "--model", str(folder), *SMALL]) == 0
    )


def test_the_cache_has_one_array_for_each_layer(folder: Path) -> None:
    """Pages take as many bytes as the latents of their tokens."""
    served = load_model(load_checkpoint(find_model(folder), tokenizer=False), ModelOptions())
    pages = jax.eval_shape(lambda: served.init_pages(5, 4))
    assert [x.shape for x in jax.tree.leaves(pages)] == [(5, 4, 1, 24)] * 2
    assert served.least_common_prefix is None

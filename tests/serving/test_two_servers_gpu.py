"""`bijax serve` in two processes with a GPU each (`jax.distributed`, NCCL): the bits of one process."""

from pathlib import Path
from typing import Final

import jax
import numpy as np
import pytest

from flax_layers.checkpoint.hf_config import hf_config
from flax_layers.checkpoint.weights import expected_shapes
from tests.layers import checkpoint_files
from tests.serving.processes_of_a_server import answer, serving

DEVICES: Final = len(jax.devices())

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICES < 2, reason=f"needs two GPUs, got {DEVICES} device")]


def folder(path: Path) -> Path:
    """Writes a checkpoint with heads of 64 numbers."""
    fields = {
        **checkpoint_files.hf_fields(), "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 1,
        "hidden_size": 256, "intermediate_size": 512, "head_dim": 64,
    }  # fmt: skip
    checkpoint_files.write_folder(path, fields)
    rng, shapes = np.random.default_rng(0), expected_shapes(hf_config(path))
    drawn = {name: rng.standard_normal(shape) / shape[-1] ** 0.5 for name, shape in shapes}
    return checkpoint_files.write_folder(path, fields, {n: x.astype(np.float32) for n, x in drawn.items()})


def test_two_processes_answer_as_one(tmp_path: Path) -> None:
    model = folder(tmp_path / "m")
    flags = "--dtype bfloat16"
    with serving(model, flags=flags, gpus=[["0", "1"]]) as (port, [alone]):
        expected = answer(port, alone)
    with serving(model, model, flags=flags, gpus=[["0"], ["1"]]) as (port, (leader, follower)):
        assert answer(port, leader) == expected
        leader.terminate()
        assert (leader.wait(60), follower.wait(60)) == (0, 0)

"""Heads for multi-token prediction: folders in their layouts, numbers against float64, bits, and bad folders."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bijax.testing import assert_bits_equal
from flax_layers import INVARIANT, PLAIN, Llama, MTPHead
from flax_layers.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from flax_layers.checkpoint.mtp import checked_mtp_weights, mtp_shapes
from tests.layers import checkpoint_files as files
from tests.layers import mtp_files as mtp
from tests.layers import reference_mtp


@functools.cache
def stored(kind: str) -> tuple[dict[str, np.ndarray], Checkpoint]:
    """The weights of a folder, and its checkpoint, whose weights stay readable."""
    folder = Path(tempfile.mkdtemp())
    return mtp.weights_of(kind, folder), load_checkpoint(mtp.write_model(folder, kind))


@pytest.mark.parametrize("kind", mtp.KINDS)
def test_folders(kind: str) -> None:
    """All layouts come to the same names."""
    weights, checkpoint = stored(kind)
    found = checked_mtp_weights(checkpoint)
    assert found.shapes == dict(mtp_shapes(checkpoint.config))
    assert {name: weight.shape for name, weight in found.items()} == found.shapes
    assert not any(name.startswith("mtp") for name in checkpoint.weights)
    layer = "model.layers.2"
    names = {"mtp.fc": "eh_proj", "mtp.norm": "shared_head.norm", "mtp.pre_fc_norm_hidden": "hnorm"}
    for name, there in names.items():
        there = f"{layer}.{there}" if kind == "deepseek_v3" else name
        assert_bits_equal(found[f"{name}.weight"], weights[f"{there}.weight"])
    if kind == "qwen3_5_moe":
        stacked = weights["mtp.layers.0.mlp.experts.gate_up_proj"]
        assert_bits_equal(found["mtp.layers.0.mlp.experts.3.up_proj.weight"], stacked[3, 12:])


@pytest.mark.tier("full")
@pytest.mark.parametrize("kind", mtp.KINDS)
def test_numbers(kind: str) -> None:
    """Against the formula; with the two inputs exchanged it is another function."""
    weights, checkpoint = stored(kind)
    (row,) = np.random.default_rng(0).integers(0, files.VOCAB, (1, 70)).astype(np.int32)
    logits = reference_mtp.deepseek_logits if kind == "deepseek_v3" else reference_mtp.hybrid_logits
    expected = logits(weights, mtp.fields_of(kind), row.tolist())
    fc = next(name for name in weights if name in ("mtp.fc.weight", "model.layers.2.eh_proj.weight"))
    exchanged = {**weights, fc: np.roll(weights[fc], weights[fc].shape[0], axis=1)}
    other = logits(exchanged, mtp.fields_of(kind), row.tolist())
    for ops in (INVARIANT, PLAIN):
        model, head = Llama.from_checkpoint(checkpoint, ops=ops), MTPHead.from_checkpoint(checkpoint, ops=ops)
        found = np.asarray(jax.jit(MTPHead.__call__)(head, model, row[None]))[0]
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-5)
        assert np.abs(found - other).max() > 0.1


@pytest.mark.tier("full")
@pytest.mark.parametrize("kind", ["qwen3_next", "deepseek_v3"])
def test_rows_do_not_depend_on_the_batch(kind: str) -> None:
    """The first tokens of a sequence alone, and all of it in a batch; plain JAX differs."""
    _, checkpoint = stored(kind)
    rows = np.random.default_rng(1).integers(0, files.VOCAB, (5, 70)).astype(np.int32)
    run: Any = jax.jit(MTPHead.__call__)
    for ops, same in ((INVARIANT, True), (PLAIN, False)):
        model, head = Llama.from_checkpoint(checkpoint, ops=ops), MTPHead.from_checkpoint(checkpoint, ops=ops)
        alone, batch = (np.asarray(run(head, model, x)) for x in (rows[:1, :37], rows))
        if same:
            assert_bits_equal(batch[:1, :36], alone)
        else:
            assert (batch[:1, :36] != alone).any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mtp.norm.weight": None}, "weights of the MTP head are missing, the first of them mtp.norm.weight"),
        ({"mtp.fc.weight": (24, 24)}, r"mtp.fc.weight must have shape \(24, 48\) according to .* got \(24, 24\)"),
        ({"mtp.layers.1.mlp.down_proj.weight": (24, 40)}, "must have one layer .* got mtp.layers.1.mlp.down_proj"),
        ({"mtp.lm_head.weight": (290, 24)}, "must share lm_head.weight with the model, but its copy mtp.lm_head"),
    ],
)
def test_bad_heads(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    """The model itself loads all the same."""
    weights = {**stored("qwen3_5")[0]}
    for name, shape in changed.items():
        weights[name] = None if shape is None else np.zeros(shape, np.float32)
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    checkpoint = load_checkpoint(files.write_folder(tmp_path, mtp.fields_of("qwen3_5"), kept))
    with pytest.raises(CheckpointError, match=message):
        MTPHead.from_checkpoint(checkpoint)


def test_no_head(tmp_path: Path) -> None:
    kept = {name: weight for name, weight in stored("qwen3_5")[0].items() if not name.startswith("mtp")}
    checkpoint = load_checkpoint(files.write_folder(tmp_path, mtp.fields_of("qwen3_5"), kept))
    assert checkpoint.mtp is None
    with pytest.raises(CheckpointError, match=r"expected a checkpoint with an MTP head .* got one without; use"):
        MTPHead.from_checkpoint(checkpoint)


def test_bad_input() -> None:
    config = stored("qwen3_5")[1].config
    head = nnx.eval_shape(lambda: MTPHead(config, rngs=nnx.Rngs(0)))
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="tokens must have the shape"):
        head(model, jnp.zeros(3, jnp.int32))

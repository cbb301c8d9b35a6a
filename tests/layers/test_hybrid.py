"""Qwen3-Next and Qwen3.5: folders in their layouts, numbers against float64, and the same bits however it is run."""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bijax.testing import assert_bits_equal
from flax_layers import INVARIANT, PLAIN, KVCache, Llama, generate, score
from flax_layers.checkpoint import CheckpointError, load_checkpoint
from flax_layers.checkpoint.hf_config import hf_config
from flax_layers.checkpoint.weights import expected_shapes
from tests.layers import checkpoint_files as files
from tests.layers import hybrid_files as hybrid
from tests.layers import reference_hybrid
from tests.layers import small_llama as small


@functools.cache
def rows(*lengths: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.integers(0, files.VOCAB, length).astype(np.int32) for length in lengths)


@pytest.mark.parametrize("kind", hybrid.KINDS)
def test_folders(tmp_path: Path, kind: str) -> None:
    """Both layouts of products and experts come to the same names; the parts for images and the next token do not."""
    stored = hybrid.weights(kind)
    checkpoint = load_checkpoint(files.write_folder(tmp_path / "model", hybrid.fields(kind), stored, shards=2))
    assert checkpoint.dtype == "float32"
    config, found = checkpoint.config, checkpoint.weights
    assert [config.is_linear(layer) for layer in range(2)] == [True, False]
    assert (config.output_gate, config.norm_offset, config.rotary_dim) == (True, 1.0, 4)
    assert list(found) == [name for name, _ in expected_shapes(config)]
    assert {name: found[name].shape for name in found} == found.shapes
    assert not any(name.startswith(("mtp", "model.visual")) for name in found)
    qkv = found["model.layers.0.linear_attn.in_proj_qkv.weight"]
    if kind == "qwen3_next":
        fused = stored["model.layers.0.linear_attn.in_proj_qkvz.weight"].reshape(2, 32, hybrid.WIDTH)
        assert_bits_equal(qkv[:16], fused[:, :8].reshape(16, -1))
        assert_bits_equal(qkv[32:], fused[:, 16:24].reshape(16, -1))
        ba = stored["model.layers.0.linear_attn.in_proj_ba.weight"]
        assert_bits_equal(found["model.layers.0.linear_attn.in_proj_a.weight"], ba[[2, 3, 6, 7]])
    else:
        assert_bits_equal(qkv, stored["model.language_model.layers.0.linear_attn.in_proj_qkv.weight"])
    if kind == "qwen3_5_moe":
        stacked = stored["model.language_model.layers.1.mlp.experts.gate_up_proj"]
        assert_bits_equal(found["model.layers.1.mlp.experts.3.up_proj.weight"], stacked[3, 12:])


@pytest.mark.tier("full")
@pytest.mark.parametrize("kind", hybrid.KINDS)
def test_numbers(tmp_path: Path, kind: str) -> None:
    fields, stored = hybrid.fields(kind), hybrid.weights(kind)
    model = Llama.from_checkpoint(load_checkpoint(files.write_folder(tmp_path / "model", fields, stored)))
    (row,) = rows(70)
    logits = reference_hybrid.logits(stored, fields, row.tolist())
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = logprobs[np.arange(69), row[1:]]
    for ops in (INVARIANT, PLAIN):
        (found,) = score(nnx.with_attributes(model, ops=ops), [row])
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@functools.cache
def model(kind: str, dtype: str = "float32") -> Llama:
    with tempfile.TemporaryDirectory() as folder:
        files.write_folder(Path(folder), hybrid.fields(kind), hybrid.weights(kind))
        return Llama.from_checkpoint(load_checkpoint(folder), dtype=dtype, param_dtype=dtype)


def in_parts(model: Llama, row: np.ndarray, parts: list[int], make: small.Make) -> np.ndarray:
    """Returns the logits of a sequence from parts, each padded to a length of 8 or the whole."""
    cache, found, start = make(model, 1), [], 0
    for length in parts:
        tokens = np.zeros((1, length if length == 1 else 8 if length <= 8 else 72), np.int32)
        tokens[0, :length] = row[start : start + length]
        logits, cache = extend(model, tokens, cache, np.array([length], np.int32))
        found.append(np.asarray(logits)[0, :length])
        start += length
    return np.concatenate(found)


@jax.jit
def extend(model: Llama, tokens: Any, cache: KVCache, lengths: Any) -> tuple[jax.Array, KVCache]:
    return model.extend(tokens, cache, lengths=lengths)


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_bits(kind: str, dtype: str) -> None:
    """In training, as a prompt, in parts across an edge, token by token, in a batch, from pages; plain JAX differs."""
    row, others = rows(70, 9, 66)[0], rows(70, 9, 66)
    found = model(kind, dtype)
    expected = np.asarray(jax.jit(Llama.__call__)(found, row[None]))[0]
    assert_bits_equal(in_parts(found, row, [70], small.contiguous), expected)
    assert_bits_equal(in_parts(found, row, [5, 8, 44, 8, 1, 1, 3], small.paged), expected)
    assert_bits_equal(in_parts(found, row, [61, *[1] * 9], small.contiguous), expected)
    together, _ = extend(found, small.padded(others, 72), small.contiguous(found, 3), np.array([70, 9, 66], np.int32))
    assert_bits_equal(np.asarray(together)[0, :70], expected)
    alone = in_parts(found, others[2], [66], small.contiguous)
    assert_bits_equal(np.asarray(together)[2, :66], alone)
    plain = nnx.with_attributes(found, ops=PLAIN)
    whole = np.asarray(jax.jit(Llama.__call__)(plain, row[None]))[0]
    by_token = in_parts(plain, row, [61, *[1] * 9], small.contiguous)
    assert (whole != by_token).any()
    np.testing.assert_allclose(by_token, whole, rtol=0, atol=1e-3 if dtype == "float32" else 0.3)


@pytest.mark.tier("full")
def test_tokens_are_taken_back() -> None:
    """Drafts that were wrong, removed by a smaller length of the cache."""
    (row,), found = rows(70), model("qwen3_5")
    expected = in_parts(found, row, [70], small.contiguous)
    cache = small.contiguous(found, 1)
    _, cache = extend(found, np.pad(row[None, :50], ((0, 0), (0, 22))), cache, np.array([50], np.int32))
    drafts = np.where(np.arange(8) < 2, row[50:58], row[:8])[None].astype(np.int32)
    logits, cache = extend(found, drafts, cache, np.array([8], np.int32))
    assert_bits_equal(np.asarray(logits)[0, :2], expected[50:52])
    cache = dataclasses.replace(cache, lengths=cache.lengths - 6)
    logits, _ = extend(found, row[None, 52:60], cache, np.array([8], np.int32))
    assert_bits_equal(np.asarray(logits)[0], expected[52:60])


@pytest.mark.tier("full")
def test_generation() -> None:
    """Continuations do not depend on the batch, the cache and the chunks, and have the scores of `score`."""
    found, prompts = model("qwen3_next"), [row.tolist() for row in rows(63, 5)]
    together = generate(found, prompts, max_new_tokens=4)
    chunked = generate(found, prompts[:1], max_new_tokens=4, prefill_chunk=64, cache="paged", page_size=16)
    assert_bits_equal(chunked.logprobs[0], together.logprobs[0])
    for prompt, tokens, logprobs in zip(prompts, together.tokens, together.logprobs, strict=True):
        (scored,) = score(found, [[*prompt, *tokens.tolist()]])
        assert_bits_equal(scored[-4:], logprobs)


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval must be positive, got 0"),
        ("qwen3_next", {"full_attention_interval": 9}, "layers of it and of full attention"),
        ("qwen3_next", {"layer_types": ["linear_attention", "sliding"]}, "layer_types must list 'linear_attention' or"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "num_value_heads must be a multiple of num_key_heads"),
        ("qwen3_next", {"mlp_only_layers": [0]}, "every layer must have experts"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias must be False"),
        ("qwen3_next", {"partial_rotary_factor": 0.3}, "partial_rotary_factor must give a whole number"),
        ("qwen3_next", {"partial_rotary_factor": 0.125}, "rotary_dim must be even"),
        ("qwen3_next", {"quantization_config": {"bits": 8}}, "quantization_config must be None"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate must be true or absent, got False"),
        ("qwen3_5", {"partial_rotary_factor": 0.25}, "states partial_rotary_factor twice"),
        ("qwen3_5", {"tie_word_embeddings": True}, "tie_word_embeddings must be the same in text_config"),
        ("qwen3_5", {"model_type": "qwen3_vl_text"}, "text_config must be an object with the model type"),
    ],
)
def test_bad_configurations(tmp_path: Path, kind: str, changed: dict[str, Any], message: str) -> None:
    fields = hybrid.fields(kind)
    (fields if kind == "qwen3_next" else fields["text_config"]).update(changed)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=message):
        hf_config(tmp_path)


def test_bad_weights(tmp_path: Path) -> None:
    stored = hybrid.weights("qwen3_next")
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    folder = files.write_folder(tmp_path / "model", hybrid.fields("qwen3_next"), {**stored, name: stored[name][:-1]})
    with pytest.raises(CheckpointError, match="weights are missing for a model of 2 layers"):
        load_checkpoint(folder)
    both = {**stored, "model.layers.0.linear_attn.in_proj_z.weight": np.zeros((16, hybrid.WIDTH), np.float32)}
    huge = {**hybrid.fields("qwen3_next"), "linear_key_head_dim": 2**30}  # of which no array is made
    with pytest.raises(CheckpointError, match="must have shape"):
        load_checkpoint(files.write_folder(tmp_path / "model", huge, stored))
    with pytest.raises(CheckpointError, match="twice, in two layouts"):
        load_checkpoint(files.write_folder(tmp_path / "model", hybrid.fields("qwen3_next"), both))


def test_bad_input() -> None:
    found = model("qwen3_5")
    cache = dataclasses.replace(found.cache(batch=1, capacity=8), states=())
    with pytest.raises(ValueError, match="1 layers and 1 states for tokens of shape"):
        found.extend(jnp.zeros((1, 2), jnp.int32), cache)

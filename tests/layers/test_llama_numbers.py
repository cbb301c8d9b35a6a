"""The Llama model: its numbers, its parameters from a checkpoint, its dtypes, and what it refuses."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bijax.testing import assert_bits_equal
from flax_layers import INVARIANT, PLAIN, Llama, Ops, ServedLlama
from flax_layers.checkpoint import LlamaConfig, load_checkpoint
from tests.layers import checkpoint_files as files
from tests.layers import reference_llama
from tests.layers import small_llama as small
from tests.layers.short_sequences import log_probabilities
from tests.tiers import full_only


def parameters(model: Llama) -> dict:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@pytest.mark.tier("full")
@pytest.mark.parametrize("tied", [False, True])
def test_both_formats_give_the_same_parameters(tmp_path: Path, tied: bool) -> None:
    weights = files.random_weights(tied=tied)
    gguf = files.write_gguf(tmp_path / "model.gguf", tensors=files.gguf_tensors(weights))
    folder = files.write_folder(tmp_path / "folder", {**files.hf_fields(), "tie_word_embeddings": tied}, weights)
    one, other = (Llama.from_checkpoint(load_checkpoint(path)) for path in (gguf, folder))
    assert_bits_equal(parameters(one), parameters(other))
    assert (one.lm_head is None) == tied
    kernel = one.blocks[1].attention.qkv.kernel
    expected = np.concatenate([weights[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]).T
    assert_bits_equal(kernel[...], expected)
    # A loaded model is the same pytree as a new one, so that jitted functions serve both.
    fresh = Llama(one.config, rngs=nnx.Rngs(0))
    assert jax.tree.structure(fresh) == jax.tree.structure(one)
    assert_bits_equal(fresh.rotary.cos[...], one.rotary.cos[...])


@pytest.mark.parametrize("ops", [INVARIANT, full_only(PLAIN)], ids=["invariant", "plain"])
def test_log_probabilities_against_float64(ops: Ops) -> None:
    for row in small.sequences():
        (actual,) = small.in_full(small.model(ops), (row,))
        logits = reference_llama.logits(small.weights(), small.CONFIG, row.tolist())
        np.testing.assert_allclose(actual, log_probabilities(logits, row), rtol=0, atol=1e-5)


@pytest.mark.tier("full")
def test_untied_output_projection() -> None:
    config = dataclasses.replace(small.SHALLOW, tie_word_embeddings=False)
    row = small.sequences()[1]
    expected = reference_llama.logits(small.weights(config), config, row.tolist())
    logits = small.model(PLAIN, config)(jnp.asarray(row[None]))[0]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)


@pytest.mark.tier("full")
@pytest.mark.parametrize(("dtype", "bound"), [(jnp.bfloat16, 0.15), (jnp.float16, 0.02)])
@pytest.mark.parametrize("numbers", [False, True], ids=["dtypes", "numbers"])
def test_narrow_dtypes(numbers: bool, dtype: jnp.dtype, bound: float) -> None:
    """Log-probabilities are float32 whatever is inside, and near those of a float32 model."""
    model, tokens, lengths = small.model(config=small.SHALLOW, dtype=dtype), chunk(), np.full(4, 7, np.int32)
    arrays = (model, tokens, tokens, lengths, small.contiguous(model, 4))
    scores, cache = small.step(*arrays) if numbers else nnx.eval_shape(small.step, *arrays)
    assert scores.dtype == jnp.float32
    assert cache.keys[0].dtype == dtype
    parameter = Llama(small.SHALLOW, param_dtype=dtype, rngs=nnx.Rngs(0)).blocks[0].mlp.down.kernel
    assert parameter.dtype == dtype
    if not numbers:
        return
    plain = small.model(PLAIN, small.SHALLOW)
    assert float(jnp.abs(scores - small.full(plain, tokens, tokens)).max()) < bound


@pytest.mark.tier("full")
def test_x64() -> None:
    """64-bit mode changes neither a bit nor the dtypes of a cache, which may be the carry of a scan."""
    model, tokens, lengths = small.model(), chunk(), np.full(4, 7, np.int32)
    expected, _ = small.step(model, tokens, tokens, lengths, small.contiguous(model, 4))
    with jax.enable_x64(True):
        cache = small.contiguous(model, 4)
        scores, extended = small.step(model, tokens.astype(np.int64), tokens, lengths.astype(np.int64), cache)
        assert_bits_equal(scores, expected)
        assert jax.tree.map(lambda a: a.dtype, extended) == jax.tree.map(lambda a: a.dtype, cache)


def chunk() -> np.ndarray:
    return np.random.default_rng(2).integers(0, small.CONFIG.vocab_size, (4, 7)).astype(np.int32)


def test_taking_tokens_back() -> None:
    model, tokens, all_seven = small.model(config=small.SHALLOW), chunk(), np.full(4, 7, np.int32)
    scores, cache = small.step(model, tokens, tokens, all_seven, small.contiguous(model, 4))
    back = dataclasses.replace(cache, lengths=jnp.full(4, 4, jnp.int32))
    rest = np.roll(tokens, -4, axis=1)
    again, cache = small.step(model, rest, rest, all_seven - 4, back)
    assert_bits_equal(again[:, :3], scores[:, 4:])
    assert cache.lengths.tolist() == [7] * 4


def test_what_a_model_is_not_made_of() -> None:
    config = LlamaConfig.tiny()
    for options, message in (
        ({"dtype": "int8"}, "dtype must be float32, bfloat16 or float16, got int8; quantise a model with"),
        ({"dtype": jnp.float8_e4m3fn}, "dtype must be float32, bfloat16 or float16, got float8_e4m3fn"),
        ({"param_dtype": jnp.int32}, "param_dtype must be float32, bfloat16 or float16, got int32"),
        ({"ops": "plain"}, "ops must be flax_layers.INVARIANT or flax_layers.PLAIN, got 'plain'"),
    ):
        with pytest.raises(TypeError, match=message):
            Llama(config, rngs=nnx.Rngs(0), **options)
    with pytest.raises(TypeError, match=r"ServedLlama: model must be a flax_layers\.Llama, got int"):
        ServedLlama(3)  # type: ignore[arg-type]


def test_what_has_no_room_is_nan_under_jit() -> None:
    """Inside jit nothing can be raised; the log-probabilities of the tokens concerned say it, and no others."""
    model, tokens, all_seven = small.model(config=small.SHALLOW), chunk(), np.full(4, 7, np.int32)
    expected, _ = small.step(model, tokens, tokens, all_seven, small.contiguous(model, 4))
    assert not np.isnan(expected).any()
    held = dataclasses.replace(small.contiguous(model, 4), lengths=jnp.array([0, 188, 0, 0], jnp.int32))
    found, _ = small.step(model, tokens, tokens, np.array([7, 7, 8, 7], np.int32), held)
    lost = np.isnan(found)
    assert lost.tolist() == [[False] * 7, [False] * 4 + [True] * 3, [True] * 7, [False] * 7]
    assert_bits_equal(found[::3], expected[::3])
    strange, _ = small.step(model, np.where(tokens == tokens[0, 3], 320, tokens), tokens, all_seven, held)
    assert np.isnan(strange[0]).tolist() == [False] * 3 + [True] * 4


def test_errors() -> None:
    model = small.model()
    tokens = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"tokens must have the shape \(batch, length\), got \(3,\)"):
        model(jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeError, match="integers, got float32"):
        model(jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"from 0 to 319, got 320 at index \(1, 2\)"):
        model(tokens.at[1, 2].set(320))
    with pytest.raises(ValueError, match=r"at most 256 tokens .* got tokens of shape \(1, 257\)"):
        model(jnp.zeros((1, 257), jnp.int32))
    cache = model.cache(batch=2, capacity=4)
    with pytest.raises(ValueError, match=r"2 sequences and 2 layers .* got 3 sequences and 2 layers"):
        model.extend(tokens, model.cache(batch=3, capacity=4))
    with pytest.raises(ValueError, match=r"lengths must have the shape \(2,\), one for each sequence, got \(\)"):
        model.extend(tokens, cache, lengths=jnp.array(2))
    with pytest.raises(TypeError, match="lengths must be integers, got float32"):
        model.extend(tokens, cache, lengths=jnp.ones(2))
    with pytest.raises(ValueError, match=r"from 0 to 3, the number of tokens given, got \[1, 4\]"):
        model.extend(tokens, cache, lengths=jnp.array([1, 4]))
    cache = dataclasses.replace(cache, lengths=jnp.array([1, 2], jnp.int32))
    with pytest.raises(ValueError, match=r"holds 4 tokens .* sequence 1 would have 5 \(2 and 3 new ones\)"):
        model.extend(tokens, cache)
    with pytest.raises(ValueError, match="pages from 0 to 3"):
        model.paged_cache([[0, 4]], num_pages=4, page_size=8)

"""The Llama model: its numbers, its parameters from a checkpoint, its dtypes, and what it refuses."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bijax.testing import assert_bits_equal
from flax_layers import INVARIANT, PLAIN, Llama, Ops
from flax_layers.checkpoint import load_checkpoint
from tests.layers import checkpoint_files as files
from tests.layers import reference_llama
from tests.layers import small_llama as small


def parameters(model: Llama) -> dict:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


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


@pytest.mark.parametrize("ops", [INVARIANT, PLAIN])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_against_float64(tmp_path: Path, ops: Ops, tied: bool) -> None:
    weights = files.random_weights(tied=tied)
    folder = files.write_folder(tmp_path / "folder", {**files.hf_fields(), "tie_word_embeddings": tied}, weights)
    checkpoint = load_checkpoint(folder)
    ids = np.random.default_rng(0).integers(0, files.VOCAB, 40)
    expected = reference_llama.logits(weights, checkpoint.config, ids.tolist())
    actual = np.asarray(Llama.from_checkpoint(checkpoint, ops=ops)(jnp.asarray(ids[None])))[0]
    assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.bfloat16, 0.15), (jnp.float16, 0.02)])
def test_narrow_dtypes(dtype: jnp.dtype, bound: float) -> None:
    """Logits are float32 whatever is inside, and near those of a float32 model with the same parameters."""
    config = small.shallow_model().config
    model = Llama(config, dtype=dtype, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(small.sequences()[1][None])
    logits, cache = model.extend(tokens, model.cache(batch=1, capacity=64))
    assert logits.dtype == jnp.float32
    assert cache.keys[0].dtype == dtype
    plain = nnx.with_attributes(small.shallow_model(), ops=PLAIN)
    assert float(jnp.abs(logits - plain(tokens)).max()) < bound
    assert_bits_equal(model(tokens), logits)
    parameter = Llama(config, param_dtype=dtype, rngs=nnx.Rngs(0)).blocks[0].mlp.down.kernel
    assert parameter.dtype == dtype


def test_x64() -> None:
    """64-bit mode changes neither a bit nor the dtypes of a cache, which may be the carry of a scan."""
    model, tokens = small.shallow_model(), np.asarray(small.sequences()[1][None, :9])
    expected, _ = model.extend(jnp.asarray(tokens), model.cache(batch=1, capacity=16))
    with jax.enable_x64(True):
        cache = model.cache(batch=1, capacity=16)
        logits, extended = model.extend(jnp.asarray(tokens, jnp.int64), cache, lengths=jnp.array([9]))
        assert_bits_equal(logits, expected)
        assert jax.tree.map(lambda a: a.dtype, extended) == jax.tree.map(lambda a: a.dtype, cache)
        assert_bits_equal(model(jnp.asarray(tokens)), expected)


def test_taking_tokens_back() -> None:
    model, tokens = small.model(), jnp.asarray(small.sequences()[0][None, :9])
    logits, cache = model.extend(tokens, model.cache(batch=1, capacity=16))
    again, cache = model.extend(tokens[:, 4:], dataclasses.replace(cache, lengths=jnp.array([4], jnp.int32)))
    assert_bits_equal(again, logits[:, 4:])
    assert cache.lengths.tolist() == [9]


def test_what_has_no_room_is_nan_under_jit() -> None:
    """Inside jit nothing can be raised; the logits of the tokens concerned say it, and no other sequence does."""
    model = small.model()
    tokens = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.int32)
    extend = jax.jit(Llama.extend)
    logits, _ = extend(model, tokens, model.cache(batch=2, capacity=4), lengths=jnp.array([4, 4]))
    assert not np.isnan(logits).any()
    short = dataclasses.replace(model.cache(batch=2, capacity=4), lengths=jnp.array([0, 2], jnp.int32))
    found, _ = extend(model, tokens, short, lengths=jnp.array([4, 4]))
    assert np.isnan(found).all(axis=-1).tolist() == [[False] * 4, [False, False, True, True]]
    assert_bits_equal(found[0], logits[0])
    found, _ = extend(model, tokens, model.cache(batch=2, capacity=4), lengths=jnp.array([4, 5]))
    assert np.isnan(found).all(axis=-1).tolist() == [[False] * 4, [True] * 4]


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
    _, cache = model.extend(tokens, cache, lengths=jnp.array([1, 2]))
    with pytest.raises(ValueError, match=r"holds 4 tokens .* sequence 1 would have 5 \(2 and 3 new ones\)"):
        model.extend(tokens, cache)
    with pytest.raises(ValueError, match="pages from 0 to 3"):
        model.paged_cache([[0, 4]], num_pages=4, page_size=8)

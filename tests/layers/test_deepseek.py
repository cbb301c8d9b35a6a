"""DeepSeek-V2, DeepSeek-V3 and Kimi-K2 from Hugging Face folders: float64, and the bits of every way of computing."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bijax.serving import Engine, EngineOptions, SamplingParams
from bijax.testing import assert_bits_equal
from flax_layers import PLAIN, Llama, ServedLlama, generate
from flax_layers.checkpoint import CheckpointError, LatentConfig, load_checkpoint
from flax_layers.checkpoint.hf_config import hf_config
from flax_layers.models.layers import Attention, KVCache, LatentAttention, LayerCache, MoE, RotaryEmbedding
from tests.arrays import on_device
from tests.layers import checkpoint_files as files
from tests.layers import reference_deepseek
from tests.layers import small_llama as small
from tests.layers.deepseek_files import CASES, V2, V3, YARN, write_model
from tests.layers.short_sequences import LENGTHS, log_probabilities, sequences


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the folder of a case, written at its first use."""

    @functools.cache
    def folder(case: str) -> Path:
        return write_model(tmp_path_factory.mktemp("model"), CASES[case])

    return folder


def expected(case: str, folder: Path, row: np.ndarray, **changed: Any) -> np.ndarray:
    """The log-probabilities of the tokens after the first."""
    fields = {**CASES[case], **changed}
    logits = reference_deepseek.logits(load_checkpoint(folder).weights, fields, row.tolist())
    return log_probabilities(logits, row)


@pytest.mark.tier("full", fast=("V3",))
@pytest.mark.parametrize("case", CASES)
def test_logits_against_float64(folders: Any, case: str) -> None:
    """Absorbed, the model is what it is with expanded keys and values; without what a field says it is not."""
    model = Llama.from_checkpoint(load_checkpoint(folders(case)), ops=PLAIN)
    assert [type(block.mlp).__name__ for block in model.blocks] == ["MLP", "MoE"]
    row = sequences()[0]
    (found,) = small.in_full(model, (row,), LENGTHS[0])
    np.testing.assert_allclose(found, expected(case, folders(case), row), rtol=0, atol=2e-5)
    interleaved = CASES[case].get("rope_interleave", True)
    for changed in (
        {"rope_scaling": YARN if CASES[case]["rope_scaling"] is None else None},
        {"routed_scaling_factor": 1.0},
        {"rope_interleave": not interleaved},
    ):
        assert np.abs(found - expected(case, folders(case), row, **changed)).max() > 1e-3


@pytest.mark.tier("full")
@pytest.mark.parametrize("case", ["V2-Lite", "V3"])
def test_bits_of_all_ways(folders: Any, case: str) -> None:
    """Log-probabilities in whole programs and in chunks, by `generate` and by the engine; the control differs."""
    model = Llama.from_checkpoint(load_checkpoint(folders(case)))
    rows = sequences()
    alone = [small.in_full(model, (row,), 24)[0] for row in rows]
    assert_bits_equal(small.in_full(model, rows[::-1], 24), alone[::-1])
    assert_bits_equal(small.in_chunks(model, rows, 8, small.paged), alone)
    assert_bits_equal(small.in_chunks(model, rows, 1), alone)
    np.testing.assert_allclose(alone[0], expected(case, folders(case), rows[0]), rtol=0, atol=2e-5)
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
    plain = Llama.from_checkpoint(load_checkpoint(folders(case)), ops=PLAIN)
    whole = np.concatenate(small.in_full(plain, rows, 24))
    assert (whole.view(np.uint32) != np.concatenate(small.in_chunks(plain, rows, 1)).view(np.uint32)).any()


@functools.cache
def layer(dtype: str = "float32") -> LatentAttention:
    sizes = {"rank": 16, "nope_head_dim": 8, "rope_head_dim": 8, "value_head_dim": 12}
    return LatentAttention(24, num_heads=4, **sizes, param_dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_token_by_token(dtype: str) -> None:
    """Tokens from pages, in a batch at other positions, have the bits of the whole sequence."""
    attention, rotary = layer(dtype), RotaryEmbedding(8, 64)
    x = on_device(np.random.default_rng(0).standard_normal((2, 12, 24)), dtype)

    @jax.jit
    def whole(x: jax.Array) -> jax.Array:
        return attention(x, rotary(jnp.broadcast_to(jnp.arange(12), (2, 12))))

    @jax.jit
    def step(x: jax.Array, keys: jax.Array, start: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        cache = LayerCache(keys, None, jnp.array([[3, 0, 2], [1, 4, 5]]))
        y, cache = attention.extend(x, rotary(start[:, None]), cache, start=start, lengths=lengths)
        return y[:, 0], cache.keys

    expected, keys = whole(x), jnp.full((6, 4, 1, 24), jnp.nan, dtype)
    for moment in range(15):
        at = np.array([moment, moment - 3])
        lengths = ((at >= 0) & (at < 12)).astype(np.int32)
        at = np.clip(at, 0, 11)
        y, keys = step(x[np.arange(2), at][:, None], keys, at, lengths)
        for row in np.flatnonzero(lengths):
            assert_bits_equal(y[row], expected[row, at[row]], err_msg=f"{row=} {at=}")


@pytest.mark.tier("full")
def test_gradients_do_not_depend_on_the_batch() -> None:
    attention, rotary = layer(), RotaryEmbedding(8, 64)
    x = on_device(np.random.default_rng(1).standard_normal((3, 10, 24)), jnp.float32)

    @jax.jit
    def gradient(x: jax.Array) -> jax.Array:
        angles = rotary(jnp.broadcast_to(jnp.arange(10), x.shape[:2]))
        return jax.grad(lambda x: (attention(x, angles) ** 2).sum())(x)

    assert_bits_equal(jnp.concatenate([gradient(x[i : i + 1]) for i in range(3)]), gradient(x))
    assert bool(jnp.isfinite(gradient(x)).all())


@functools.cache
def abstract_layer() -> LatentAttention:
    """A layer without numbers, for what is checked before anything is computed."""
    sizes = {"rank": 16, "nope_head_dim": 8, "rope_head_dim": 8, "value_head_dim": 12}
    layer: LatentAttention = nnx.eval_shape(lambda: LatentAttention(24, num_heads=4, **sizes, rngs=nnx.Rngs(0)))
    return layer


def test_caches_of_latents_and_of_keys_and_values() -> None:
    config = LatentConfig(rank=16, nope_head_dim=8, rope_head_dim=8, value_head_dim=12)
    cache = KVCache.contiguous(
        batch=1, capacity=8, num_layers=2, num_kv_heads=1, head_dim=config.width, has_values=False
    )
    assert [x.shape for x in jax.tree.leaves(cache)] == [(1, 8, 1, 24), (1, 8, 1, 24), (1,)]
    latents, rotary = jnp.zeros((1, 2, 1, 24)), (jnp.zeros((1, 2, 4)), jnp.zeros((1, 2, 4)))
    place: dict[str, Any] = {"start": jnp.array([0]), "lengths": jnp.array([2])}
    with pytest.raises(ValueError, match="one of latents without values; got values for one that has none"):
        cache.layer(0).write(latents, latents, **place)
    with_values = LayerCache(latents, latents)
    with pytest.raises(ValueError, match="got no values for a cache that has them"):
        with_values.write(latents, None, **place)
    with pytest.raises(ValueError, match="must hold latents and no values"):
        abstract_layer().extend(jnp.zeros((1, 2, 24)), rotary, with_values, **place)
    other = nnx.eval_shape(lambda: Attention(24, num_heads=2, num_kv_heads=1, head_dim=16, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="must hold keys and values, got one of latents"):
        other.extend(jnp.zeros((1, 2, 24)), rotary, cache.layer(0), **place)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank must be an integer, got None"),
        ({"qk_rope_head_dim": 7}, "the rotated one even, got .*rope_head_dim=7"),
        ({"v_head_dim": 0}, "must be positive"),
        ({"q_lora_rank": 0}, "must be positive"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
        ({"first_k_dense_replace": 3}, "first_k_dense_replace must be from 0 to 2 layers, got 3"),
        ({"rope_interleave": "yes"}, "rope_interleave must be true or false, got 'yes'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be None or absent"),
        ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
        ({"rope_scaling": {**YARN, "mscale_all_dim": "1"}}, "mscale_all_dim"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"num_nextn_predict_layers": -1}, "draft_layers must be an integer of at least 0, got -1"),
    ],
)
def test_wrong_configurations(tmp_path: Path, changed: dict[str, Any], match: str) -> None:
    path = files.write_folder(tmp_path, {**V3, **changed}, {"x": np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError, match=match):
        hf_config(path)


def test_what_a_configuration_says(tmp_path: Path) -> None:
    dense = {**V2, "n_routed_experts": None, "first_k_dense_replace": None, "rope_interleave": False}
    config = hf_config(files.write_folder(tmp_path, dense, {"x": np.zeros(1, np.float32)}))
    assert (config.experts, config.head_dim, config.draft_layers) == (None, 8, 0)
    assert config.latent == LatentConfig(
        rank=16, nope_head_dim=8, rope_head_dim=8, value_head_dim=12, query_rank=None, interleaved=False
    )
    assert config.attention_scale == pytest.approx(reference_deepseek.scale(dense))
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    assert not any(isinstance(block.mlp, MoE) for block in model.blocks)


def test_sizes_that_a_layer_refuses() -> None:
    sizes = {"rank": 16, "nope_head_dim": 8, "rope_head_dim": 7, "value_head_dim": 12}
    with pytest.raises(ValueError, match=r"expected positive sizes and an even rope_head_dim, got .*rope_head_dim=7"):
        LatentAttention(24, num_heads=4, **sizes, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x must have the shape \(batch, tokens, features\), got \(3, 24\)"):
        abstract_layer()(jnp.zeros((3, 24)), (jnp.zeros((3, 4)), jnp.zeros((3, 4))))
    with pytest.raises(ValueError, match=r"rotary must be a pair of arrays of shape \(1, 3, 4\)"):
        abstract_layer()(jnp.zeros((1, 3, 24)), (jnp.zeros((1, 3, 12)), jnp.zeros((1, 3, 12))))

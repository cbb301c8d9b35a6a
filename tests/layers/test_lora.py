"""LoRA adapters: folders that are read or refused, and the bits of adapted layers."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import bijax
from bijax.testing import assert_bits_equal
from flax_layers import INVARIANT, PLAIN, Llama
from flax_layers.checkpoint import CheckpointError, LlamaConfig, load_lora
from flax_layers.models.adapters import AdaptedLinear, Adapters, sort_tokens
from flax_layers.models.layers import Linear
from tests.layers import adapter_files as files
from tests.layers.parameters import filled

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    rope_theta=10000.0, rms_norm_eps=1e-5, tie_word_embeddings=True, max_position_embeddings=64, bos_token_id=1,
    eos_token_ids=(2,),
)  # fmt: skip
QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(("rslora", "scaling"), [(False, 8 / 4), (True, 8 / 2)])
def test_an_adapter_is_read_as_peft_means_it(tmp_path: Path, rslora: bool, scaling: float) -> None:
    """W + scaling * B A."""
    folder = files.write(tmp_path / "a", CONFIG, fields={"use_rslora": rslora, "lora_alpha": 8})
    lora, stored = load_lora(folder, CONFIG), files.matrices(CONFIG)
    assert (lora.rank, lora.scaling, len(lora.down)) == (4, scaling, 14)
    a, b = (stored[f"{files.PREFIX}{QUERY}.lora_{side}.weight"].astype(np.float64) for side in "AB")
    np.testing.assert_array_equal(lora.change(QUERY), scaling * (b @ a))


def test_adapters_of_some_layers_and_of_one_kind(tmp_path: Path) -> None:
    lora = load_lora(files.write(tmp_path / "a", CONFIG, targets=("v_proj", "down_proj"), layers=[1]), CONFIG)
    assert sorted(lora.down) == ["model.layers.1.mlp.down_proj", "model.layers.1.self_attn.v_proj"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', got 'IA3'"),
        ({"use_dora": True}, "use_dora must be absent or empty, got True: DoRA"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save must be absent or empty, got \['lm_head'\]"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern must be absent or empty.*one adapter has one rank"),
        ({"bias": "all"}, "bias must be 'none', got 'all'"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights must not be 'pissa_niter_16'.*path_initial_model"),
        ({"r": 0}, "r must be at least 1, got 0"),
        ({"r": 8}, r"lora_A\.weight must have the shape \(8, 40\) by r=8 and the base model, got \(4, 40\)"),
        ({"r": "4"}, "r must be an integer, got '4'"),
        ({"lora_alpha": None}, "lora_alpha must be a finite number, got None"),
        ({"lora_alpha": 0}, "lora_alpha must be a positive number, got 0"),
        ({"use_rslora": "yes"}, "use_rslora must be true or false, got 'yes'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_configs_that_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_lora(files.write(tmp_path / "a", CONFIG, fields=fields), CONFIG)


def test_tensors_that_are_refused(tmp_path: Path) -> None:
    good = files.matrices(CONFIG)
    first = f"{files.PREFIX}{QUERY}.lora_A.weight"
    infinite = good[first].copy()
    infinite[0, 0] = np.inf
    for tensors, message in (
        ({**good, f"{files.PREFIX}lm_head.lora_A.weight": good[first]}, "lm_head.* adapted are down_proj, gate_proj"),
        ({**good, first.replace("layers.0", "layers.2"): good[first]}, r"layers\.2.* of 2 layers: check"),
        ({n: v for n, v in good.items() if n != first}, f"got only one of {QUERY}"),
        ({}, "got no tensors"),
        ({**good, first: infinite}, "holds inf or nan"),
        ({**good, first: good[first].astype(np.int8)}, "must be stored as one of F32, F16, BF16, got I8"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_lora(files.write(tmp_path / "a", CONFIG, tensors=tensors), CONFIG)


def test_files_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is not a folder with adapter_config\.json"):
        load_lora(tmp_path / "nothing", CONFIG)
    folder = files.write(tmp_path / "a", CONFIG)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks adapter_model\.safetensors"):
        load_lora(folder, CONFIG)
    (folder / "adapter_model.safetensors").write_bytes(b"\0" * 12)
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_lora(folder, CONFIG)
    (folder / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(CheckpointError, match="expected a JSON object, got list"):
        load_lora(folder, CONFIG)


WIDE = dataclasses.replace(CONFIG, hidden_size=1024, intermediate_size=32, num_layers=1)
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"rank": 3}, "queries": {"rank": 3, "targets": ("q_proj",), "seed": 1},
    "another rank": {"rank": 16, "seed": 2}, "values": {"rank": 3, "targets": ("v_proj", "o_proj"), "seed": 3},
}  # fmt: skip


@functools.cache
def wide_model() -> Llama:
    return cast(Llama, filled(lambda: Llama(WIDE, rngs=nnx.Rngs(0))))


def stacked(folder: Path, names: tuple[str, ...]) -> Adapters:
    loras = {n: load_lora(files.write(folder / n, WIDE, **ADAPTERS[n]), WIDE) for n in names}
    return Adapters.stack(wide_model(), loras)


@functools.partial(jax.jit, static_argnames=("members", "plain"))
def adapted(base: Linear, stacks: Any, members: Any, chosen: jax.Array, x: jax.Array, *, plain: bool) -> jax.Array:
    layer = nnx.with_attributes(base, ops=PLAIN if plain else INVARIANT)
    return AdaptedLinear(layer, stacks, sort_tokens(members, chosen, x.shape[1]))(x)


def run(adapters: Adapters, chosen: list[str | None], x: np.ndarray, *, plain: bool = False) -> np.ndarray:
    numbers = np.array([0 if c is None else adapters.names.index(c) + 1 for c in chosen], np.int32)
    base, stacks = wide_model().blocks[0].attention.qkv, adapters.blocks[0]["attention.qkv"]
    return np.asarray(adapted(base, stacks, adapters.members, numbers, x, plain=plain))


@pytest.mark.tier("full", fast=("queries",))
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_token_s_bits_depend_on_its_own_adapter_alone(tmp_path: Path, name: str) -> None:
    """Alone in a model with one adapter, and among tokens with others, which are huge, inf and nan."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 1, WIDE.hidden_size)).astype(np.float32)
    x[3:] *= np.array([1e30, np.inf, np.nan], np.float32)[:, None, None]
    chosen = [name, "queries", "another rank", "all", "values", None]
    everything, one = stacked(tmp_path, tuple(ADAPTERS)), stacked(tmp_path, (name,))
    together, alone = run(everything, chosen, x), run(one, [name], x[:1])
    assert_bits_equal(together[0], alone[0])
    assert_bits_equal(run(everything, chosen[::-1], x[::-1])[::-1][:3], together[:3])
    # The control: JAX's own operations.
    assert (run(everything, chosen, x, plain=True)[0] != run(one, [name], x[:1], plain=True)[0]).any()
    # Against float64, and with the bits of the model itself where nothing is changed.
    base, lora = wide_model().blocks[0].attention.qkv, load_lora(tmp_path / name, WIDE)
    layers = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    widths = (32, 16, 16)
    changes = [lora.change(n) if n in lora.down else np.zeros((w, 1)) for n, w in zip(layers, widths, strict=True)]
    kernel = np.asarray(base.kernel[...], np.float64)
    expected = x[0].astype(np.float64) @ (
        kernel + np.concatenate([np.broadcast_to(c, (len(c), 1024)) for c in changes]).T
    )
    np.testing.assert_allclose(together[0], expected, rtol=0, atol=5e-5)
    unchanged = np.asarray(base(x))
    same = np.repeat([not c.any() for c in changes], widths)
    assert_bits_equal(together[0][:, same], unchanged[0][:, same])
    assert (together[0][:, ~same] != unchanged[0][:, ~same]).all()
    assert_bits_equal(together[5], unchanged[5])
    assert_bits_equal(run(everything, [None] * 6, x), unchanged)


@pytest.mark.tier("full")
def test_the_products_are_those_of_matmul(tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, WIDE.hidden_size)).astype(np.float32)
    found = run(stacked(tmp_path, ("all", "values")), ["all"], x)
    stack = stacked(tmp_path, ("all",)).blocks[0]["attention.qkv"][0]
    by_hand = bijax.matmul(bijax.matmul(x[0], stack.down[0]), stack.up[0])
    assert_bits_equal(found[0], np.asarray(wide_model().blocks[0].attention.qkv(x[0]) + by_hand))


def test_an_adapter_for_layers_that_the_model_does_not_have(tmp_path: Path) -> None:
    deeper = dataclasses.replace(WIDE, num_layers=2)
    lora = load_lora(files.write(tmp_path / "deep", deeper), deeper)
    with pytest.raises(ValueError, match=r"'deep' changes model\.layers\.1.* adapters can change: .* Merge"):
        Adapters.stack(wide_model(), {"deep": lora})


def test_stored_as_bfloat16(tmp_path: Path) -> None:
    folder = files.write(tmp_path / "a", CONFIG)
    tensors = {name: np.asarray(jnp.asarray(v, jnp.bfloat16)) for name, v in files.matrices(CONFIG).items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    stored = tensors[f"{files.PREFIX}{QUERY}.lora_A.weight"].astype(np.float32)
    assert_bits_equal(load_lora(folder, CONFIG).down[QUERY], stored)

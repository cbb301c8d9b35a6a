"""Mixtures of experts: routing, the layer in float and in int8, and checkpoints of models that have them."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from bijax.testing import assert_bits_equal
from flax_layers import INVARIANT, PLAIN, Llama, Routing, convert, nnx
from flax_layers.checkpoint import CheckpointError, load_checkpoint, load_expert_block
from flax_layers.checkpoint.weights import expected_shapes
from flax_layers.models import experts_from_checkpoint
from tests.arrays import on_device
from tests.layers import checkpoint_files as files
from tests.layers import reference_experts, reference_llama
from tests.layers import small_llama as small
from tests.layers.parameters import filled, normal
from tests.tiers import full_only, tiered

ROUTINGS = {
    "Qwen3": Routing(num_experts=8, topk=3),
    "DeepSeek-V2": Routing(num_experts=12, topk=3, normalise=False, scale=16.0, num_groups=4, topk_groups=2),
    "DeepSeek-V3": Routing(
        num_experts=12, topk=4, scoring="sigmoid", scale=2.5, num_groups=3, topk_groups=2, group_score="two largest",
        use_bias=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", tiered(ROUTINGS, fast=["Qwen3", "DeepSeek-V3"]))
def test_routing(name: str) -> None:
    routing = ROUTINGS[name]
    logits = normal(0, 40, routing.num_experts)
    bias = normal(1, routing.num_experts) / 4 if routing.use_bias else None
    expected = reference_experts.route(logits, bias, routing)
    for ops in (INVARIANT, PLAIN):
        selected, weights = jax.jit(ops.route, static_argnums=2)(logits, bias, routing)
        assert selected.tolist() == expected[0].tolist()
        np.testing.assert_allclose(weights, expected[1], rtol=1e-5)


def test_of_equal_scores_the_lower_expert_is_selected() -> None:
    logits = np.array([[1.0, 2.0, 2.0, 1.0, 1.0, 1.0, 2.0, 0.0], [0.0] * 8], np.float32)
    groups = Routing(num_experts=8, topk=3, num_groups=4, topk_groups=2)
    route = jax.jit(INVARIANT.route, static_argnums=2)
    # In the first row groups 0, 1 and 3 are equal.
    assert route(logits, None, groups)[0].tolist() == [[1, 2, 0], [0, 1, 2]]


@pytest.mark.tier("full")
def test_experts_in_int8_are_those_of_plain_jax() -> None:
    rng = np.random.default_rng(0)
    x, factors = jnp.asarray(normal(1, 6, 16)), jnp.asarray(normal(2, 6, 2))
    selected = jnp.asarray([rng.permutation(4)[:2] for _ in range(6)], jnp.int32)
    pairs = [
        (on_device(rng.integers(-127, 128, shape, np.int8)), jnp.asarray(rng.uniform(0.001, 0.01, shape[::2])))
        for shape in ((4, 16, 16), (4, 8, 16))
    ]
    ours, plain = (ops.quantized_experts(x, selected, factors, *pairs) for ops in (INVARIANT, PLAIN))
    # Plain JAX rounds to the dtype of x before SwiGLU, and to int8 from there.
    assert np.abs(ours - plain).max() < 0.02 * np.abs(plain).max()
    assert np.abs(ours).max() > 0.1


@pytest.mark.parametrize("dtypes", [("float32",), full_only(("float32", "int8"))], ids=str)
def test_bits_of_a_layer(dtypes: tuple[str, ...]) -> None:
    """A token alone and among others, which load the experts, in float and in int8; plain JAX is the control."""
    routing = Routing(num_experts=4, topk=2, scoring="sigmoid", use_bias=True)
    layer = filled(lambda: nnx.MoE(160, 24, routing=routing, shared_features=16, rngs=flax_nnx.Rngs(0)))
    x = normal(2, 64, 160)
    found = {}
    for dtype in dtypes:
        if dtype == "int8":
            convert(layer, quantize="int8")
            assert [type(layer), type(layer.shared.down)] == [nnx.QuantMoE, nnx.QuantLinear]
            assert layer.gate_up[...].dtype == jnp.int8
        run = jax.jit(layer.__call__)
        found[dtype] = np.asarray(run(x))
        assert_bits_equal(run(x[7:8]), found[dtype][7:8])
        if dtype == "float32":
            plain = jax.jit(flax_nnx.with_attributes(layer, ops=PLAIN).__call__)
            many = np.asarray(plain(x))
            assert np.abs(many - found[dtype]).max() < 1e-3 * np.abs(found[dtype]).max()
            # How many rows it takes depends on the processor.
            assert (np.asarray(plain(x[:1])) != many[:1]).any()
    if "int8" not in dtypes:
        return
    error = np.abs(found["int8"] - found["float32"]).max()
    assert 0 < error < 0.1 * np.abs(found["float32"]).max()


FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "sliding_window": 4096, "use_sliding_window": False,
    },
    "deepseek_v2": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 2,
        "n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy", "norm_topk_prob": False,
        "routed_scaling_factor": 16.0, "scoring_func": "softmax",
    },
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_shared_experts": 1,
        "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    },
}  # fmt: skip


def fields(kind: str) -> dict[str, Any]:
    return {**files.hf_fields(), "model_type": kind, "num_hidden_layers": 1, **FIELDS[kind]}


def random(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {
        name: 1 + normal(i, *shape) / 8 if len(shape) == 1 else normal(i, *shape) / shape[1] ** 0.5
        for i, (name, shape) in enumerate(shapes.items())
    }


@pytest.mark.tier("full")
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_expert_blocks_of_folders(tmp_path: Path, kind: str) -> None:
    shapes = {"model.layers.0.mlp.gate_proj.weight": (3, 3), "model.layers.1.self_attn.kv_a_proj.weight": (5, 4)}
    prefix, routed, inner = "model.layers.1.mlp", FIELDS[kind]["n_routed_experts"], 12
    shapes[f"{prefix}.gate.weight"] = (routed, files.WIDTH)
    if kind == "deepseek_v3":
        shapes[f"{prefix}.gate.e_score_correction_bias"] = (routed,)
    widths = {f"experts.{i}": inner for i in range(routed)}
    for name, width in {**widths, "shared_experts": inner * FIELDS[kind]["n_shared_experts"]}.items():
        shapes[f"{prefix}.{name}.gate_proj.weight"] = shapes[f"{prefix}.{name}.up_proj.weight"] = (width, files.WIDTH)
        shapes[f"{prefix}.{name}.down_proj.weight"] = (files.WIDTH, width)
    weights = random(shapes)
    folder = files.write_folder(tmp_path / "model", fields(kind), weights, shards=2)
    block = load_expert_block(folder, 1)
    moe = experts_from_checkpoint(block)
    x = normal(9, 10, files.WIDTH)
    expected = reference_experts.experts(x.astype(np.float64), weights, prefix, block.config)
    found = jax.jit(moe.__call__)(x)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    with pytest.raises(CheckpointError, match=r"layer 0 must have the weights of \d experts"):
        load_expert_block(folder, 0)


@pytest.mark.tier("full", fast=("parameters",))
@pytest.mark.parametrize("compared", ["parameters", "numbers", "and bits"])
def test_qwen3_moe(tmp_path: Path, compared: str) -> None:
    """A folder, its logits in float64, and the bits of sequences in a batch that is prefilled in chunks.

    `test_deepseek.py` compares the logits of another model with experts in `make test`.
    """
    folder = files.write_folder(tmp_path / "model", fields("qwen3_moe"), {})
    with pytest.raises(CheckpointError, match="weights are missing"):
        load_checkpoint(folder)
    shapes = dict(expected_shapes(load_config(folder)))
    assert shapes["model.layers.0.self_attn.k_norm.weight"] == (files.HEAD_DIM,)
    assert shapes["model.layers.0.mlp.experts.3.up_proj.weight"] == (12, files.WIDTH)
    assert "model.layers.0.mlp.gate_proj.weight" not in shapes
    checkpoint = load_checkpoint(files.write_folder(folder, fields("qwen3_moe"), random(shapes)))
    model = Llama.from_checkpoint(checkpoint)
    gate, up, down = (
        checkpoint.weights[f"model.layers.0.mlp.experts.3.{n}_proj.weight"].T for n in ("gate", "up", "down")
    )
    experts = model.blocks[0].mlp
    assert_bits_equal((experts.gate_up[...][3], experts.down[...][3]), (np.concatenate([gate, up], axis=1), down))
    if compared == "parameters":
        return
    in_chunks = compared == "and bits"
    rows = tuple(np.random.default_rng(0).integers(0, files.VOCAB, n).astype(np.int32) for n in (21, 9))
    alone = [small.in_full(model, (row,), 24)[0] for row in rows[: 1 + in_chunks]]
    logits = reference_llama.logits(checkpoint.weights, checkpoint.config, rows[0].tolist())
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(alone[0], logprobs[np.arange(20), rows[0][1:]], rtol=0, atol=1e-4)
    if in_chunks:
        assert_bits_equal(small.in_chunks(model, rows, 8, small.paged), alone)


def load_config(folder: Path) -> Any:
    from flax_layers.checkpoint.hf_config import hf_config

    return hf_config(folder)


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("qwen3_moe", {"mlp_only_layers": [0]}, "every layer must have experts"),
        ("qwen3_moe", {"num_experts": None}, "num_experts must be an integer, got None"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "topk must be at most"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window must be false"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob must be false"),
        ("deepseek_v2", {"topk_method": "other"}, "topk_method must be"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
        ("deepseek_v3", {"n_group": 3}, "num_groups that divide num_experts"),
        ("deepseek_v3", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
        ("deepseek_v3", {"model_type": "other"}, "expected one of the model types"),
    ],
)
def test_bad_configurations(tmp_path: Path, kind: str, changed: dict[str, Any], message: str) -> None:
    folder = files.write_folder(tmp_path / "model", {**fields(kind), **changed}, {"x": np.zeros(1, np.float32)})
    with pytest.raises(CheckpointError, match=message):
        load_config(folder) if kind == "qwen3_moe" else load_expert_block(folder, 0)


def test_bad_input() -> None:
    for options in ({"topk": 0}, {"num_groups": 3}, {"topk_groups": 2}, {"scale": 0.0}, {"scoring": "other"}):
        with pytest.raises(ValueError, match="Routing: "):
            Routing(**{"num_experts": 8, "topk": 2, **options})
    layer = filled(lambda: nnx.MoE(4, 8, routing=Routing(num_experts=3, topk=2), rngs=flax_nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"MoE: x must have the shape \(\.\.\., 4\), got \(2, 3\)"):
        layer(jnp.ones((2, 3)))

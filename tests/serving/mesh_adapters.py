"""LoRA adapters of engines whose models are cut over devices, run as a program of its own, which `test_mesh` starts."""

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import flax_layers
from bijax import cli
from bijax.parallel import Overlap
from bijax.serving import Engine, EngineOptions, ModelOptions, SamplingParams
from bijax.serving.fingerprint import fingerprint
from bijax.serving.load import load_models
from bijax.testing import assert_bits_equal
from flax_layers import Llama, MTPHead, PartitionedLlama, ServedLlama
from flax_layers.checkpoint import LoRA, load_checkpoint
from tests.layers import adapter_files, partitioned_attention
from tests.serving import mesh_experts
from tests.serving.mesh_engines import ONE_BY_ONE, SMALL, folder, found, llama, mesh

PROMPTS = [[1, 5, 9, 7], [3, 3, 2, 1, 8, 9, 40, 41, 42, 5, 6], [1, 5, 9, 7]]
ADAPTERS = ("red", "blue", None)


def lora(model: Llama, rank: int, seed: int, **how: Any) -> LoRA:
    matrices = adapter_files.matrices(model.config, rank=rank, seed=seed, **how)
    sides: list[dict[str, np.ndarray]] = [
        {
            name.removeprefix(adapter_files.PREFIX).removesuffix(end): value
            for name, value in matrices.items()
            if name.endswith(end)
        }
        for end in (".lora_A.weight", ".lora_B.weight")
    ]
    return LoRA(rank, 2.0, *sides)


def adapters(model: Llama) -> dict[str, LoRA]:
    """Two adapters of one rank (one changes only parts of layers), and one of another rank."""
    return {
        "red": lora(model, 4, 0),
        "green": lora(model, 4, 1, targets=("k_proj", "o_proj", "up_proj")),
        "blue": lora(model, 2, 2, targets=("q_proj", "down_proj")),
    }


def params(adapter: str | None, **more: Any) -> SamplingParams:
    given = {"max_new_tokens": 4, "seed": 3, "logprobs": True, "top_logprobs": 2, "adapter": adapter}
    return SamplingParams(**given | more)


def served(engine: Engine, names: tuple[str | None, ...] = ADAPTERS) -> list[Any]:
    """Returns the results of requests with other adapters together, and of each alone with a cold and a warm cache."""
    requested = [params(name) for name in names]
    together = [found(output) for output in engine.generate(PROMPTS, requested)]
    engine.flush_cache()
    for _ in range(2):
        alone = [found(engine.generate([p], [q])[0]) for p, q in zip(PROMPTS, requested, strict=True)]
        assert_bits_equal(alone, together)
    return together


def several() -> None:
    """Each request has the bits of one device and of its own adapter, which each device has a part of."""
    model = llama(num_layers=2)
    results = [served(Engine(ServedLlama(model), options=SMALL, mesh=mesh(2)), (None,) * 3)]
    for devices in (1, 2):
        engine = Engine(ServedLlama(model, adapters=adapters(model)), options=SMALL, mesh=mesh(devices))
        results.append(served(engine))
    base, one, two = results
    assert_bits_equal(two, one)
    assert_bits_equal(two[2], base[2])
    with pytest.raises(AssertionError):
        assert_bits_equal(two[0], base[0])
    # A server without the other adapters.
    red = {"red": adapters(model)["red"]}
    alone = Engine(ServedLlama(model, adapters=red), options=SMALL, mesh=mesh(2))
    assert_bits_equal(found(alone.generate(PROMPTS[:1], [params("red")])[0]), two[0])
    cut = engine.model
    assert cut.adapter_names == ("red", "green", "blue")
    for layer, name, shape in (
        ("attention.qkv", "up", (2, 12, 1, 96)),
        ("mlp.down", "down", (4, 3, 8, 4)),
        ("attention.out", "up", (2, 4, 32)),
    ):
        assert getattr(cut._adapters.blocks[1][layer][0], name).addressable_shards[0].data.shape == shape
    leaves, tree = jax.tree.flatten(cut)
    assert jax.tree.structure(jax.tree.unflatten(tree, leaves)) == tree
    # One device that does not cut sums computes nearly the same.
    whole = Engine(ServedLlama(model, adapters=adapters(model)), options=SMALL)
    near = [np.concatenate([np.ravel(x) for x in found(whole.generate(PROMPTS, [params(n) for n in ADAPTERS])[0])])]
    np.testing.assert_allclose(near[0], np.concatenate([np.ravel(x) for x in two[0]]), rtol=1e-4, atol=1e-5)


def any_number(*, int8: bool = False) -> None:
    """Biases and norms of heads, over 8 devices; layers of int8 with adapters that are not quantised."""
    model = llama(qk_norm=True, qkv_bias=True, tie_word_embeddings=False)
    given = adapters(model)
    if int8:
        model = flax_layers.convert(model, {"lm_head": False}, quantize="int8")
    results = []
    for devices in (1, 8):
        engine = Engine(ServedLlama(model, adapters=given), options=ONE_BY_ONE, mesh=mesh(devices))
        results.append([found(engine.generate([[1, 5, 9]], params(name))[0]) for name in ("green", "blue")])
    assert_bits_equal(results[1], results[0])


def plain() -> None:
    """The control: with JAX's own products and sums, log-probabilities depend on the number of devices."""
    options = EngineOptions(**{**vars(SMALL), "enable_deterministic_inference": False})
    model = ServedLlama(llama(), adapters=adapters(llama()))
    one, many = (
        found(Engine(model, options=options, mesh=mesh(n)).generate(PROMPTS[1:2], params("red"))[0]) for n in (1, 8)
    )
    with pytest.raises(AssertionError):
        assert_bits_equal(many, one)


def one_program() -> None:
    """A step as one program, as on GPUs, in bfloat16; with other weights, which keep the adapters."""

    def model(seed: int) -> Llama:
        config = llama().config
        return Llama(config, dtype="bfloat16", param_dtype="bfloat16", rngs=nnx.Rngs(seed))

    given = ServedLlama(model(0), adapters=adapters(llama()))
    engines = []
    for devices in (1, 4):
        cut = given.partitioned(mesh(devices))
        cut.one_program = devices == 4
        engines.append(Engine(cut, options=ONE_BY_ONE))
    results = []
    for _ in range(2):
        one, four = ([found(e.generate([[1, 5, 9]], params(n))[0]) for n in ("red", None)] for e in engines)
        assert_bits_equal(four, one)
        results.append(one)
        for engine in engines:
            engine.update_weights(model(1))
    with pytest.raises(AssertionError):
        assert_bits_equal(*results)
    names = {fingerprint(given.partitioned(mesh(devices)), page_size=4) for devices in (1, 2)}
    assert names == {fingerprint(ServedLlama(model(0)).partitioned(mesh(1)), page_size=4)}


def with_a_head() -> None:
    """Drafts of a head that adapters do not change: the bits of no drafts."""
    model = llama()
    given = adapters(model)
    head = MTPHead(model.config, rngs=nnx.Rngs(1))
    options = {**vars(ONE_BY_ONE), "num_pages": 8, "speculative_algorithm": "mtp", "speculative_tokens": 2}
    drafting = Engine(
        ServedLlama(model, adapters=given, draft_head=head), options=EngineOptions(**options), mesh=mesh(2)
    )
    without = Engine(ServedLlama(model, adapters=given), options=ONE_BY_ONE, mesh=mesh(1))
    requested = params("red", temperature=0, max_new_tokens=8)
    one, two = (found(engine.generate([[1, 5, 9]], requested)[0]) for engine in (without, drafting))
    assert drafting.stats().drafted_tokens > 0
    assert_bits_equal(two, one)
    leaves, tree = jax.tree.flatten(drafting.model)
    assert jax.tree.structure(jax.tree.unflatten(tree, leaves)) == tree


def latent() -> None:
    """The output of latent attention, whose rows are cut."""
    model = partitioned_attention.llama("latent")
    given = {"red": lora(model, 3, 0, targets=("o_proj",))}
    results = []
    for devices in (1, 8):
        engine = Engine(ServedLlama(model, adapters=given), options=ONE_BY_ONE, mesh=mesh(devices))
        results.append([found(engine.generate([[1, 5, 9]], params(name))[0]) for name in ("red", None)])
    assert_bits_equal(results[1], results[0])
    with pytest.raises(AssertionError):
        assert_bits_equal(results[0][0], results[0][1])


def start() -> None:
    """From folders, straight to the shards, on devices of each model's own; the bits of adapters that are cut later."""
    with tempfile.TemporaryDirectory() as made:
        checkpoint = load_checkpoint(folder(Path(made) / "m"))
        for name, how in (("red", {"rank": 4}), ("blue", {"rank": 2, "seed": 2, "targets": ("q_proj", "o_proj")})):
            adapter_files.write(Path(made) / name, checkpoint.config, **how)
        paths = tuple(f"{name}={Path(made) / name}" for name in ("red", "blue"))
        options = ModelOptions(tensor_parallel_size=4, lora_paths=paths)
        kept = jax.live_arrays()
        before = {id(x) for x in kept}
        models = load_models(checkpoint, options, number=2)
        new = [x for x in jax.live_arrays() if id(x) not in before]
        assert all(len(x.sharding.device_set) == 4 for x in new if x.ndim > 2)
        whole = load_models(checkpoint, ModelOptions(lora_paths=paths))[0]
        expected = whole.partitioned(mesh(4))
        for model in models:
            assert_bits_equal(jax.device_get(model._adapters.blocks), jax.device_get(expected._adapters.blocks))
            stack = model._adapters.blocks[0]["attention.out"][0]
            assert stack.down.sharding.spec == P("model", None, None, None)
        assert not set(models[0].mesh.devices.flat) & set(models[1].mesh.devices.flat)
        small = "--page-size 4 --num-pages 16 --enable-two-batch-overlap --moe-a2a-backend all_to_all".split()
        command = ["serve", "--model", str(Path(made) / "m"), "--tensor-parallel-size", "2", *small]
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            assert cli.main([*command, "--lora-paths", *paths]) == 2
        assert "enable_two_batch_overlap must not be set with lora_paths" in printed.getvalue()


def bad_input() -> None:
    model = mesh_experts.llama()
    given = {"red": lora(model, 2, 0, targets=("q_proj", "o_proj"))}
    cut = ServedLlama(model, adapters=given).partitioned(mesh_experts.mesh(2, 2))
    with pytest.raises(ValueError, match="overlap needs a model without adapters, got red; leave either out"):
        cut.overlapped(Overlap("two_batch"))
    weights: PartitionedLlama = cut.model
    deeper = {"red": lora(mesh_experts.llama(num_layers=3), 2, 0, targets=("q_proj",), layers=[2])}
    with pytest.raises(ValueError, match=r"'red' changes model\.layers\.2\.self_attn\.q_proj, which is no linear"):
        flax_layers.models.ServedPartitionedLlama(weights, adapters=deeper)
    with pytest.raises(ValueError, match=r"adapter must be one of red, or None .* got 'pink'"):
        Engine(cut, options=ONE_BY_ONE).generate([[1]], params("pink"))


CHECKS: dict[str, Callable[[], None]] = {
    "adapters": several,
    "adapters on 8 devices": any_number,
    "adapters beside int8": lambda: any_number(int8=True),
    "plain adapters": plain,
    "adapters in one program": one_program,
    "adapters and a head": with_a_head,
    "adapters of latent attention": latent,
    "start with adapters": start,
    "bad adapters": bad_input,
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(name, flush=True)

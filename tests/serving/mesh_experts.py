"""Engines of models with experts on devices of one CPU, run as a program of its own, which `test_mesh` starts."""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from bijax import cli
from bijax.server.start import _warm_engines
from bijax.serving import Engine, EngineOptions, ModelOptions, SamplingParams
from bijax.serving.cache_size import StateBytes
from bijax.serving.fingerprint import fingerprint
from bijax.testing import assert_bits_equal
from flax_layers import Llama, MTPHead, ServedLlama, convert
from flax_layers.checkpoint import load_checkpoint
from flax_layers.checkpoint.hf_config import hf_config
from flax_layers.checkpoint.weights import expected_shapes
from tests.layers import checkpoint_files, deepseek_files, hybrid_files, partitioned_attention
from tests.layers.partitioned_experts import llama, mesh
from tests.serving.mesh_engines import ONE_BY_ONE, found
from tests.serving.mesh_engines import folder as dense_folder

PARAMS = SamplingParams(max_new_tokens=3, seed=1, logprobs=True, top_logprobs=2)
SMALL = EngineOptions(page_size=4, num_pages=16, max_running=2, max_prefill_tokens=4, max_length=24)


def alone(model: Any, *meshes: tuple[int, int], leaves: int = 8, **options: Any) -> None:
    """A request with a cold cache and a warm one, on one device and on others."""
    prompt, chosen = [1, 5, 9, 7, 3], EngineOptions(**{**vars(ONE_BY_ONE), **options})
    expected = None
    for tensor, expert in meshes:
        engine = Engine(model.partitioned(mesh(tensor, expert), leaves=leaves), options=chosen)
        cold, warm = (engine.generate([prompt], PARAMS)[0] for _ in range(2))
        assert warm.cached_tokens == (4 if model.state_interval is None else 0)
        assert_bits_equal(found(warm), found(cold))
        if expected is None:
            expected = found(cold)
        assert_bits_equal(found(cold), expected)


def together() -> None:
    """Two requests at a time, with chunks, on one device and on others; each alone has the same bits."""
    model = ServedLlama(llama(qk_norm=True))
    prompts, params = (
        [[1, 5, 9, 7], [3, 3, 2, 1, 8, 9]],
        [PARAMS, SamplingParams(max_new_tokens=3, seed=4, logprobs=True)],
    )
    expected: list[Any] | None = None
    for tensor, expert in ((1, 1), (1, 8), (2, 2)):
        engine = Engine(model, options=SMALL, mesh=mesh(tensor, expert))
        both = [found(output) for output in engine.generate(prompts, params)]
        engine.flush_cache()
        for _ in range(2):  # with a cold cache and a warm one
            each = [found(engine.generate([p], [q])[0]) for p, q in zip(prompts, params, strict=True)]
            assert_bits_equal(each, both)
        expected = both if expected is None else expected
        assert_bits_equal(both, expected)


def plain() -> None:
    """Experts on one device and on two, and the control: with JAX's own products and sums log-probabilities differ.

    The experts' kernels are large, so that their sums are not small against the residual stream.
    """
    model = jax.tree.map(lambda x: x * 8 if x.ndim == 3 else x, llama())
    prompt = [int(token) for token in np.random.default_rng(0).integers(3, 60, 12)]
    params = SamplingParams(max_new_tokens=3, seed=1, top_logprobs=5, logprobs=True, prompt_logprobs=True)
    for invariant in (True, False):
        options = EngineOptions(**{**vars(ONE_BY_ONE), "enable_deterministic_inference": invariant})
        one, two = (
            found(Engine(ServedLlama(model), options=options, mesh=mesh(1, n)).generate([prompt], params)[0])
            for n in (1, 2)
        )
        if invariant:
            assert_bits_equal(two, one)
            continue
        with pytest.raises(AssertionError):
            assert_bits_equal(two, one)


def weights() -> None:
    """Other weights go into the shards; the fingerprint names neither number of devices."""
    model = ServedLlama(llama())
    engine = Engine(model, options=ONE_BY_ONE, mesh=mesh(2, 2))
    before = found(engine.generate([[1, 5, 9]], PARAMS)[0])
    compiled = engine.stats().compilations
    changed = jax.tree.map(lambda x: x * 1.5 if x.ndim == 3 else x, llama())  # the experts' alone
    engine.update_weights(changed)
    after = found(engine.generate([[1, 5, 9]], PARAMS)[0])
    with pytest.raises(AssertionError):
        assert_bits_equal(after, before)
    one = Engine(ServedLlama(changed), options=ONE_BY_ONE, mesh=mesh(1, 1))
    assert_bits_equal(found(one.generate([[1, 5, 9]], PARAMS)[0]), after)
    kernel = engine.model.model.params["blocks"][0]["mlp"]["down"]
    assert kernel.sharding.spec == P(("expert", "model"), None, None)
    assert engine.stats().compilations == compiled
    names = {fingerprint(model.partitioned(mesh(t, e)), page_size=4) for t, e in ((1, 1), (1, 8), (2, 2))}
    assert len(names) == 1


def folder(path: Path) -> Path:
    """Writes a checkpoint of Qwen3-MoE with eight experts and eight heads."""
    fields = {
        **checkpoint_files.hf_fields(), "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 1,
    }  # fmt: skip
    checkpoint_files.write_folder(path, fields)
    rng = np.random.default_rng(0)
    shapes = expected_shapes(hf_config(path))
    drawn = {name: rng.standard_normal(shape) / shape[-1] ** 0.5 for name, shape in shapes}
    return checkpoint_files.write_folder(path, fields, {n: x.astype(np.float32) for n, x in drawn.items()})


def command() -> None:
    """`bijax test-deterministic` of a checkpoint whose experts are spread over devices."""
    small = "--trials 2 --max-new-tokens 3 --max-running 2 --max-prefill-tokens 4 --num-pages 16 --page-size 4 --json"
    with tempfile.TemporaryDirectory() as made:
        model = str(folder(Path(made) / "m"))
        over = ["--tensor-parallel-size", "2", "--expert-parallel-size", "4"]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert cli.main(["test-deterministic", "--model", model, *over, *small.split()]) == 0
        [row] = json.loads(printed.getvalue())["requests"]
        assert row["unique_bits"] == 1


def start() -> None:
    """What `bijax serve` starts, and options that end it before weights are read."""
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "warm_up", lambda self, on_progress: on_progress(1, 1))
        path = folder(Path(made) / "0")
        checkpoint = load_checkpoint(path)
        cut = ModelOptions(tensor_parallel_size=2, expert_parallel_size=2)
        engines, name = _warm_engines(checkpoint, 2, cut, SMALL, {})
        [one], same = _warm_engines(checkpoint, 1, ModelOptions(tensor_parallel_size=1), SMALL, {})
        assert name == same
        first, second = (set(engine.model.mesh.devices.flat) for engine in engines)
        assert (len(first), len(second), len(first & second)) == (4, 4, 0)
        for engine in engines:
            assert dict(engine.model.mesh.shape) == {"expert": 2, "model": 2}
            assert_bits_equal(*(jax.device_get(e.model.model.params) for e in (engine, one)))
        dense = dense_folder(Path(made) / "dense")

        def message(model: Path, *arguments: str) -> str:
            with contextlib.redirect_stderr(io.StringIO()) as printed:
                assert cli.main(["serve", "--model", str(model), *arguments]) == 2
            return printed.getvalue()

        tensor, expert = "--tensor-parallel-size", "--expert-parallel-size"
        assert "expert_parallel_size must be a power of two, got 3" in message(path, tensor, "1", expert, "3")
        assert "must be 1 without tensor_parallel_size, got 2; set" in message(path, expert, "2")
        assert "must divide the experts, got 16 devices and 8 experts" in message(path, tensor, "2", expert, "8")
        assert "at least 16 devices for 2 models on 8 devices" in message(
            path, tensor, "2", expert, "4", "--data-parallel-size", "2"
        )
        assert "must be 1 with a model without experts, got 2" in message(dense, tensor, "1", expert, "2")


def checkpointed(kind: str) -> Any:
    """Returns a small model of DeepSeek-V3 or Qwen3-Next."""
    with tempfile.TemporaryDirectory() as made:
        if kind == "deepseek":
            path = deepseek_files.write_model(Path(made) / "m", deepseek_files.V3)
        else:
            fields, stored = hybrid_files.fields("qwen3_next"), hybrid_files.weights("qwen3_next")
            path = checkpoint_files.write_folder(Path(made) / "m", fields, stored)
        return ServedLlama(Llama.from_checkpoint(load_checkpoint(path)))


def snapshots() -> None:
    """A prompt that goes on from the snapshot of another, on one device and on four."""
    model = checkpointed("hybrid")
    options = EngineOptions(page_size=16, num_pages=16, max_running=1, max_prefill_tokens=64, max_length=96)
    begin = [int(t) for t in np.random.default_rng(0).integers(0, 64, 64)]
    results: list[Any] = []
    for tensor, expert in ((1, 1), (2, 2)):
        engine = Engine(model.partitioned(mesh(tensor, expert), leaves=4), options=options)
        engine.generate([[*begin, 1]], PARAMS)
        [warm] = engine.generate([[*begin, 2, 3]], PARAMS)
        assert warm.cached_tokens == 64
        engine.flush_cache()
        [cold] = engine.generate([[*begin, 2, 3]], PARAMS)
        assert cold.cached_tokens == 0
        assert_bits_equal(found(warm), found(cold))
        results.append(found(cold))
    assert_bits_equal(results[1], results[0])


def eight(kind: str, *meshes: tuple[int, int], int8: bool = False, **options: Any) -> None:
    """Models with eight heads on one device and on others; of int8 with the bits of the model that is not cut."""
    model = partitioned_attention.llama(kind)
    served = ServedLlama(convert(model, quantize="int8") if int8 else model)
    alone(served, *meshes, **options)
    if int8:
        chosen = EngineOptions(**{**vars(ONE_BY_ONE), **options})
        engines = Engine(served, options=chosen), Engine(served, options=chosen, mesh=mesh(*meshes[-1]))
        results = []
        for seed in (0, 1):  # with the weights of another model of int8 too
            for engine in engines:
                if seed:
                    engine.update_weights(convert(partitioned_attention.llama(kind, seed), quantize="int8"))
                results.append(found(engine.generate([[1, 5, 9]], PARAMS)[0]))
        assert_bits_equal(results[1], results[0])
        assert_bits_equal(results[3], results[2])
        with pytest.raises(AssertionError):
            assert_bits_equal(results[2], results[0])
        with pytest.raises(ValueError, match="the names, shapes and dtypes"):
            engines[1].update_weights(partitioned_attention.llama(kind))


def one_program() -> None:
    """A hybrid with a head, a step as one program, as on GPUs; each device has its part of the states."""
    model = partitioned_attention.llama("linear")
    served = ServedLlama(model, draft_head=MTPHead(model.config, rngs=nnx.Rngs(1)))
    options: dict[str, Any] = {**vars(ONE_BY_ONE), "page_size": 16, "speculative_algorithm": "mtp"}
    results = []
    for devices in (1, 2):
        cut = served.partitioned(mesh(devices, 1))
        cut.one_program = devices == 2
        engine = Engine(cut, options=EngineOptions(**{**options, "speculative_tokens": 1}))
        results.append(found(engine.generate([[1, 5, 9]], PARAMS)[0]))
        leaves, tree = jax.tree.flatten(cut)
        assert jax.tree.structure(jax.tree.unflatten(tree, leaves)) == tree
    assert_bits_equal(results[1], results[0])
    one, eight = (StateBytes.of(served.partitioned(mesh(devices, 1))) for devices in (1, 8))
    assert one.snapshot == 8 * eight.snapshot
    assert one.running == pytest.approx(8 * eight.running, rel=0.01)  # all have the numbers of tokens


def drafts() -> None:
    """A hybrid on four devices with drafts that are right and wrong, against one device without."""
    served = ServedLlama(partitioned_attention.llama("linear"))
    options: dict[str, Any] = {**vars(ONE_BY_ONE), "page_size": 16, "max_length": 32, "num_pages": 8}
    params = SamplingParams(max_new_tokens=12, temperature=0, logprobs=True)
    results = []
    for tensor, drafted in ((1, 0), (4, 3)):
        engine = Engine(
            served, options=EngineOptions(**{**options, "speculative_tokens": drafted}), mesh=mesh(tensor, 1)
        )
        results.append(found(engine.generate([[1, 5, 9, 1, 5, 9, 1, 5]], params)[0]))
        assert (engine.stats().drafted_tokens > 0) == (drafted > 0)
    assert_bits_equal(results[1], results[0])


def head_drafts(kind: str) -> None:
    """Drafts by a head that is cut over four devices: those of one device, and the bits of no drafts."""
    model = partitioned_attention.llama(kind)
    head, width = MTPHead(model.config, rngs=nnx.Rngs(1)), model.config.hidden_size
    # The model and the head mostly follow the embedding of the last token, so that drafts are right now and then.
    head.fc.kernel.set_value(jnp.concatenate([jnp.eye(width), jnp.eye(width) / 2]))
    served = ServedLlama(model, draft_head=head)
    options: dict[str, Any] = {**vars(ONE_BY_ONE), "page_size": 16, "max_length": 48, "num_pages": 8}
    params = SamplingParams(max_new_tokens=16, seed=3, logprobs=True)
    drafted: dict[str, Any] = {"speculative_algorithm": "mtp", "speculative_tokens": 2}
    results, counts = [], []
    for devices, more in ((1, {}), (1, drafted), (4, drafted)):
        engine = Engine(served, options=EngineOptions(**{**options, **more}), mesh=mesh(devices, 1))
        results.append(found(engine.generate([[1, 5, 9]], params)[0]))
        counts.append((engine.stats().drafted_tokens, engine.stats().accepted_tokens))
    assert_bits_equal(results[1], results[0])
    assert_bits_equal(results[2], results[0])
    assert counts[1] == counts[2]
    assert counts[1][0] > counts[1][1] > 0
    other = partitioned_attention.llama(kind, seed=1)
    engine.update_weights((other, MTPHead(model.config, rngs=nnx.Rngs(2))))
    [changed] = engine.generate([[1, 5, 9]], params)
    expected = Engine(ServedLlama(other), options=EngineOptions(**options), mesh=mesh(4, 1))
    assert_bits_equal(found(changed), found(expected.generate([[1, 5, 9]], params)[0]))


def modes(kind: str, devices: int, *more: str) -> None:
    """Every mode of `bijax test-deterministic` with a checkpoint that is cut over devices."""
    small = "--trials 2 --max-new-tokens 3 --max-running 2 --max-prefill-tokens 4 --num-pages 48 --page-size 4 --json"
    with tempfile.TemporaryDirectory() as made:
        if kind == "deepseek":
            path = deepseek_files.write_model(Path(made) / "m", deepseek_files.V3)
        else:
            fields, stored = hybrid_files.fields("qwen3_next"), hybrid_files.weights("qwen3_next")
            path = checkpoint_files.write_folder(Path(made) / "m", fields, stored)
        over = ["--tensor-parallel-size", str(devices), "--tensor-parallel-leaves", "4", *more]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert cli.main(["test-deterministic", "--model", str(path), "--mode", "all", *over, *small.split()]) == 0
        rows = json.loads(printed.getvalue())["requests"]
        assert {row["unique_bits"] for row in rows} == {1}


def qwen(meshes: Sequence[tuple[int, int]]) -> Callable[[], None]:
    return lambda: alone(ServedLlama(llama(qk_norm=True)), *meshes)


CHECKS: dict[str, Callable[[], None]] = {
    "start with experts": start,
    "experts over 2, 4 and 8 devices": qwen([(1, 1), (1, 2), (1, 4), (1, 8)]),
    "experts and heads": qwen([(1, 1), (2, 2), (4, 2), (2, 4), (8, 1)]),
    "together with experts": together,
    "plain experts": plain,
    "weights of experts": weights,
    "DeepSeek": lambda: alone(checkpointed("deepseek"), (1, 1), (1, 8), (4, 2), leaves=4),
    "Qwen3-Next": lambda: alone(checkpointed("hybrid"), (1, 1), (1, 4), (2, 2), leaves=4),
    "snapshots": snapshots,
    "hybrid on 8 devices": lambda: eight("linear", (1, 1), (2, 1), (4, 1), (8, 1), page_size=16, max_prefill_tokens=4),
    "DeepSeek on 8 devices": lambda: eight("latent", (1, 1), (2, 1), (4, 1), (8, 1), max_prefill_tokens=4),
    "drafts of a hybrid": drafts,
    "hybrid in one program": one_program,
    "drafts by a head": lambda: head_drafts("latent"),
    "drafts by a head of a hybrid": lambda: head_drafts("linear"),
    "DeepSeek in int8": lambda: eight("latent", (1, 1), (8, 1), int8=True),
    "hybrid in int8": lambda: eight("linear", (1, 1), (8, 1), int8=True, page_size=16),
    "modes of DeepSeek": lambda: modes("deepseek", 4),
    "modes of DeepSeek in int8": lambda: modes("deepseek", 2, "--quantization", "int8"),
    "modes of a hybrid": lambda: modes("hybrid", 2),
    "command with experts": command,
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(name, flush=True)

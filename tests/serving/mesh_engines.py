"""Engines whose models are cut over devices of one CPU, run as a program of its own, which `test_mesh` starts."""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from bijax import cli
from bijax.server.start import _warm_engines
from bijax.serving import (
    DisaggregatedEngine,
    Engine,
    EngineOptions,
    ModelOptions,
    RequestOutput,
    SamplingParams,
)
from bijax.serving.cache_size import choose_num_pages
from bijax.serving.fingerprint import fingerprint
from bijax.serving.load import check_model, load_models, load_weights, mesh_for
from bijax.serving.toy import ToyModel
from bijax.testing import assert_bits_equal
from flax_layers import Llama, ServedLlama, partition
from flax_layers.checkpoint import LlamaConfig, load_checkpoint
from flax_layers.checkpoint.weights import expected_shapes
from flax_layers.models.partition_checks import check_sizes
from tests.layers import checkpoint_files
from tests.layers.parameters import filled
from tests.layers.partitioned_models import CONFIG

SMALL = EngineOptions(page_size=4, num_pages=24, max_running=2, max_prefill_tokens=8, max_length=40)
PROMPTS = [[1, 5, 9, 7], [3, 3, 2, 1, 8, 9, 40, 41, 42, 5, 6]]
PARAMS = [  # the prefix cache has no log-probabilities of prompts
    SamplingParams(max_new_tokens=6, seed=3, logprobs=True, top_logprobs=2, prompt_logprobs=True),
    SamplingParams(max_new_tokens=6, seed=4, logprobs=True, top_p=0.9),
]


def mesh(devices: int) -> Mesh:
    return jax.make_mesh((devices,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def llama(seed: int = 0, **changes: Any) -> Llama:
    return Llama(LlamaConfig(**{**CONFIG, **changes}), rngs=nnx.Rngs(seed))


def found(output: RequestOutput) -> list[Any]:
    """Returns everything that a request gets, numbers as float32."""
    [done] = output.completions
    entries = [*done.logprobs, *(output.prompt_logprobs or ())]
    rows = [[e.logprob, *(value for value, _ in e.top)] for e in entries if e is not None]
    tokens = [[t for _, t in e.top] for e in entries if e is not None]
    return [np.array(done.tokens), *(np.array(row, np.float32) for row in rows), *map(np.array, tokens)]


def served(engine: Engine) -> list[Any]:
    """Returns the results of requests together, and of each alone with an empty and a warm cache."""
    together = engine.generate(PROMPTS, PARAMS)
    engine.flush_cache()
    alone = [engine.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    warm = [engine.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    assert warm[1].cached_tokens > 0
    results = [[found(o) for o in outputs] for outputs in (together, alone, warm)]
    assert_bits_equal(results[1], results[0])
    assert_bits_equal(results[2], results[0])
    return results[0]


ONE_BY_ONE = EngineOptions(page_size=4, num_pages=4, max_running=1, max_prefill_tokens=1, max_length=16)
"""One sequence, one token at a time: the fewest programs."""


def any_number() -> None:
    """Norms of heads, biases and an output projection of its own, over 4 and 8 devices."""
    model = ServedLlama(llama(qk_norm=True, qkv_bias=True, tie_word_embeddings=False))
    params = SamplingParams(max_new_tokens=3, seed=1, logprobs=True)
    results = []
    for devices in (1, 4, 8):
        engine = Engine(model, options=ONE_BY_ONE, mesh=mesh(devices))
        results.append(found(engine.generate([[1, 5, 9]], params)[0]))
        [(keys, _)] = engine.programs._pages
        assert keys.addressable_shards[0].data.shape[2] == CONFIG["num_kv_heads"] // devices
    assert_bits_equal(results[1], results[0])
    assert_bits_equal(results[2], results[0])


def smallest() -> None:
    """Sums of two leaves on one device and two."""
    model = ServedLlama(llama(num_heads=2, num_kv_heads=2))
    cut = [Engine(model.partitioned(mesh(n), leaves=2), options=ONE_BY_ONE) for n in (1, 2)]
    one, two = (engine.generate([[1, 5, 9]], SamplingParams(max_new_tokens=3, seed=1, logprobs=True)) for engine in cut)
    assert_bits_equal(found(two[0]), found(one[0]))


def plain() -> None:
    """The control: with JAX's own products and sums, log-probabilities depend on the number of devices."""
    options = EngineOptions(**{**vars(SMALL), "enable_deterministic_inference": False})
    one, many = (
        Engine(ServedLlama(llama()), options=options, mesh=mesh(n)).generate(PROMPTS[:1], PARAMS[0])[0] for n in (1, 8)
    )
    with pytest.raises(AssertionError):
        assert_bits_equal(found(many), found(one))


def one_program() -> None:
    """A step as one program, as on GPUs, with a prefix that is read once."""
    model = ServedLlama(llama(num_layers=2))
    expected = served(Engine(model, options=SMALL, mesh=mesh(1)))
    cut = model.partitioned(mesh(2))
    cut.one_program = True
    assert cut.least_common_prefix is not None
    engine = Engine(cut, options=SMALL)
    assert_bits_equal(served(engine), expected)
    leaves, tree = jax.tree.flatten(cut)
    assert jax.tree.structure(jax.tree.unflatten(tree, leaves)) == tree


def eight_bits() -> None:
    """Caches of 8 bits, whose scales belong to the heads of each device."""
    plain = served(Engine(ServedLlama(llama()), options=SMALL, mesh=mesh(1)))
    one, two = (Engine(ServedLlama(llama(), cache_dtype="int8"), options=SMALL, mesh=mesh(n)) for n in (1, 2))
    of_one = served(one)
    assert_bits_equal(served(two), of_one)
    assert_bits_equal(two.model._cache.scales, one.model._cache.scales)
    with pytest.raises(AssertionError):  # they are not the bits of a cache without scales
        assert_bits_equal(of_one, plain)
    leaves, tree = jax.tree.flatten(two.model)
    assert jax.tree.structure(jax.tree.unflatten(tree, leaves)) == tree
    for engine in (one, two):  # scales belong to the weights
        engine.update_weights(llama(1))
    assert_bits_equal(two.model._cache.scales, one.model._cache.scales)
    assert_bits_equal(served(two), served(one))

    params, results = SamplingParams(max_new_tokens=3, seed=1, logprobs=True), []
    for devices in (1, 8):
        model = ServedLlama(llama(), cache_dtype="float8_e4m3fn")
        engine = Engine(model, options=ONE_BY_ONE, mesh=mesh(devices))
        results.append(found(engine.generate([[1, 5, 9]], params)[0]))
        [(keys, _)] = engine.programs._pages
        held = keys.addressable_shards[0].data
        assert (held.dtype, held.shape[2]) == ("float8_e4m3fn", CONFIG["num_kv_heads"] // devices)
    assert_bits_equal(results[1], results[0])


def disaggregated() -> None:
    """Prompts on two devices and generation on another: the bits of one device that does both."""
    model = ServedLlama(llama(num_heads=2, num_kv_heads=2))
    options = EngineOptions(page_size=4, num_pages=8, max_running=1, max_prefill_tokens=1, max_length=16)
    params = SamplingParams(max_new_tokens=3, seed=3, logprobs=True)
    prompts = [[1, 5, 9, 7, 3, 3, 2, 1, 8]]

    def engine(on: Mesh, **changes: Any) -> Engine:
        return Engine(model.partitioned(on, leaves=2), options=EngineOptions(**{**vars(options), **changes}))

    expected = found(engine(mesh(1)).generate(prompts, params)[0])
    prefill, decode = engine(mesh(2)), engine(Mesh(np.array(jax.devices()[4:5]), ("model",)))
    both = DisaggregatedEngine(prefill=prefill, decode=decode)
    for _ in range(2):  # with a cold cache and a warm one
        [output] = both.generate(prompts, params)
        assert_bits_equal(found(output), expected)
        assert output.cached_tokens == 8
    assert (prefill.stats().generated_tokens, decode.stats().generated_tokens) == (0, 6)
    assert (prefill.stats().kv_cache_usage, decode.stats().kv_cache_usage) == (0, 0)
    both.update_weights(llama(1, num_heads=2, num_kv_heads=2))
    [changed] = both.generate(prompts, params)
    decode.flush_cache()
    assert_bits_equal(found(changed), found(decode.generate(prompts, params)[0]))
    with pytest.raises(AssertionError):  # they are other weights
        assert_bits_equal(found(changed), expected)

    def message(second: Engine) -> str:
        with pytest.raises(ValueError, match="DisaggregatedEngine") as error:
            DisaggregatedEngine(prefill=prefill, decode=second)
        return str(error.value)

    assert "must be two engines, got one" in message(prefill)
    assert "the same page_size, got 4 and 8" in message(engine(mesh(1), page_size=8))
    assert "decode has prefix_cache=False" in message(engine(mesh(1), prefix_cache=False))
    deeper = ServedLlama(llama(num_heads=2, num_kv_heads=2, num_layers=2))
    assert "pages of the same shapes" in message(Engine(deeper, options=options))
    assert "under the same contracts" in message(Engine(model, options=options))
    assert "the same weights, got the versions '1' and 'default'" in message(engine(mesh(1)))


def weights() -> None:
    """Other weights go into the shards: of a model on one device, of its state, of a model on another mesh."""
    expected = served(Engine(ServedLlama(llama(1)), options=SMALL, mesh=mesh(2)))
    engine = Engine(ServedLlama(llama(0)), options=SMALL, mesh=mesh(2))
    before = served(engine)
    compiled = engine.stats().compilations
    for new in (llama(1), nnx.state(llama(1)), partition(llama(1), mesh(8))):
        engine.update_weights(llama(0))
        assert_bits_equal(served(engine), before)
        engine.update_weights(new)
        assert_bits_equal(served(engine), expected)
        kernel = engine.model.model.params["blocks"][0]["attention"]["out"]["kernel"]
        assert kernel.sharding.spec == P("model", None)
        assert len(kernel.sharding.device_set) == 2
    assert engine.stats().compilations == compiled

    def message(new: Any) -> str:
        with pytest.raises((TypeError, ValueError), match="ServedPartitionedLlama") as error:
            engine.update_weights(new)
        return str(error.value)

    assert "must be a Llama, its nnx.State or a PartitionedLlama, got dict" in message({})
    assert "the names, shapes and dtypes" in message(nnx.state(llama(num_layers=2)))
    assert "got rope_theta=500.0 instead of 10000.0." in message(llama(rope_theta=500.0))
    # The shapes are equal.
    assert "got rms_norm_eps=0.5 instead of 1e-05." in message(partition(llama(rms_norm_eps=0.5), mesh(2)))
    assert "sums of 8 leaves, got 4" in message(partition(llama(), mesh(2), leaves=4))
    assert_bits_equal(served(engine), expected)


def fingerprints() -> None:
    """They name the leaves, and not the number of devices."""
    narrow = Llama(llama().config, dtype="bfloat16", param_dtype="bfloat16", rngs=nnx.Rngs(0))
    for model in (ServedLlama(narrow), ServedLlama(filled(llama))):
        one, eight = (fingerprint(model.partitioned(mesh(n)), page_size=4) for n in (1, 8))
        assert one == eight
    assert one != fingerprint(model.partitioned(mesh(1), leaves=4), page_size=4)
    assert one != fingerprint(model, page_size=4)


def folder(path: Path, seed: int = 0) -> Path:
    """Writes a checkpoint whose heads eight devices divide."""
    fields = checkpoint_files.hf_fields()
    fields |= {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 1}
    config = LlamaConfig(
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_layers=1,
        num_heads=8,
        num_kv_heads=8,
        head_dim=fields["head_dim"],
        rope_theta=fields["rope_theta"],
        rms_norm_eps=fields["rms_norm_eps"],
        tie_word_embeddings=False,
        max_position_embeddings=fields["max_position_embeddings"],
        bos_token_id=0,
        eos_token_ids=(1,),
    )
    rng = np.random.default_rng(seed)
    drawn = {n: rng.standard_normal(shape) / shape[-1] ** 0.5 for n, shape in expected_shapes(config)}
    return checkpoint_files.write_folder(path, fields, {n: x.astype(np.float32) for n, x in drawn.items()})


def command() -> None:
    """`bijax test-deterministic` of a checkpoint that is cut over 2 devices and over 8."""
    small = "--trials 2 --max-new-tokens 4 --max-running 2 --max-prefill-tokens 8 --num-pages 16 --page-size 4 --json"
    with tempfile.TemporaryDirectory() as made:
        model = str(folder(Path(made) / "m"))
        for devices in ("2", "8"):
            arguments = ["test-deterministic", "--model", model, "--tensor-parallel-size", devices, *small.split()]
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                assert cli.main(arguments) == 0
            [row] = json.loads(printed.getvalue())["requests"]
            assert row["unique_bits"] == 1


def start() -> None:
    """What `bijax serve` starts: equal engines on devices of their own, and weights for both from disk."""
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "warm_up", lambda self, on_progress: on_progress(1, 1))
        checkpoint, cut = load_checkpoint(folder(Path(made) / "0")), ModelOptions(tensor_parallel_size=2)
        engines, name = _warm_engines(checkpoint, 2, cut, SMALL, {})
        [one], same = _warm_engines(checkpoint, 1, ModelOptions(tensor_parallel_size=1), SMALL, {})
        assert name == same
        devices = [set(engine.model.mesh.devices.flat) for engine in engines]
        assert [len(d) for d in devices] == [2, 2]
        assert not devices[0] & devices[1]
        assert_bits_equal(*(jax.device_get(engine.model.model.params) for engine in engines))
        assert_bits_equal(*(jax.device_get(engine.model.model.params) for engine in (engines[0], one)))
        new = load_weights(load_checkpoint(folder(Path(made) / "1", seed=1)), cut)
        for engine, own in zip(engines, devices, strict=True):
            engine.update_weights(new, "1")
            assert_bits_equal(jax.device_get(engine.model.model.params), jax.device_get(new.params))
            assert all(leaf.sharding.device_set == own for leaf in jax.tree.leaves(engine.model.model.params))


def flags() -> None:
    """Options that do not fit the model or the devices end the command before weights are read."""

    def message(*arguments: str) -> str:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            assert cli.main(["serve", "--model", model, *arguments]) == 2
        return printed.getvalue()

    with tempfile.TemporaryDirectory() as made:
        model = str(folder(Path(made) / "m"))
        parallel = "--tensor-parallel-size"
        assert "tensor_parallel_size must be a power of two, got 3" in message(parallel, "3")
        more = message(parallel, "16", "--tensor-parallel-leaves", "16")
        assert "must divide the key/value heads, got 16 devices and 8 heads" in more
        assert "at least 16 devices for 2 models on 8 devices each, got 8" in message(
            parallel, "8", "--data-parallel-size", "2"
        )
        assert "data_parallel_size must be 1 without tensor_parallel_size" in message("--data-parallel-size", "2")


def bad_input() -> None:
    model = ServedLlama(llama())

    def message(make: Callable[[], Any]) -> str:
        with pytest.raises((TypeError, ValueError)) as error:
            make()
        return str(error.value)

    def refused(model: Any, given: Any) -> str:
        return message(lambda: Engine(model, options=SMALL, mesh=given))

    assert "mesh must be a jax.sharding.Mesh or None, got int" in refused(model, 2)
    assert "a model that has no method partitioned, got a mesh of {'model': 2}" in refused(
        ToyModel.random(seed=0), mesh(2)
    )
    assert "axis must be one of the mesh's axes ('data',)" in refused(model, jax.make_mesh((2,), ("data",)))
    assert "must be a power of two, got 3" in refused(model, mesh(3))
    assert "key/value heads, got 4 devices and 2 heads" in refused(ServedLlama(llama(num_kv_heads=2)), mesh(4))
    assert "must divide the vocabulary, got 60" in refused(ServedLlama(llama(vocab_size=60)), mesh(2))
    assert "must divide the intermediate size, got 60" in refused(ServedLlama(llama(intermediate_size=60)), mesh(2))
    assert "got 8 leaves for the 16 devices" in message(lambda: check_sizes("model", 16, 8))
    for given, wanted in (
        ({"tensor_parallel_size": 3}, "tensor_parallel_size must be a power of two, got 3"),
        (
            {"tensor_parallel_size": 2, "tensor_parallel_leaves": 6},
            "tensor_parallel_leaves must be a power of two, got 6",
        ),
        ({"tensor_parallel_size": 16}, "at most tensor_parallel_leaves, got 16 and 8"),
        ({"tensor_parallel_leaves": 4}, "must be 8 without tensor_parallel_size, got 4"),
    ):
        assert wanted in message(lambda given=given: ModelOptions(**given))
    assert "expected at least 16 devices for a model on 16 devices, got 8" in message(lambda: mesh_for(16))
    with tempfile.TemporaryDirectory() as made:
        checkpoint = load_checkpoint(folder(Path(made) / "m"))
        cut = ModelOptions(tensor_parallel_size=4)
        check_model(checkpoint, cut, number=2)
        assert "at least 12 devices for 3 models on 4 devices each" in message(
            lambda: check_model(checkpoint, cut, number=3)
        )
        assert "data_parallel_size must be 1 without tensor_parallel_size, got 2" in message(
            lambda: check_model(checkpoint, ModelOptions(), number=2)
        )
        first, second = load_models(checkpoint, cut, number=2)
        assert not set(first.mesh.devices.flat) & set(second.mesh.devices.flat)
    # Devices of a CPU share the memory of the host: several have no more room than one.
    options = EngineOptions(page_size=4, max_running=10**6)
    pages = [choose_num_pages(model.partitioned(mesh(n)), options, max_length=64) for n in (1, 8)]
    assert pages[1] == pytest.approx(pages[0], rel=0.2)


CHECKS: dict[str, Callable[[], None]] = {
    "smallest": smallest,
    "bad input": bad_input,
    "flags": flags,
    "start": start,
    "any number of devices": any_number,
    "plain": plain,
    "one program": one_program,
    "weights": weights,
    "disaggregated": disaggregated,
    "8 bits": eight_bits,
    "fingerprints": fingerprints,
    "command": command,
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(name, flush=True)

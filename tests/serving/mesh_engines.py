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
from bijax.determinism.modes import MODES, Run
from bijax.serving import Engine, EngineOptions, ModelOptions, RequestOutput, SamplingParams
from bijax.serving.cache_size import choose_num_pages
from bijax.serving.fingerprint import fingerprint
from bijax.serving.load import check_model, load_models, tensor_mesh
from bijax.serving.toy import ToyModel
from bijax.testing import assert_bits_equal
from flax_layers import Llama, ServedLlama, partition
from flax_layers.checkpoint import LlamaConfig, load_checkpoint
from flax_layers.checkpoint.weights import expected_shapes
from flax_layers.models.partition_checks import check_sizes
from tests.layers import checkpoint_files

CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 1,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 8,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_ids": (2,),
}
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


def engines(counts: tuple[int, ...], **changes: Any) -> None:
    model = ServedLlama(llama(**changes))
    expected = served(Engine(model, options=SMALL, mesh=mesh(1)))
    for devices in counts:
        engine = Engine(model, options=SMALL, mesh=mesh(devices))
        assert_bits_equal(served(engine), expected)
        [(keys, _)] = engine._programs._pages
        assert keys.addressable_shards[0].data.shape[2] == CONFIG["num_kv_heads"] // devices


def smallest() -> None:
    """One sequence, one token at a time, sums of two leaves: the fewest programs."""
    model = ServedLlama(llama(num_heads=2, num_kv_heads=2))
    options = EngineOptions(page_size=4, num_pages=4, max_running=1, max_prefill_tokens=1, max_length=16)
    cut = [Engine(model.partitioned(mesh(n), leaves=2), options=options) for n in (1, 2)]
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
        kernel = engine._model.model.params["blocks"][0]["attention"]["out"]["kernel"]
        assert kernel.sharding.spec == P("model", None)
        assert len(kernel.sharding.device_set) == 2
    assert engine.stats().compilations == compiled

    def message(new: Any) -> str:
        with pytest.raises((TypeError, ValueError), match="ServedPartitionedLlama") as error:
            engine.update_weights(new)
        return str(error.value)

    assert "must be a Llama, its nnx.State or a PartitionedLlama, got dict" in message({})
    assert "the names, shapes and dtypes" in message(nnx.state(llama(num_layers=2)))
    assert "with the numbers of this one" in message(llama(rope_theta=500.0))
    assert "sums of 8 leaves, got 4" in message(partition(llama(), mesh(2), leaves=4))
    assert_bits_equal(served(engine), expected)


def modes(counts: tuple[int, ...]) -> None:
    """Each mode of `bijax test-deterministic`: the samples of one device."""
    model = ServedLlama(llama())
    params = SamplingParams(max_new_tokens=5, seed=7, logprobs=True, ignore_eos=True)
    tokens = np.random.default_rng(0).integers(0, 64, 40).tolist()

    def samples(mode: str, devices: int) -> Any:
        def open_engine(*, reload: bool = False, **changes: Any) -> Engine:
            given = {name: value for name, value in changes.items() if value is not None}
            own = ServedLlama(llama()) if reload else model
            return Engine(own, options=EngineOptions(**{**vars(SMALL), **given}), mesh=mesh(devices))

        run = Run(open_engine, lambda n: (tokens * (n // len(tokens) + 1))[:n], params, 3, lambda done: None)
        every = MODES[mode](run)
        assert all(s.unique_bits == 1 for s in every), mode
        return [(s.name, s.completions[0].tokens, [p.logprob for p in s.completions[0].logprobs]) for s in every]

    for mode in MODES:
        expected = samples(mode, 1)
        for devices in counts:
            assert samples(mode, devices) == expected, (mode, devices)


def fingerprints() -> None:
    """They name the leaves, and not the number of devices."""
    model = ServedLlama(llama())
    one, eight = (fingerprint(model.partitioned(mesh(n)), page_size=4) for n in (1, 8))
    assert one == eight
    assert one != fingerprint(model.partitioned(mesh(1), leaves=4), page_size=4)
    assert one != fingerprint(model, page_size=4)


def folder(path: Path) -> Path:
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
    rng = np.random.default_rng(0)
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
        ({"tensor_parallel_size": 2, "quantization": "int8"}, "quantization must be None with tensor_parallel_size"),
    ):
        assert wanted in message(lambda given=given: ModelOptions(**given))
    assert "expected at least 16 devices for a model on 16 devices, got 8" in message(lambda: tensor_mesh(16))
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
    "one device and two": lambda: engines((2,)),
    "bad input": bad_input,
    "any number of devices": lambda: engines((4, 8), qk_norm=True, qkv_bias=True, tie_word_embeddings=False),
    "plain": plain,
    "one program": one_program,
    "weights": weights,
    "fingerprints": fingerprints,
    "command": command,
    "modes on two devices": lambda: modes((2,)),
    "modes on four and eight devices": lambda: modes((4, 8)),
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(name, flush=True)

"""From the name of a model to the model that is served: dtype, int8, names on the hub, memory of the cache."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from bijax import cli
from bijax.serving import Engine, EngineOptions, ModelOptions, SamplingParams, cache_size
from bijax.serving.cache_size import available_bytes, cache_bytes, choose_num_pages
from bijax.serving.load import find_model, load_model, load_update
from bijax.serving.toy import ToyModel
from bijax.testing import assert_bits_equal
from flax_layers.checkpoint import CheckpointError, load_checkpoint
from flax_layers.models.layers import QuantLinear
from tests.layers import checkpoint_files as files

GIB = 2**30


def folder(path: Path, **fields: Any) -> Path:
    return files.write_folder(path, files.hf_fields() | fields, files.random_weights(), shards=2)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "float32"),
        ({}, "float32"),  # that of the stored embedding
    ],
)
def test_auto_is_the_dtype_of_the_checkpoint(tmp_path: Path, fields: dict[str, str], expected: str) -> None:
    fields = {"dtype": None, "torch_dtype": None} | fields
    checkpoint = load_checkpoint(folder(tmp_path / "m", **fields))
    assert checkpoint.dtype == expected


def test_a_gguf_file_has_the_dtype_of_its_embedding(tmp_path: Path) -> None:
    tensors = files.gguf_tensors(files.random_weights())
    path = files.write_gguf(tmp_path / "full.gguf", tensors=tensors)
    assert load_checkpoint(path).dtype == "float32"
    half = {name: value.astype(np.float16) if value.ndim == 2 else value for name, value in tensors.items()}
    assert load_checkpoint(files.write_gguf(tmp_path / "half.gguf", tensors=half)).dtype == "float16"


def test_a_dtype_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="dtype must be one of bfloat16, float16, float32, got 'int4'"):
        load_checkpoint(folder(tmp_path / "m", dtype="int4"))


def test_the_option_decides_on_weights_and_cache(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(folder(tmp_path / "m", dtype="bfloat16"))
    for dtype, expected in (("auto", "bfloat16"), ("float16", "float16"), ("float32", "float32")):
        served = load_model(checkpoint, ModelOptions(dtype=dtype))
        cache = jax.eval_shape(lambda served=served: served.init_pages(2, 4))
        assert {a.dtype.name for a in jax.tree.leaves(cache)} == {expected}
        assert {a.dtype.name for a in jax.tree.leaves(nnx.state(served.model, nnx.Param))} == {expected}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rms_norm_eps": 0.5}, "have the configuration of the model, got rms_norm_eps=0.5 instead of 1e-05"),
        ({"rope_theta": 500.0}, "have the configuration of the model, got rope_theta=500.0 instead of 10000.0"),
        ({"eos_token_id": 2}, None),  # which no number depends on
    ],
)
@pytest.mark.parametrize("devices", [None, 1])
def test_other_weights_must_have_the_configuration(
    tmp_path: Path, fields: dict[str, Any], message: str | None, devices: int | None
) -> None:
    """Their shapes are those of the model, which would compute with its own configuration."""
    options = ModelOptions(tensor_parallel_size=devices)
    served = load_model(load_checkpoint(folder(tmp_path / "m")), options)
    other = load_update(load_checkpoint(folder(tmp_path / "other", **fields)), options)
    if message is None:
        served.with_weights(other)
    else:
        with pytest.raises(ValueError, match=message):
            served.with_weights(other)


def test_the_error_names_the_array_that_differs(tmp_path: Path) -> None:
    served = load_model(load_checkpoint(folder(tmp_path / "m")), ModelOptions())
    other = load_model(load_checkpoint(folder(tmp_path / "m")), ModelOptions(dtype="bfloat16")).model
    with pytest.raises(ValueError, match=r"'kernel'\].value expected float32\[.*\], got bfloat16\[.*\]\."):
        served.with_weights(other)


def test_int8_is_for_all_linear_layers_but_the_output(tmp_path: Path) -> None:
    served = load_model(load_checkpoint(folder(tmp_path / "m")), ModelOptions(quantization="int8"))
    attention, mlp = served.model.blocks[0].attention, served.model.blocks[0].mlp
    assert all(isinstance(layer, QuantLinear) for layer in (attention.qkv, attention.out, mlp.gate_up, mlp.down))
    assert not isinstance(served.model.lm_head, QuantLinear)


@pytest.mark.tier("full")  # the layers' own sweeps run in `make test`
def test_int8_is_row_invariant_in_the_engine(tmp_path: Path) -> None:
    served = load_model(load_checkpoint(folder(tmp_path / "m")), ModelOptions(quantization="int8"))
    engine = Engine(served, options=EngineOptions(page_size=4, num_pages=64, max_running=4, max_prefill_tokens=16))
    params = SamplingParams(temperature=0.0, max_new_tokens=4, logprobs=True)
    prompts = [[5, 9, 12], [7] * 9, [3, 4, 5, 6, 7]]
    together = engine.generate(prompts, params)
    for prompt, one in zip(prompts, together, strict=True):
        [alone] = engine.generate([prompt], params)
        assert alone.completions[0].tokens == one.completions[0].tokens
        bits = [[np.float32(p.logprob) for p in o.completions[0].logprobs] for o in (alone, one)]
        assert_bits_equal(*map(np.array, bits))


def test_a_path_that_exists_is_not_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    assert find_model("owner/model") == Path("owner/model")
    assert find_model("no/such/model") == Path("no/such/model")
    assert find_model("weights.gguf") == Path("weights.gguf")


def test_a_model_of_the_hub_is_taken_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    requested = []

    def snapshot_download(name: str, **how: Any) -> str:
        requested.append((name, how.get("local_files_only")))
        if how.get("local_files_only"):
            raise FileNotFoundError("not in the cache")
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert find_model("some-owner/some-model") == tmp_path
    assert requested == [("some-owner/some-model", True), ("some-owner/some-model", None)]


def test_without_a_network_the_message_says_how_to_download(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = pytest.importorskip("huggingface_hub")

    monkeypatch.setattr(hub, "snapshot_download", lambda name, **how: _refuse(how))
    assert cli.main(["serve", "--model", "some-owner/some-model"]) == 2
    message = capsys.readouterr().err
    assert "ConnectionError: no route)" in message
    assert "hf download some-owner/some-model --local-dir some-model" in message


def _refuse(how: dict[str, Any]) -> str:
    raise FileNotFoundError if how.get("local_files_only") else ConnectionError("no route\nto the hub")


@dataclasses.dataclass
class Device:
    """A GPU with a limit."""

    limit: int
    used: int

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.limit, "bytes_in_use": self.used}


def test_on_a_gpu_weights_and_cache_share_a_fraction_of_its_memory() -> None:
    gpu: Any = Device(80 * GIB, 20 * GIB)
    assert cache_bytes(gpu, 0.5) == 20 * GIB
    assert cache_bytes(gpu, None) == int(80 * GIB * 0.85) - 20 * GIB


def test_on_a_cpu_the_cache_is_small_unless_it_is_asked_for() -> None:
    cpu = jax.devices("cpu")[0]
    assert 0 < cache_bytes(cpu, None) <= GIB
    assert cache_bytes(cpu, 0.5) <= available_bytes()


def test_the_number_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ToyModel.random(seed=0, width=32, max_length=256)
    page = 2 * 8 * 32 * 4  # keys and values of 8 tokens, 32 wide, float32
    options = EngineOptions(page_size=8, max_running=2)
    monkeypatch.setattr(cache_size, "cache_bytes", lambda device, fraction: 10 * page + 1)
    assert choose_num_pages(model, options, max_length=256) == 10
    assert choose_num_pages(model, options, max_length=8) == 2  # all that two sequences can use
    assert choose_num_pages(model, dataclasses.replace(options, num_pages=3), max_length=256) == 3
    monkeypatch.setattr(cache_size, "cache_bytes", lambda device, fraction: page - 1)
    with pytest.raises(ValueError, match=f"a page of the cache takes {page} bytes, and there is room for {page - 1}"):
        choose_num_pages(model, options, max_length=256)


def test_no_array_of_the_cache_is_too_large_to_be_addressed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ToyModel.random(seed=0, width=32, max_length=256)
    monkeypatch.setattr(cache_size, "cache_bytes", lambda device, fraction: 10**15)
    pages = choose_num_pages(model, EngineOptions(page_size=16, max_running=2**20), max_length=2**20)
    assert pages * 16 * 32 < 2**31 <= (pages + 1) * 16 * 32


def test_the_engine_says_how_many_tokens_its_cache_holds() -> None:
    model = ToyModel.random(seed=0, width=32, max_length=64)
    engine = Engine(model, options=EngineOptions(page_size=8, max_running=2))
    assert engine.options.num_pages == 16
    assert engine.stats().cache_tokens == 128

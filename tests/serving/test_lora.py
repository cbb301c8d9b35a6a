"""LoRA adapters in the engine and the server: bits of a request by its own adapter alone."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from bijax import cli
from bijax.serving import DisaggregatedEngine, Engine, EngineOptions, ModelOptions, RequestOutput, SamplingParams
from bijax.serving.load import load_model
from flax_layers.checkpoint import Checkpoint, load_checkpoint, load_lora
from flax_layers.checkpoint.weights import Weights
from flax_layers.models import Llama, ServedLlama
from tests.layers import adapter_files, reference_family
from tests.layers import checkpoint_files as files
from tests.serving.live import live
from tests.serving.traffic import bits

ADAPTERS: dict[str, dict[str, Any]] = {
    "red": {"rank": 4}, "green": {"rank": 4, "targets": ("q_proj", "v_proj"), "seed": 1},
    "teal": {"rank": 4, "targets": ("q_proj", "v_proj"), "seed": 3},
    "blue": {"rank": 2, "targets": ("gate_proj", "o_proj"), "layers": [1], "seed": 2},
}  # fmt: skip
CHAT: Any = [{"role": "user", "content": "a"}]
PROMPT = (5, 9, 12, 7, 5, 9, 12, 7, 5, 9)
SMALL: dict[str, Any] = {"page_size": 4, "num_pages": 64, "max_running": 2, "max_prefill_tokens": 16}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return load_checkpoint(files.write_folder(tmp_path_factory.mktemp("model"), weights=scaled()))


def scaled() -> dict[str, np.ndarray]:
    return {n: w / (w.shape[-1] ** 0.5 if w.ndim > 1 else 1) for n, w in files.random_weights().items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    for name, how in ADAPTERS.items():
        adapter_files.write(path / name, checkpoint.config, **how)
    return path


@pytest.fixture(scope="module")
def engines(checkpoint: Checkpoint, folder: Path) -> Any:
    """Engines by the adapters that they have, and by their options."""

    @functools.cache
    def engine(*names: str, one_program: bool = False, **options: Any) -> Engine:
        served = load_model(checkpoint, ModelOptions(lora_paths=tuple(f"{n}={folder / n}" for n in names)))
        if one_program:
            served = ServedLlama(served.model, one_program=True, adapters=served._adapters)
        return Engine(served, eos_token_ids=[1], options=EngineOptions(**SMALL | options))

    return engine


def params(adapter: str | None, **more: Any) -> SamplingParams:
    return SamplingParams(
        **{"adapter": adapter, "seed": 3, "max_new_tokens": 4, "logprobs": True, "ignore_eos": True} | more
    )


def one(engine: Engine, adapter: str | None, **more: Any) -> RequestOutput:
    [output] = engine.generate([PROMPT], params(adapter, **more))
    return output


@pytest.mark.tier("full")  # the layers' sweep runs in `make test`
def test_requests_with_other_adapters_change_nothing(engines: Any) -> None:
    """Beside another adapter, alone, from its own pages of a warm cache, and after a flush."""
    engine = engines("green", "teal")
    both = engine.generate([PROMPT, PROMPT], [params("green"), params("teal")])
    again = one(engine, "green")
    assert again.cached_tokens == 8
    engine.flush_cache()
    alone = one(engine, "green")
    assert (alone.cached_tokens, one(engine, None).cached_tokens) == (0, 0)
    assert bits(both[0]) == bits(again) == bits(alone)
    assert len({str(bits(output)) for output in (*both, one(engine, None))}) == 3


@pytest.mark.tier("full")
def test_a_request_has_the_bits_of_its_own_adapter(engines: Any) -> None:
    """In a model with that adapter alone, and among others; those without one have the bits of the model itself."""
    for name in ("green", "red", None):
        alone = bits(one(engines(*[name] if name else []), name))
        both = engines(*ADAPTERS).generate([PROMPT, PROMPT], [params(name), params("blue")])
        assert bits(both[0]) == alone
        assert bits(one(engines(*ADAPTERS), name)) == alone


@pytest.mark.tier("full")
@pytest.mark.parametrize("one_program", [False, True], ids=["a program a layer", "one program"])
@pytest.mark.parametrize("speculative", [0, 3], ids=["no drafts", "drafts"])
def test_among_eight_neighbours(engines: Any, one_program: bool, speculative: int) -> None:
    more = {"prompt_logprobs": True, "max_new_tokens": 8, "n": 2}
    options = {"max_running": 16, "num_pages": 120, "speculative_tokens": speculative, "one_program": one_program}
    everything = engines(*ADAPTERS, **options)
    neighbours = [*ADAPTERS, None] * 2
    prompts = [PROMPT, *(PROMPT[:n] for n in (1, 10, 4, 9, 8, 3, 10, 2, 7, 5))]
    for name in (*ADAPTERS, None):
        alone = bits(one(engines(*[name] if name else []), name, **more))
        requested = [params(name, **more), *(params(other, max_new_tokens=12) for other in neighbours)]
        assert bits(everything.generate(prompts, requested)[0]) == alone
        assert bits(everything.generate(prompts[::-1], requested[::-1])[-1]) == alone
        everything.flush_cache()
        assert bits(one(everything, name, **more)) == alone


@pytest.mark.tier("full")
def test_plain_jax_differs(engines: Any) -> None:
    """The control."""
    plain = engines(*ADAPTERS, enable_deterministic_inference=False, max_running=8)
    alone = [bits(one(plain, name, prompt_logprobs=True)) for name in ADAPTERS]
    plain.flush_cache()
    names = [*ADAPTERS, "red", "red", None]
    requested = [params(name, prompt_logprobs=i < len(ADAPTERS)) for i, name in enumerate(names)]
    outputs = plain.generate([PROMPT] * len(names), requested)
    assert [bits(output) for output in outputs[: len(ADAPTERS)]] != alone


@pytest.mark.tier("full")
def test_against_merged_weights_in_float64(engines: Any, checkpoint: Checkpoint, folder: Path) -> None:
    for name in ADAPTERS:
        lora = load_lora(folder / name, checkpoint.config)
        merged = {key: value.astype(np.float64) for key, value in checkpoint.weights.items()}
        for layer in lora.down:
            merged[f"{layer}.weight"] += lora.change(layer)
        logits = reference_family.logits(merged, files.hf_fields(), list(PROMPT))
        logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        expected = logprobs[np.arange(len(PROMPT) - 1), PROMPT[1:]]
        scored = one(engines(*ADAPTERS), name, prompt_logprobs=True).prompt_logprobs
        found = [p.logprob for p in scored or () if p is not None]
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.mark.tier("full")
def test_new_weights_keep_the_adapters(engines: Any, checkpoint: Checkpoint) -> None:
    engine, base = engines(*ADAPTERS), Llama.from_checkpoint(checkpoint)
    before = bits(one(engine, "red"))
    halved = Weights(checkpoint.weights.shapes, lambda name: checkpoint.weights[name] * np.float32(0.5))
    engine.update_weights(Llama.from_checkpoint(dataclasses.replace(checkpoint, weights=halved)))
    assert bits(one(engine, "red")) != before
    engine.update_weights(base)
    assert bits(one(engine, "red")) == before


def test_pages_of_an_adapter_go_from_engine_to_engine(engines: Any, checkpoint: Checkpoint, folder: Path) -> None:
    """The second engine, which numbers the adapters otherwise, takes the pages of each request's own one."""
    requested = [params(name) for name in ("green", "teal", None)]
    alone = engines("green", "teal").generate([PROMPT] * 3, requested)
    first, second = (
        Engine(
            load_model(checkpoint, ModelOptions(lora_paths=tuple(f"{n}={folder / n}" for n in names))),
            eos_token_ids=[1],
            options=EngineOptions(**SMALL),
        )
        for names in (("green", "teal"), ("teal", "green"))
    )
    both = DisaggregatedEngine(prefill=first, decode=second)
    found = both.generate([PROMPT] * 3, requested)
    assert [output.cached_tokens for output in found] == [8, 8, 8]
    assert [bits(output) for output in found] == [bits(output) for output in alone]
    assert len({str(bits(output)) for output in found}) == 3
    with pytest.raises(ValueError, match="adapter must be one of green, teal, or None for the model itself, got 'red'"):
        both.hand_over(PROMPT, "red")
    with pytest.raises(ValueError, match="must have the same adapters, got green, teal and none; load them into both"):
        DisaggregatedEngine(prefill=first, decode=engines())


def test_an_adapter_that_there_is_not(engines: Any) -> None:
    with pytest.raises(ValueError, match=r"adapter must be one of red, green, teal, blue, or None .* got 'pink'"):
        engines(*ADAPTERS).add(PROMPT, params("pink"))
    with pytest.raises(ValueError, match="adapter must be None: the model has none, got 'red'"):
        engines().add(PROMPT, params("red"))
    with pytest.raises(TypeError, match="adapter must be a string or None, got 1"):
        SamplingParams(adapter=1)  # type: ignore[arg-type]


def test_options() -> None:
    options = ModelOptions.read(environ={"BIJAX_LORA_PATHS": "a=x/y, z"})
    assert options.adapters() == {"a": Path("x/y"), "z": Path("z")}
    for given, message in (
        ({"enable_lora": True}, r"lora_paths must name an adapter with enable_lora, got \(\)"),
        ({"enable_lora": False, "lora_paths": ("a",)}, "lora_paths must be empty without enable_lora"),
        ({"lora_paths": ("a=x", "a=y")}, "lora_paths must have different names, got 'a' twice"),
        ({"lora_paths": ("=x",)}, "lora_paths must be of the form NAME=PATH, got '=x'"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelOptions(**given)  # type: ignore[arg-type]


def test_the_command_says_what_is_wrong_with_an_adapter(
    checkpoint: Checkpoint, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = files.write_folder(tmp_path / "model", weights=scaled())
    assert cli.main(["serve", "--model", str(model), "--lora-paths", f"a={folder / 'red'}", f"b={tmp_path}"]) == 2
    assert "is not a folder with adapter_config.json" in capsys.readouterr().err
    assert cli.main(["serve", "--model", str(model), "--port", "0", "--lora-paths", f"model={folder / 'red'}"]) == 2
    assert "an adapter must not have the model's name, got 'model'" in capsys.readouterr().err


def test_the_server_s_names() -> None:
    with live(adapters={"poet": "/adapters/poet"}) as server:
        base, card = server.get("/v1/models").json["data"]
        assert (base["id"], card["id"], card["parent"], card["root"]) == ("fake", "poet", "fake", "/adapters/poet")
        assert server.get("/v1/models/poet").json == card
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            reply = client.chat.completions.create(model="poet", messages=CHAT, max_tokens=1)
            assert reply.model == "poet"
            assert client.completions.create(model="fake:poet", prompt="a", max_tokens=1).model == "poet"
            client.responses.create(model="poet", input="a", max_output_tokens=1)
            assert client.completions.create(model="fake", prompt="a", max_tokens=1).model == "fake"
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "lora_path": "poet"})
        server.generate(text=["a", "b"], sampling_params={"max_new_tokens": 1}, lora_path=["poet", None])
        server.generate(text="a", sampling_params={"max_new_tokens": 1}, lora_path="poet")
        requested = [request.params.adapter for request in server.engine.requests]
        assert requested[:5] == ["poet", "poet", "poet", None, "poet"]
        assert sorted(map(str, requested[5:7])) == ["None", "poet"]
        assert requested[7] == "poet"
        for path, body, status, message in (
            (
                "/v1/completions",
                {"prompt": "a", "model": "x"},
                404,
                "model: no such model: 'x'; this server has 'fake',",
            ),
            ("/v1/score", {"query": "a", "items": "b", "model": "x"}, 404, "model: no such model: 'x'"),
            ("/v1/completions", {"prompt": "a", "lora_path": "x"}, 404, "lora_path: no such adapter: 'x'"),
            ("/generate", {"text": "a", "lora_path": "x"}, 404, "no such adapter: 'x'; this server has 'poet'"),
            ("/generate", {"text": "a", "lora_path": ["poet"] * 2}, 400, "lora_path: a list must have an entry"),
        ):
            reply = server.post(path, body)
            assert reply.status == status
            assert message in reply.error

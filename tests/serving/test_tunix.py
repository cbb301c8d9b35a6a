"""tunix with the engine as its rollout: trainer and sampler have the same bits."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

pytest.importorskip("tunix", reason="needs google-tunix, the extra `tunix`")

from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl import common
from tunix.rl.rollout.base_rollout import RolloutConfig

from bijax.integrations.tunix import EngineRollout, TunixLlama, shared_logprobs
from bijax.serving import EngineOptions
from flax_layers import Llama
from flax_layers.checkpoint import LlamaConfig

PAD, BOS, EOS = 0, 1, 2
OPTIONS = EngineOptions(page_size=4, num_pages=64, max_running=2, max_prefill_tokens=16)
CONFIG = RolloutConfig(max_tokens_to_generate=8, max_prompt_length=12, temperature=1.0, return_logprobs=True)
PROMPTS = ["abc", "abc", "hello", "x"]


class Letters:
    """A tokenizer of letters, which sampled tokens are not all."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 87 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(token + 87) for token in ids)

    def bos_id(self) -> int:
        return BOS

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


def make_model(seed: int = 0) -> TunixLlama:
    config = LlamaConfig(
        vocab_size=48, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32,
        rope_theta=10000.0, rms_norm_eps=1e-5, tie_word_embeddings=True, max_position_embeddings=64, bos_token_id=BOS,
        eos_token_ids=(EOS,))  # fmt: skip
    return TunixLlama(Llama(config, rngs=nnx.Rngs(seed)))


def make_rollout(model: TunixLlama) -> EngineRollout:
    return EngineRollout(model, TokenizerAdapter(Letters()), CONFIG, options=OPTIONS)


def trainer(model: TunixLlama, output: Any, **more: Any) -> list[np.ndarray]:
    """Returns the log-probabilities that tunix's trainer computes, without those of padding."""
    completions = np.full((len(output.tokens), CONFIG.max_tokens_to_generate), PAD, np.int32)
    for row, tokens in zip(completions, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    graph, state = nnx.split(model)
    found = common.compute_per_token_logps(
        graph, state, jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(completions), PAD, EOS, **more
    )
    return [np.asarray(row)[: len(tokens)] for row, tokens in zip(found, output.tokens, strict=True)]


def differing(ours: list[np.ndarray], theirs: list[np.ndarray]) -> int:
    pairs = zip(ours, theirs, strict=True)
    return sum(int((a.view(np.uint32) != b.view(np.uint32)).sum()) for a, b in pairs)


def test_trainer_and_sampler() -> None:
    """With one formula they are equal, before and after an update; the control is tunix's own formula."""
    jax.clear_caches()
    model = make_model()
    rollout = make_rollout(model)
    output = rollout.generate(PROMPTS, CONFIG)
    assert sum(map(len, output.tokens)) > 16
    assert output.tokens[0].tolist() != output.tokens[1].tolist()  # one prompt twice: each sample has its own seed
    assert output.text[0] == Letters().decode(output.tokens[0].tolist())
    assert output.left_padded_prompt_tokens[0].tolist() == [PAD] * 8 + [BOS, 10, 11, 12]
    assert differing(output.logprobs, trainer(model, output)) > 0
    jax.clear_caches()  # programs with the other formula
    stock = common.selective_log_softmax
    with shared_logprobs():
        assert differing(output.logprobs, trainer(model, output)) == 0
        rollout.update_params(nnx.state(make_model(seed=1), nnx.Param), (nnx.Param,))
        again = rollout.generate(PROMPTS, CONFIG)
        assert differing(again.logprobs, trainer(make_model(seed=1), again)) == 0
        assert differing(again.logprobs, trainer(model, again)) > 0  # not of the old weights
        [first, *_] = rollout.get_per_token_logps(again.left_padded_prompt_tokens, again.tokens[0][None].repeat(4, 0))
        assert differing([np.asarray(first)], again.logprobs[:1]) == 0
    assert common.selective_log_softmax is stock
    jax.clear_caches()


def test_samples_follow_the_seed_and_the_call() -> None:
    model = make_model()
    first, second = (make_rollout(model) for _ in range(2))
    found = [[row.tolist() for row in rollout.generate(PROMPTS, CONFIG).tokens] for rollout in (first, second, second)]
    assert found[0] == found[1] != found[2]


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="the model must be a TunixLlama, got Llama"):
        make_rollout(make_model().llama)
    with pytest.raises(ValueError, match="at most max_prompt_length=12 tokens, got 21"):
        make_rollout(make_model()).generate(["a" * 20], CONFIG)
    with pytest.raises(ValueError, match="expected no cache"):
        make_model()(jnp.ones((1, 2), int), None, {}, None)


def test_grpo() -> None:
    """Tunix's GRPO learner, unchanged: two steps, in which the weights reach the engine."""
    import optax
    from tunix.rl import rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner

    made: list[EngineRollout] = []

    class Noted(EngineRollout):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            made.append(self)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster_config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh),
        rollout_engine=functools.partial(Noted, options=OPTIONS),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(1e-3), eval_every_n_steps=100, max_steps=2, mini_batch_size=2,
            train_micro_batch_size=2,
        ),
        rollout_config=CONFIG,
        offload_to_cpu=False,
    )  # fmt: skip
    with shared_logprobs():
        cluster = rl_cluster.RLCluster(
            actor=make_model(), reference=make_model(), tokenizer=Letters(), cluster_config=cluster_config
        )
        learner = GRPOLearner(
            rl_cluster=cluster,
            algo_config=GRPOConfig(num_generations=2, num_iterations=1, beta=0.0),
            reward_fns=lambda prompts, completions, **_: [float(len(set(text))) for text in completions],
        )
        learner.train([{"prompts": np.array(["abc", "hello"])}, {"prompts": np.array(["x", "ab"])}])
        [rollout] = made
        output = rollout.generate(PROMPTS, CONFIG)
        assert differing(output.logprobs, trainer(cluster.actor_trainer.model, output)) == 0
        assert rollout._engine.weight_version != "default"
        assert differing(output.logprobs, trainer(make_model(), output)) > 0
    jax.clear_caches()


@pytest.mark.tier("full")
def test_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import grpo
    import tunix_grpo

    found = tunix_grpo.run(grpo.Settings(steps=2, layers=1, prompts=2, group=2))
    (before, tokens), (after, _), (own, _) = found.values()
    assert tokens > 2
    assert (before, after) == (0, 0)
    assert own > 0
    assert tunix_grpo.reward(["385="], ["8851"]) == [0.5]

"""GRPO with tunix, where trainer and sampler compute the same bits. Needs the extra `tunix`.

`python examples/tunix_grpo.py` trains a model like the one of `examples/grpo.py`, with its task, by tunix's own GRPO
learner: a prompt is three digits, and the reward the share of the sampled tokens that are the largest of them.
`EngineRollout` samples, tunix trains, and the weights reach the engine after each step. Before and after the training,
samples are drawn and their log-probabilities compared with those that tunix's trainer computes for the same tokens: no
bit differs. With tunix's own formula for log-probabilities some do.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

import grpo
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl import common, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from bijax.integrations.tunix import EngineRollout, TunixLlama, shared_logprobs
from bijax.serving import EngineOptions
from flax_layers import Llama
from flax_layers.checkpoint import LlamaConfig

EQUALS, PAD, BOS, EOS = range(10, 14)
"""The tokens after the digits, which are 0 to 9."""
OPTIONS = EngineOptions(page_size=4, num_pages=256, max_running=16, max_prefill_tokens=64)
ROLES = rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT


class Digits:
    """A tokenizer of digits and "="; the model may sample the other tokens too, which have no text."""

    def encode(self, text: str) -> list[int]:
        return [EQUALS if letter == "=" else int(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(str(token) if token < EQUALS else "=" if token == EQUALS else " " for token in ids)

    def bos_id(self) -> int:
        return BOS

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """Returns the share of each output that is the largest digit of its prompt."""
    pairs = zip(prompts, completions, strict=True)
    return [text.count(max(prompt.rstrip("="))) / max(1, len(text)) for prompt, text in pairs]


def make_model(settings: grpo.Settings) -> TunixLlama:
    """Returns a model with random weights; `Llama.from_checkpoint(load_checkpoint(PATH))` makes one from a file."""
    heads = settings.width // 64
    config = LlamaConfig(
        vocab_size=EOS + 1,
        hidden_size=settings.width,
        intermediate_size=settings.width * 8 // 3,
        num_layers=settings.layers,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=64,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        max_position_embeddings=64,
        bos_token_id=BOS,
        eos_token_ids=(EOS,),
    )
    return TunixLlama(Llama(config, dtype=jnp.dtype(settings.dtype), rngs=nnx.Rngs(settings.seed)))


def prompts(settings: grpo.Settings, step: int) -> list[str]:
    """Returns the prompts of a step."""
    digits = np.random.default_rng((settings.seed, step)).integers(0, 10, (settings.prompts, 3))
    return ["".join(map(str, row)) + "=" for row in digits.tolist()]


def make_cluster(settings: grpo.Settings) -> rl_cluster.RLCluster:
    """Returns tunix's cluster, in which `EngineRollout` samples."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(ROLES, mesh),
        rollout_engine=functools.partial(EngineRollout, options=OPTIONS),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(settings.learning_rate),
            eval_every_n_steps=settings.steps + 1,
            max_steps=settings.steps,
            mini_batch_size=settings.prompts,
            train_micro_batch_size=settings.prompts,
        ),
        rollout_config=rollout_config(settings),
        offload_to_cpu=False,
    )
    return rl_cluster.RLCluster(
        actor=make_model(settings), reference=make_model(settings), tokenizer=Digits(), cluster_config=config
    )


def rollout_config(settings: grpo.Settings) -> RolloutConfig:
    """Returns tunix's options. A sampled PAD ends a text: tunix would take it for padding."""
    return RolloutConfig(
        max_tokens_to_generate=settings.new_tokens,
        max_prompt_length=8,
        temperature=1.0,
        return_logprobs=True,
        eos_tokens=[EOS, PAD],
    )


def differing(settings: grpo.Settings, model: TunixLlama) -> tuple[int, int]:
    """Samples with a model; returns how many log-probabilities differ in tunix's trainer, and how many there are."""
    rollout = EngineRollout(model, TokenizerAdapter(Digits()), rollout_config(settings), options=OPTIONS)
    output = rollout.generate(prompts(settings, settings.steps), rollout_config(settings))
    completions = np.full((len(output.tokens), settings.new_tokens), PAD, np.int32)
    for row, tokens in zip(completions, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    graph, weights = nnx.split(model)
    found = common.compute_per_token_logps(
        graph, weights, jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(completions), PAD, EOS
    )
    pairs = [(np.asarray(theirs)[: len(ours)], ours) for theirs, ours in zip(found, output.logprobs, strict=True)]
    return sum(int((a.view(np.uint32) != b.view(np.uint32)).sum()) for a, b in pairs), sum(len(b) for _, b in pairs)


def run(settings: grpo.Settings) -> dict[str, tuple[int, int]]:
    """Trains, and compares before, after, and with tunix's own formula."""
    found = {}
    cluster = make_cluster(settings)
    with shared_logprobs():
        found["before training"] = differing(settings, cluster.actor_trainer.model)
        learner = GRPOLearner(
            rl_cluster=cluster,
            reward_fns=reward,
            algo_config=GRPOConfig(num_generations=settings.group, num_iterations=1, beta=0.0),
        )
        learner.train([{"prompts": np.array(prompts(settings, step))} for step in range(settings.steps)])
        found["after training"] = differing(settings, cluster.actor_trainer.model)
    jax.clear_caches()  # programs with the formula of bijax
    found["with tunix's own formula"] = differing(settings, cluster.actor_trainer.model)
    jax.clear_caches()
    return found


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if trainer and sampler had the same bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    settings = grpo.Settings(steps=parser.parse_args(argv).steps)
    found = run(settings)
    for when, (differ, tokens) in found.items():
        print(f"{when}: {differ} of {tokens} log-probabilities differ between trainer and sampler")
    return int(found["before training"][0] > 0 or found["after training"][0] > 0)


if __name__ == "__main__":
    sys.exit(main())

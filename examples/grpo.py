"""GRPO where trainer and sampler compute the same bits.

`python examples/grpo.py` trains a Llama model of four layers by reinforcement learning, in two minutes on two cores. A
prompt is three digits, and the reward the share of the sampled tokens that are the largest of them. Samples come from
`bijax.serving.Engine`, gradients from the same model under `jax.grad`; after each step the weights go back into the
engine in memory. The model computes in bfloat16. At every step the log-probabilities of both are compared: they are
equal to the last bit, so that the importance ratio is exactly 1 wherever the policy has not moved. Then the same run is
made with JAX's own operations. `--plot FILE` draws rewards, ratios, KL divergence and clipped tokens of both. With
`--hybrid` every other layer has linear attention.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from bijax.serving import Engine, EngineOptions, SamplingParams
from flax_layers import PLAIN, Llama, ServedLlama
from flax_layers.checkpoint import LinearAttentionConfig, LlamaConfig
from flax_layers.ops import INVARIANT

EQUALS = 10
"""The token after the digits, which are 0 to 9."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """A run.

    Attributes:
        steps: Optimizer steps.
        prompts: Prompts of a step.
        group: Samples of a prompt, among which rewards are compared.
        new_tokens: Tokens of a sample.
        together: Samples that the engine decodes at once.
        width: Of the residual stream.
        head_dim: Width of a head, a divisor of `width`.
        layers: Of the model.
        learning_rate: Of Adam.
        clip: Ratios farther from 1 than this give no gradient.
        dtype: Of the computation; the weights are float32.
        seed: Of weights, prompts and samples.
        invariant: Whether to compute with bijax, or with JAX's own operations.
        hybrid: Whether every other layer has linear attention by the gated delta rule, as in Qwen3-Next.
    """

    steps: int = 60
    prompts: int = 8
    group: int = 8
    new_tokens: int = 4
    together: int = 8
    width: int = 192
    head_dim: int = 64
    layers: int = 4
    learning_rate: float = 3e-4
    clip: float = 0.2
    dtype: str = "bfloat16"
    seed: int = 0
    invariant: bool = True
    hybrid: bool = False


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The results of a step.

    Attributes:
        reward: Mean of the rewards.
        differing: Number of tokens whose log-probabilities differ in bits.
        tokens: Number of tokens.
        difference: Largest difference between the log-probabilities of trainer and sampler.
        ratios: The smallest and the largest importance ratio.
        kl: KL divergence of the trainer's policy from the sampler's, estimated from the sampled tokens.
        clipped: Share of the tokens whose ratio lies outside of the clip range.
    """

    reward: float
    differing: int
    tokens: int
    difference: float
    ratios: tuple[float, float]
    kl: float
    clipped: float

    @property
    def ratio(self) -> float:
        """The importance ratio farthest from 1."""
        return max(self.ratios, key=lambda ratio: abs(ratio - 1))


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Samples of a step.

    Attributes:
        tokens: (B, T) int32, prompt and output.
        logprobs: (B, N) float32, of the output, as the sampler computed them.
        advantages: (B,) float32.
        reward: Mean of the rewards.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    reward: float


def train(settings: Settings, on_step: Callable[[int, Comparison], None]) -> list[Comparison]:
    """Trains a new model.

    Args:
        settings: The run.
        on_step: Called after each step.

    Returns:
        The results of each step.
    """
    model = make_model(settings)
    graph, weights, rest = nnx.split(model, nnx.Param, ...)
    engine = Engine(ServedLlama(model), options=engine_options(settings))
    optimizer = optax.adam(settings.learning_rate)
    moments = optimizer.init(weights)

    @jax.jit
    def update(weights: Any, moments: Any, rollout: Any) -> Any:
        (_, found), gradient = jax.value_and_grad(loss, has_aux=True)(weights, graph, rest, rollout, settings.clip)
        changes, moments = optimizer.update(gradient, moments, weights)
        return optax.apply_updates(weights, changes), moments, found

    comparisons = []
    for step in range(settings.steps):
        rollout = sample(engine, settings, step)
        arrays = (rollout.tokens, rollout.logprobs, rollout.advantages)
        weights, moments, (logprobs, ratios) = update(weights, moments, arrays)
        # In memory: the engine gets the trainer's arrays, and empties its cache.
        engine.update_weights(nnx.state(nnx.merge(graph, weights, rest)), version=str(step + 1))
        comparisons.append(compare(rollout, np.asarray(logprobs), np.asarray(ratios), settings.clip))
        on_step(step, comparisons[-1])
    return comparisons


def make_model(settings: Settings) -> Llama:
    """Returns a model with random weights, of the proportions of SmolLM2-135M."""
    size, linear = settings.head_dim, None
    heads = settings.width // size
    if settings.hybrid:
        sizes = {"num_key_heads": heads, "num_value_heads": heads, "key_dim": size, "value_dim": size}
        linear = LinearAttentionConfig(**sizes, layers=(True, False))
    config = LlamaConfig(
        vocab_size=EQUALS + 1,
        hidden_size=settings.width,
        intermediate_size=settings.width * 8 // 3,
        num_layers=settings.layers,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=size,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_ids=(),
        linear=linear,
    )
    ops = INVARIANT if settings.invariant else PLAIN
    return Llama(config, dtype=jnp.dtype(settings.dtype), ops=ops, rngs=nnx.Rngs(settings.seed))


def engine_options(settings: Settings) -> EngineOptions:
    """Returns options with room for the samples that are decoded at once."""
    return EngineOptions(
        page_size=4,
        num_pages=16 * settings.together,
        max_running=settings.together,
        max_prefill_tokens=16,
        enable_deterministic_inference=settings.invariant,
    )


def sample(engine: Engine, settings: Settings, step: int) -> Rollout:
    """Returns samples with rewards, which are compared with those of the same prompt."""
    rng = np.random.default_rng((settings.seed, step))
    prompts = [[*digits, EQUALS] for digits in rng.integers(0, 10, (settings.prompts, 3)).tolist()]
    params = [
        SamplingParams(
            max_new_tokens=settings.new_tokens,
            n=settings.group,
            seed=(step * settings.prompts + index) * settings.group,
            logprobs=True,
        )
        for index in range(settings.prompts)
    ]
    outputs = engine.generate(prompts, params)
    completions = [(o.prompt_tokens, c) for o in outputs for c in o.completions]
    rewards = np.array([reward(prompt, c.tokens) for prompt, c in completions], np.float32)
    groups = rewards.reshape(settings.prompts, settings.group)
    advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)
    return Rollout(
        np.array([prompt + c.tokens for prompt, c in completions], np.int32),
        np.array([[p.logprob for p in c.logprobs] for _, c in completions], np.float32),
        advantages.reshape(-1),
        float(rewards.mean()),
    )


def reward(prompt: tuple[int, ...], output: tuple[int, ...]) -> float:
    """Returns the share of the output's tokens that are the largest digit of the prompt."""
    return sum(token == max(prompt[:-1]) for token in output) / len(output)


def loss(weights: Any, graph: Any, rest: Any, rollout: Any, clip: float) -> Any:
    """Returns the loss of GRPO, and the trainer's log-probabilities with the importance ratios.

    Source: Z. Shao et al., "DeepSeekMath" (https://arxiv.org/abs/2402.03300), equation 3, without the KL term.
    """
    tokens, sampled, advantages = rollout
    model = nnx.merge(graph, weights, rest)
    logprobs = token_logprobs(model, tokens)[:, -sampled.shape[1] :]
    ratios = jnp.exp(logprobs - sampled)
    advantages = advantages[:, None]
    gain = jnp.minimum(ratios * advantages, jnp.clip(ratios, 1 - clip, 1 + clip) * advantages)
    return -gain.mean(), (logprobs, ratios)


def token_logprobs(model: Llama, tokens: jax.Array) -> jax.Array:
    """Returns the log-probability of each token but the first, (B, T - 1), as the engine's sampler computes it."""
    logprobs = model.norm.ops.log_softmax(model(tokens)[:, :-1])
    return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]


def compare(rollout: Rollout, logprobs: np.ndarray, ratios: np.ndarray, clip: float) -> Comparison:
    """Compares the log-probabilities of trainer and sampler, bit by bit.

    The estimator of the KL divergence is the mean of r - 1 - log r over the sampled tokens, with the ratios r.

    Source: J. Schulman, "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html).
    """
    differing = logprobs.view(np.uint32) != rollout.logprobs.view(np.uint32)
    exact = ratios.astype(np.float64)
    return Comparison(
        reward=rollout.reward,
        differing=int(differing.sum()),
        tokens=differing.size,
        difference=float(np.abs(logprobs - rollout.logprobs).max()),
        ratios=(float(ratios.min()), float(ratios.max())),
        kl=float((exact - 1 - np.log(exact)).mean()),
        clipped=float((np.abs(exact - 1) > clip).mean()),
    )


def draw(runs: dict[str, list[Comparison]], axes: Any) -> None:
    """Draws rewards, ratios, KL divergence and clipped tokens into four axes of matplotlib."""
    reward, ratio, kl, clipped = axes.flat
    for (name, comparisons), colour in zip(runs.items(), ("#2f8f6b", "#c0271f"), strict=False):
        steps = range(len(comparisons))
        reward.plot([c.reward for c in comparisons], label=name, color=colour)
        ratio.fill_between(steps, *zip(*(c.ratios for c in comparisons), strict=True), color=colour, alpha=0.35, lw=1.5)
        kl.plot([c.kl for c in comparisons], color=colour)
        clipped.plot([100 * c.clipped for c in comparisons], color=colour)
    reward.set(title="mean reward", xlabel="step")
    ratio.set(title="importance ratio, smallest to largest", xlabel="step")
    kl.set(title="KL divergence of trainer and sampler", xlabel="step")
    clipped.set(title="tokens outside of the clip range, %", xlabel="step")
    clipped.set_ylim(0, max(1, clipped.get_ylim()[1]))
    reward.legend()


def main(argv: list[str] | None = None) -> int:
    """Runs both ways; returns 0 if trainer and sampler had the same bits with bijax."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=Settings.steps, help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default=Settings.dtype,
        help="dtype of the model (default: %(default)s)",
    )
    parser.add_argument("--hybrid", action="store_true", help="linear attention in every other layer")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE", help="where to save the picture")
    parsed = parser.parse_args(argv)
    runs: dict[str, list[Comparison]] = {}
    for name, invariant in (("bijax", True), ("plain JAX", False)):
        print(f"{name}\nstep  reward  tokens that differ  smallest ratio  largest ratio  KL       clipped")
        settings = Settings(steps=parsed.steps, dtype=parsed.dtype, invariant=invariant, hybrid=parsed.hybrid)
        runs[name] = train(settings, functools.partial(_print, settings.steps))
    if parsed.plot is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 6), layout="constrained")
        draw(runs, figure.subplots(2, 2))
        figure.savefig(parsed.plot)
    return int(any(c.differing for c in runs["bijax"]))


def _print(steps: int, step: int, c: Comparison) -> None:
    if step % 5 == 0 or step == steps - 1:
        smallest, largest = c.ratios
        print(
            f"{step:4}  {c.reward:6.3f}  {c.differing:11} of {c.tokens:4}  {smallest:14.7g}  {largest:13.7g}"
            f"  {c.kl:<7.1e}  {c.clipped:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())

"""The trainer of `examples/grpo.py` computes the log-probabilities of its sampler, to the last bit."""

import contextlib
import dataclasses
import functools
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from bijax.serving import Engine
from examples import grpo
from examples.grpo import Comparison, Rollout, Settings, compare, main, train
from tests.layers.parameters import filled

SMALL = Settings(prompts=2, group=2, new_tokens=3, together=1, width=32, head_dim=8, layers=1)
SAME = (0, 0.0, (1.0, 1.0), 0.0, 0.0, 12)


def numbers(found: Comparison) -> tuple[int, float, tuple[float, float], float, float, int]:
    return found.differing, found.difference, found.ratios, found.kl, found.clipped, found.tokens


def test_trainer_and_sampler_have_the_same_bits() -> None:
    """At each step, and so with new weights; ratios are exactly 1. A sampler that keeps old weights is seen."""
    # Not by `monkeypatch`, with which nothing is taken from what other processes of the run have compared.
    with contextlib.ExitStack() as stack:
        model = filled(functools.partial(grpo.make_model, SMALL), seed=1)
        stack.enter_context(mock.patch.object(grpo, "make_model", return_value=model))

        def on_step(step: int, _: Comparison) -> None:
            if step == 1:  # the weights after the next step do not reach the sampler
                stack.enter_context(mock.patch.object(Engine, "update_weights"))

        found = train(dataclasses.replace(SMALL, steps=4), on_step)
    assert [numbers(c) for c in found[:3]] == [SAME] * 3
    assert found[3].differing > 6
    assert abs(found[3].ratio - 1) > 1e-4
    assert found[3].kl > 0


@pytest.mark.tier("full")
def test_with_linear_attention() -> None:
    """The same for a hybrid, whose states are computed again with the new weights; plain JAX is the control."""
    small = dataclasses.replace(SMALL, width=64, head_dim=64, layers=2, hybrid=True)
    found = train(dataclasses.replace(small, steps=3), lambda *_: None)
    assert [numbers(c) for c in found] == [SAME] * 3
    [plain] = train(dataclasses.replace(small, steps=1, invariant=False), lambda *_: None)
    assert plain.differing > 0


@pytest.mark.tier("full")
def test_plain_operations_differ() -> None:
    """The control of bits; the test above has one of its own, old weights."""
    [found] = train(dataclasses.replace(SMALL, steps=1, width=128, head_dim=64, invariant=False), lambda *_: None)
    assert found.differing > 0


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints both runs, draws them, and fails if a bit differs with bijax."""
    for wrong in (0, 3):
        found = Comparison(0.5, wrong, 12, difference=0.0, ratios=(1.0, 1.0), kl=0.0, clipped=0.25)
        monkeypatch.setattr(
            "examples.grpo.train", lambda settings, on_step, found=found: [on_step(0, found), found][1:]
        )
        picture = tmp_path / "grpo.png"
        assert main(["--steps", "1", "--plot", str(picture)]) == (wrong > 0)
        assert picture.stat().st_size > 0
        printed = capsys.readouterr().out
        assert printed.count(f"{wrong} of   12") == printed.count("25.0%") == 2


def test_ratios_and_divergence() -> None:
    """Against their definitions: a policy that gives every token 1.5 times the probability."""
    sampled = np.log(np.array([[0.2, 0.4]], np.float32))
    rollout = Rollout(np.zeros((1, 4), np.int32), sampled, np.zeros(1, np.float32), 0.0)
    ratios = np.array([[1.5, 0.9]], np.float32)
    found = compare(rollout, sampled + np.log(ratios), ratios, clip=0.2)
    assert (found.differing, found.clipped) == (2, 0.5)
    assert found.ratios == pytest.approx((0.9, 1.5))
    assert found.ratio == pytest.approx(1.5)
    assert found.kl == pytest.approx((0.4 - np.log(1.35)) / 2, rel=1e-6)

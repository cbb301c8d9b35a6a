"""Engines with overlap on eight devices of a CPU, run as a program of its own, which `test_mesh` starts."""

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax import cli
from bijax.parallel import BatchSplit, Overlap
from bijax.serving import Engine, EngineOptions, SamplingParams
from bijax.serving.fingerprint import fingerprint
from bijax.testing import assert_bits_equal
from flax_layers import PLAIN, Routing, ServedLlama, convert
from flax_layers.checkpoint.experts import ExpertsConfig
from flax_layers.models import batch_children, overlapped_programs
from tests.arrays import on_device
from tests.layers.partitioned_experts import llama, mesh
from tests.serving.mesh_engines import folder as dense_folder
from tests.serving.mesh_engines import found
from tests.serving.mesh_experts import checkpointed, folder

OPTIONS: dict[str, Any] = {
    "page_size": 4, "num_pages": 24, "max_running": 4, "max_prefill_tokens": 16, "max_length": 24,
}  # fmt: skip
TWO: dict[str, Any] = {"enable_two_batch_overlap": True, "moe_a2a_backend": "all_to_all"}
SINGLE: dict[str, Any] = {"enable_single_batch_overlap": True, "moe_a2a_backend": "all_to_all"}
PROMPTS = [[1, 5, 9, 7, 3, 8, 9, 10, 11], [3, 3, 2], [4, 5, 6], [1, 2, 3, 4, 5]]
PARAMS = [
    SamplingParams(max_new_tokens=3, seed=1, logprobs=True, top_logprobs=2),
    SamplingParams(max_new_tokens=4, seed=2, logprobs=True, prompt_logprobs=True),
    SamplingParams(max_new_tokens=2, seed=3, logprobs=True, top_p=0.9),
    SamplingParams(max_new_tokens=3, seed=4, logprobs=True),
]

NO_SHARED = ExpertsConfig(intermediate_size=16, routing=Routing(num_experts=8, topk=3))


def engine(model: Any, on: Any, **more: Any) -> Engine:
    return Engine(model, options=EngineOptions(**{**OPTIONS, **more}), mesh=on)


def results(engine: Engine) -> list[Any]:
    """Returns the results of requests together, twice, with a cold cache and a warm one."""
    cold, warm = ([found(output) for output in engine.generate(PROMPTS, PARAMS)] for _ in range(2))
    assert_bits_equal(warm, cold)
    return cold


FEW: dict[str, Any] = {"max_running": 2, "max_prefill_tokens": 8}


def engines(model: Any, *overlaps: dict[str, Any], on: tuple[int, int] = (2, 2), **options: Any) -> None:
    """Requests together with and without overlap, on one device and on several."""
    expected = results(engine(model, mesh(1, 1), **options))
    for overlap in overlaps:
        assert_bits_equal(results(engine(model, mesh(*on), **overlap, **options)), expected)


def alone(kind: str, *meshes: tuple[int, int]) -> None:
    """A request whose prompt is cut in two chunks, then two that decode, with a checkpoint's model."""
    model = checkpointed(kind)
    options = {**OPTIONS, "page_size": 16, "max_running": 2, "max_length": 64} if kind == "hybrid" else OPTIONS
    prompts, params = [PROMPTS[0] + PROMPTS[3], PROMPTS[1]], PARAMS[:2]
    expected: list[Any] = []
    for on in ((1, 1), *meshes):
        for overlap in ({},) if on == (1, 1) else (TWO, SINGLE):
            served = Engine(
                model.partitioned(mesh(*on), leaves=4),
                options=EngineOptions(**{**options, **overlap, "max_running": 2}),
            )
            got = [found(output) for output in served.generate(prompts, params)]
            expected = expected or got
            assert_bits_equal(got, expected)


def one_program() -> None:
    """A step as one program, as on GPUs, with other weights in the shards and the fingerprint of no overlap."""
    plain = ServedLlama(llama(qk_norm=True)).partitioned(mesh(1, 2))
    expected = results(Engine(plain, options=EngineOptions(**OPTIONS)))
    for overlap in (TWO, SINGLE):
        cut = ServedLlama(llama(qk_norm=True)).partitioned(mesh(1, 2))
        cut.one_program = True
        served = Engine(cut, options=EngineOptions(**{**OPTIONS, **overlap}))
        model: Any = served.model
        assert model.one_program
        assert model.overlap == served.options.overlap()
        assert_bits_equal(results(served), expected)
        leaves, tree = jax.tree.flatten(model)
        assert jax.tree.structure(jax.tree.unflatten(tree, leaves)) == tree
        assert tree != jax.tree.structure(model.overlapped(None))
        assert fingerprint(model, page_size=4) == fingerprint(plain, page_size=4)
        changed = model.with_weights(jax.tree.map(lambda x: x * 2, llama(qk_norm=True)))
        assert changed.overlap == model.overlap
        assert model.plain().overlap is None


def warm_up() -> None:
    """All programs are compiled before the first request."""
    served = engine(ServedLlama(llama()), mesh(1, 2), **TWO, **{"max_running": 2, "max_prefill_tokens": 8})
    served.warm_up()
    compiled, programs = served.stats().compilations, overlapped_programs.extend_overlapped._cache_size()
    served.generate(PROMPTS, [SamplingParams(max_new_tokens=3, seed=1)] * 4)
    assert served.stats().compilations == compiled
    assert overlapped_programs.extend_overlapped._cache_size() == programs


LENGTHS = np.array([5, 0, 6, 1], np.int32)


def extended(served: Any, split: BatchSplit | None) -> tuple[np.ndarray, Any]:
    """Returns hidden of valid tokens and the written pages, after a prefix of three tokens of each sequence."""
    tokens = on_device(np.random.default_rng(0).integers(3, 60, (4, 9)), jnp.int32)
    table = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
    pages = served.init_pages(12, 4)
    zeros = jnp.zeros(4, jnp.int32)
    _, pages = served.overlapped(None).extend(pages, tokens[:, :3], table, zeros, zeros + 3)

    class Chosen(Overlap):
        def split(self, sequences: int, length: int) -> BatchSplit | None:
            return split

    served = served.overlapped(None if split is None else Chosen("two_batch"))
    hidden, pages = served.extend(pages, tokens[:, 3:], table, zeros + 3, jnp.asarray(LENGTHS))
    valid = np.arange(6) < LENGTHS[:, None]
    held = (np.arange(12) < 3 + LENGTHS[:, None]).reshape(12, 4)
    return np.asarray(hidden)[valid], [np.asarray(array)[held] for array in jax.tree.leaves(pages)]


SPLITS = (BatchSplit(0, 1), BatchSplit(0, 5), BatchSplit(1), BatchSplit(1, 2), BatchSplit(2, 3), BatchSplit(3, 1))


def any_split() -> None:
    """Splits that no rule would choose: chunks of one token, sequences without tokens, halves without any."""
    served = ServedLlama(llama(qk_norm=True)).partitioned(mesh(1, 4))
    expected = extended(served, None)
    for split in SPLITS:
        assert_bits_equal(extended(served, split), expected)


def wrong_split() -> None:
    """The controls: a second chunk at the positions of the first, and a first half that lacks tokens."""
    served = ServedLlama(llama()).partitioned(mesh(1, 2))
    expected = extended(served, None)
    right = batch_children.child_places

    def at_the_start(places: Any, split: BatchSplit) -> Any:
        first, second = right(places, split)
        return first, second._replace(start=places.start[split.sequences :])

    def too_few(places: Any, split: BatchSplit) -> Any:
        first, second = right(places, split)
        return first._replace(lengths=places.lengths[: split.sequences + 1] - 1), second

    for number, wrong in enumerate((at_the_start, too_few)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(overlapped_programs, "child_places", wrong)
            with pytest.raises(AssertionError):
                assert_bits_equal(extended(served, BatchSplit(0, 2 + number)), expected)
    assert_bits_equal(extended(served, BatchSplit(0, 4)), expected)


def plain() -> None:
    """The control in JAX's own operations: halves of a batch have other bits than the whole."""
    model = jax.tree.map(lambda x: x * 8 if x.ndim == 3 else x, llama())
    cut = ServedLlama(model).partitioned(mesh(1, 2)).model
    tokens = on_device(np.random.default_rng(0).integers(3, 60, (8, 3)))
    for ops, equal in ((cut, True), (cut.with_ops(PLAIN), False)):
        run = jax.jit(ops.logits)
        whole = np.asarray(run(ops.params, tokens))
        halves = np.concatenate([np.asarray(run(ops.params, half)) for half in (tokens[:1], tokens[1:])])
        assert np.array_equal(whole, halves) == equal


def bad_input() -> None:
    model = ServedLlama(llama())

    def message(make: Callable[[], Any]) -> str:
        with pytest.raises(ValueError, match="overlap") as error:
            make()
        return str(error.value)

    assert "experts are on several devices, got a ServedPartitionedLlama with experts on 1" in message(
        lambda: engine(model, mesh(1, 1), **TWO)
    )
    assert "enable_single_batch_overlap needs a model whose experts" in message(lambda: engine(model, None, **SINGLE))
    dense = ServedLlama(llama(experts=None))
    assert "with experts on 1; pass a mesh" in message(lambda: engine(dense, jax.make_mesh((2,), ("model",)), **TWO))
    served = model.partitioned(mesh(1, 2))
    assert "got a model with stock JAX operations" in message(lambda: served.plain().overlapped(Overlap("two_batch")))
    assert "with no experts on other devices" in message(
        lambda: model.partitioned(mesh(1, 1)).overlapped(Overlap("two_batch"))
    )

    def refused(path: Path, *arguments: str, command: str = "serve") -> str:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            assert cli.main([command, "--model", str(path), *arguments]) == 2
        return printed.getvalue()

    with tempfile.TemporaryDirectory() as made:
        experts, without = folder(Path(made) / "e"), dense_folder(Path(made) / "d")
        two, backend = "--enable-two-batch-overlap", ("--moe-a2a-backend", "all_to_all")
        on = ("--tensor-parallel-size", "2")
        assert "moe_a2a_backend must be all_to_all with enable_two_batch_overlap, got 'none'" in refused(experts, two)
        assert "choose one" in refused(experts, two, "--enable-single-batch-overlap", *backend)
        assert "got one with experts on 1 device; set" in refused(experts, two, *backend)
        assert "got one with no experts; set" in refused(without, two, *backend, *on)
        assert "speculative_tokens must be 0 with" in refused(experts, two, *backend, *on, "--speculative-tokens", "2")
        plain = refused(experts, two, *backend, *on, "--plain", command="test-deterministic")
        assert "must be False without enable_deterministic_inference" in plain


def command() -> None:
    """`bijax test-deterministic` with both kinds of overlap."""
    small = "--trials 2 --max-new-tokens 3 --max-running 2 --max-prefill-tokens 4 --num-pages 16 --page-size 4 --json"
    with tempfile.TemporaryDirectory() as made:
        model = str(folder(Path(made) / "m"))
        for kind in ("two", "single"):
            over = f"--tensor-parallel-size 2 --expert-parallel-size 2 --enable-{kind}-batch-overlap".split()
            given = [*over, "--moe-a2a-backend", "all_to_all", *small.split()]
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                assert cli.main(["test-deterministic", "--model", model, *given]) == 0
            assert '"unique_bits": 1' in printed.getvalue()


CHECKS: dict[str, Callable[[], None]] = {
    "overlap": lambda: engines(ServedLlama(llama(qk_norm=True)), TWO, SINGLE),
    "overlap without shared experts": lambda: engines(
        ServedLlama(llama(experts=NO_SHARED)), TWO, {**TWO, "tbo_token_distribution_threshold": 0.0}, SINGLE, **FEW
    ),
    "overlap of int8": lambda: engines(
        ServedLlama(convert(llama(), quantize="int8"), cache_dtype="int8"), TWO, SINGLE, **FEW
    ),
    "overlap on 8 devices": lambda: engines(ServedLlama(llama(num_layers=2)), TWO, SINGLE, on=(2, 4), **FEW),
    "overlap of DeepSeek": lambda: alone("deepseek", (1, 2), (4, 2)),
    "overlap of Qwen3-Next": lambda: alone("hybrid", (2, 2)),
    "overlap in one program": one_program,
    "overlap after a warm-up": warm_up,
    "any split": any_split,
    "wrong splits": wrong_split,
    "plain halves": plain,
    "bad overlap": bad_input,
    "command with overlap": command,
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]()
        print(name, flush=True)

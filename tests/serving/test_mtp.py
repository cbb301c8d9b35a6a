"""Drafts by a head for multi-token prediction: they move no bit, and do not depend on company, cache or preemption."""

import functools
import tempfile
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bijax.cli import main
from bijax.determinism.command import MODES
from bijax.serving import Completion, DisaggregatedEngine, Engine, EngineOptions, ModelOptions, SamplingParams
from bijax.serving.draft_head import hand_out, repacked
from bijax.serving.fingerprint import fingerprint
from bijax.serving.load import load_model, load_update
from bijax.serving.pages import PagePool
from bijax.serving.prefix import PrefixCache
from bijax.serving.tokens import as_tokens
from bijax.serving.toy import ToyModel
from bijax.serving.toy_hybrid import CONFIG, random_head, random_model, toy_hybrid
from bijax.testing import assert_bits_equal
from flax_layers import Llama, MTPHead, ServedLlama
from flax_layers.checkpoint import CheckpointError, load_checkpoint
from flax_layers.models import DraftingPartitionedLlama, partition_head
from tests.layers import checkpoint_files as files
from tests.layers import mtp_files

DRAFTS: Final[dict[str, Any]] = {"speculative_algorithm": "mtp", "speculative_tokens": 3}
OPTIONS: Final[dict[str, Any]] = {
    "page_size": 16, "num_pages": 40, "max_running": 2, "max_prefill_tokens": 64, "snapshot_interval": 64,
}  # fmt: skip
SMALL: Final = "--max-running 2 --max-prefill-tokens 16 --num-pages 60 --page-size 4 --max-new-tokens 12".split()
FLAGS: Final = "--speculative-algorithm mtp --speculative-tokens 3 --trials 4".split()


def bits(completion: Completion) -> tuple[tuple[int, ...], bytes]:
    return completion.tokens, np.array([p.logprob for p in completion.logprobs], np.float32).tobytes()


def prompt(length: int, seed: int = 7) -> list[int]:
    return np.random.default_rng(seed).integers(0, 160, length).tolist()


def params(temperature: float, new: int = 40) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, temperature=temperature, seed=3, logprobs=True, ignore_eos=True)


def counts(engine: Engine) -> tuple[int, int]:
    stats = engine.stats()
    return stats.drafted_tokens, stats.accepted_tokens


class Bigrams:
    """A model whose next token depends on the last one alone, with a head that says the same, or something else.

    Attributes:
        entries: For each place of a page the token that the head's entry there was made of.
    """

    draft_head = "says the same"
    vocab_size, max_length, one_program, least_common_prefix = 24, 64, False, None

    def __init__(self, *, wrong: int = 0) -> None:
        self.table = (4 * np.random.default_rng(0).standard_normal((24, 24))).astype(np.float32)
        self.wrong = wrong
        self.entries: dict[tuple[int, int], int] = {}

    def init_pages(self, num_pages: int, page_size: int) -> Any:
        return jnp.zeros((num_pages, page_size))

    def extend(self, pages: Any, tokens: Any, *_: Any) -> Any:
        return tokens[..., None], pages

    def logits(self, hidden: Any) -> Any:
        return jnp.asarray(self.table[np.asarray(hidden)[:, 0]])

    def draft(self, pages: Any, hidden: Any, tokens: Any, table: Any, start: Any, lengths: Any, *, own: bool) -> Any:
        table, start, lengths = map(np.asarray, (table, start, lengths))
        for row, offset in np.argwhere(np.arange(tokens.shape[1]) < lengths[:, None]):
            page, place = divmod(int(start[row] + offset), 4)
            self.entries[int(table[row, page]), place] = int(tokens[row, offset])
        return (tokens[..., None] + self.wrong) % 24, pages

    def draft_logits(self, hidden: Any) -> Any:
        return self.logits(hidden)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_move_no_bit(temperature: float) -> None:
    """A head that says what the model says is always right, one that does not hardly ever: the tokens are the same.

    The head has the entry of each token in the page that holds it, made of the token after it.
    """
    requested, prompts = params(temperature, new=21), [[5, 7, 1, 2, 3, 9], [8, 8, 1]]
    options: dict[str, Any] = {"page_size": 4, "num_pages": 40, "max_running": 2, "max_prefill_tokens": 16}
    plain: Any = Bigrams()
    expected = [
        bits(o.completions[0]) for o in Engine(plain, options=EngineOptions(**options)).generate(prompts, requested)
    ]
    for wrong in (0, 1):
        model: Any = Bigrams(wrong=wrong)
        engine = Engine(model, options=EngineOptions(**options, **DRAFTS))
        found = [bits(output.completions[0]) for output in engine.generate(prompts, requested)]
        assert found == expected
        drafted, accepted = counts(engine)
        assert accepted == drafted > 20 if not wrong else accepted < drafted / 4
        for before, (tokens, _) in zip(prompts, found, strict=True):
            whole = [*before, *tokens]
            pages = engine.scheduler.match(as_tokens(whole))
            assert len(pages) == (len(whole) - 1) // 4
            kept = [model.entries[page, place] for page in pages for place in range(4)]
            assert kept == whole[1 : 1 + len(kept)]


def test_pages_are_found_by_the_token_after_them() -> None:
    """Since the head's last entry in a page depends on it."""
    pool = PagePool(8)
    cache = PrefixCache(pool, page_size=2, lookahead=1)
    pages = [pool.take() for _ in range(2)]
    cache.insert(as_tokens([1, 2, 3, 4]), pages)
    assert len(cache) == 1
    cache.insert(as_tokens([1, 2, 3, 4, 5]), pages)
    assert cache.match(as_tokens([1, 2, 3, 4, 5, 6]), limit=5) == pages
    assert cache.match(as_tokens([1, 2, 3, 4, 6, 6]), limit=5) == pages[:1]
    assert cache.match(as_tokens([1, 2, 4]), limit=2) == []
    usual = PrefixCache(pool, page_size=2)
    usual.insert(as_tokens([1, 2, 3, 4]), pages)
    assert len(usual) == 2


def test_pages_that_were_computed_again() -> None:
    """A sequence that went on from an earlier snapshot has pages of its own; the cache does not keep the others."""
    pool = PagePool(4)
    cache, tokens = PrefixCache(pool, page_size=2), as_tokens([1, 2, 3, 4])
    known, again, after = (pool.take() for _ in range(3))
    cache.insert(tokens[:2], [known])
    cache.insert(tokens, [again, after])
    assert cache.match(tokens, limit=4) == [known, after]  # somebody else holds it
    pool.release(known)
    pool.release(known)
    cache.insert(tokens, [again, after])
    assert cache.match(tokens, limit=4) == [again, after]
    assert pool.free == 2


class _Work:
    """Work of a sequence of tokens whose results it has."""

    def __init__(self, start: int, computed: int, tokens: list[int], *, finished: bool = False) -> None:
        self.start, self.tokens, self.samples = start, [0] * computed, True
        self.sequence: Any = type("Sequence", (), {})()
        self.sequence.tokens, self.sequence.finish_reason = as_tokens(tokens), "stop" if finished else None
        self.sequence.drafts = []


def test_inputs_and_drafts() -> None:
    """One of three drafts accepted, a part of a prompt, padding; drafts without room or after nan are left out."""
    works = [_Work(4, 4, [1, 2, 3, 4, 5, 6, 7]), _Work(0, 3, [9, 8, 7, 6, 5])]
    batch: Any = type("Batch", (), {"works": works, "shape": (3, 4)})()
    packed = np.zeros((3, 4 + 2 + 4), np.int32)
    packed[:, 0], packed[:, 4:6], packed[:, 6:] = (4, 0, 0), 77, 55
    found = repacked(batch, packed)
    assert found[:, :4].tolist() == [[4, 2, -1, -1], [0, 3, -1, -1], [0, 0, -1, -1]]
    assert found[:, 4:].tolist() == [[77, 77, 6, 7, 0, 0], [77, 77, 8, 7, 6, 0], [77, 77, 0, 0, 0, 0]]
    drafts = np.array([[1, 2, 3], [4, -1, 5], [6, 7, 8]])
    hand_out(works, drafts, found, np.array([7, 30, 0]))  # type: ignore[arg-type]
    assert [work.sequence.drafts for work in works] == [[1, 2], [4]]


@functools.cache
def hybrid() -> ServedLlama:
    return toy_hybrid(seed=1, draft_head=True)


@functools.cache
def expected(length: int, temperature: float) -> tuple[tuple[int, ...], bytes]:
    engine = Engine(toy_hybrid(seed=1), options=EngineOptions(**OPTIONS))
    (output,) = engine.generate([prompt(length)], params(temperature))
    return bits(output.completions[0])


@pytest.mark.tier("full")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_hybrid(temperature: float) -> None:
    """Alone, in company, from a warm prefix, in small chunks: one answer, and as many drafts accepted."""
    requested, found = params(temperature), set()
    for changed in ({}, {"max_prefill_tokens": 16}, {"prefix_cache": False}):
        engine = Engine(hybrid(), options=EngineOptions(**{**OPTIONS, **DRAFTS, **changed}))
        before = (0, 0)
        for _ in range(2):
            (output,) = engine.generate([prompt(60)], requested)
            assert bits(output.completions[0]) == expected(60, temperature)
            after = counts(engine)
            found.add((after[0] - before[0], after[1] - before[1]))
            before = after
    (alone,) = found
    assert alone[1] > 0
    engine = Engine(hybrid(), options=EngineOptions(**OPTIONS, **DRAFTS))
    outputs = engine.generate([prompt(60), prompt(60)[::-1]], requested)
    assert bits(outputs[0].completions[0]) == expected(60, temperature)
    other = Engine(hybrid(), options=EngineOptions(**OPTIONS, **DRAFTS))
    other.generate([prompt(60)[::-1]], requested)
    assert counts(engine) == (alone[0] + counts(other)[0], alone[1] + counts(other)[1])


@pytest.mark.tier("full")
def test_another_head_moves_no_bit() -> None:
    """The control: a head of other weights is right less often; and weights of the model alone leave the head."""
    accepted = []
    for head in (random_head(seed=1), MTPHead(CONFIG, rngs=nnx.Rngs(5))):
        engine = Engine(ServedLlama(random_model(seed=1), draft_head=head), options=EngineOptions(**OPTIONS, **DRAFTS))
        (output,) = engine.generate([prompt(60)], params(0.0))
        assert bits(output.completions[0]) == expected(60, 0.0)
        accepted.append(counts(engine)[1])
    assert accepted[0] > 2 * accepted[1]
    for weights in ((random_model(seed=2), random_head(seed=2)), random_model(seed=1)):
        engine.update_weights(weights)
        (output,) = engine.generate([prompt(60)], params(0.0))
    assert bits(output.completions[0]) == expected(60, 0.0)
    with pytest.raises(ValueError, match="the head must have the configuration of the model"):
        ServedLlama(random_model(seed=1), draft_head=MTPHead(files_config(), rngs=nnx.Rngs(0)))


def files_config() -> Any:
    return load_checkpoint_of("qwen3_5").config


@functools.cache
def load_checkpoint_of(kind: str) -> Any:
    return load_checkpoint(mtp_files.write_model(Path(tempfile.mkdtemp()), kind), tokenizer=False)


@pytest.mark.tier("full")
def test_drafts_are_those_of_the_formula() -> None:
    """The engine's first two drafts are the module's, applied to the whole sequence, and to its own output."""
    model, head = random_model(seed=1), random_head(seed=1)
    engine = Engine(hybrid(), options=EngineOptions(**{**OPTIONS, **DRAFTS, "max_prefill_tokens": 32}))

    @jax.jit
    def states(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = head.join(model.embed, model.norm, model.hidden(tokens)[:, :-1], tokens[:, 1:])
        return x, head.block(x, model.rotary(jnp.arange(x.shape[1])[None]))

    @jax.jit
    def further(x: jax.Array, y: jax.Array, token: jax.Array) -> jax.Array:
        x = jnp.concatenate([x, head.join(model.embed, head.norm, y[:, -1:], token)], axis=1)
        return head.logits(model, head.block(x, model.rotary(jnp.arange(x.shape[1])[None]))[:, -1])

    engine.add(prompt(50), params(0.0, new=20))
    seen = 0
    for _ in range(5):
        engine.step()
        (sequence,) = engine.scheduler.running
        if not sequence.drafts:
            continue
        tokens = np.array(sequence.tokens, np.int32)[None]
        x, y = states(tokens)
        first = int(jnp.argmax(head.logits(model, y[:, -1])))
        second = int(jnp.argmax(further(x, y, jnp.array([[first]]))))
        assert sequence.drafts[:2] == [first, second]
        seen += 1
    assert seen >= 2


@pytest.mark.tier("full")
def test_one_program() -> None:
    """As on a GPU, with two prompts whose parts have one shape in a step."""
    model = ServedLlama(random_model(seed=1), one_program=True, draft_head=random_head(seed=1))
    engine = Engine(model, options=EngineOptions(**OPTIONS, **DRAFTS))
    outputs = engine.generate([prompt(60), prompt(60)], params(1.0))
    assert {bits(output.completions[0]) for output in outputs} == {expected(60, 1.0)}
    assert counts(engine)[1] > 0
    compiled = Engine(model, options=EngineOptions(**{**OPTIONS, **DRAFTS, "max_running": 1, "max_prefill_tokens": 16}))
    compiled.warm_up()
    number = compiled.stats().compilations
    compiled.generate([prompt(60)], params(1.0))
    assert compiled.stats().compilations == number


@pytest.mark.tier("full")
def test_pages_are_handed_over_with_the_head() -> None:
    """From an engine for prompts to one that generates; as many drafts are accepted. The contracts are the model's."""
    served = load_model(load_checkpoint_of("deepseek_v3"), ModelOptions(), draft_head=True)
    requested = [row % served.vocab_size for row in prompt(30)]
    options = EngineOptions(page_size=4, num_pages=40, max_running=1, max_prefill_tokens=16, **DRAFTS)
    alone, first, second = (Engine(served, options=options) for _ in range(3))
    (expected,) = alone.generate([requested], params(1.0, new=12))
    both = DisaggregatedEngine(prefill=first, decode=second)
    (found,) = both.generate([requested], params(1.0, new=12))
    assert found.cached_tokens == 28
    assert bits(found.completions[0]) == bits(expected.completions[0])
    assert counts(second) == counts(alone)
    without = load_model(load_checkpoint_of("deepseek_v3"), ModelOptions())
    assert fingerprint(served, page_size=4) == fingerprint(without, page_size=4)
    lookup = EngineOptions(page_size=4, num_pages=40, max_running=1)
    with pytest.raises(ValueError, match="the same speculative_algorithm, got mtp and prompt_lookup"):
        DisaggregatedEngine(prefill=first, decode=Engine(served, options=lookup))


@pytest.mark.tier("full")
@pytest.mark.parametrize("mode", MODES)
def test_modes_with_a_hybrid(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["test-deterministic", "--model", "toy-hybrid", "--mode", mode]
    assert main([*command, *SMALL, *FLAGS]) == 0, capsys.readouterr().out


@pytest.mark.tier("full")
@pytest.mark.parametrize("mode", MODES)
def test_modes_with_deepseek(mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["test-deterministic", "--model", str(mtp_files.write_model(tmp_path, "deepseek_v3")), "--mode", mode]
    assert main([*command, *SMALL, *FLAGS]) == 0, capsys.readouterr().out


def test_loading(tmp_path: Path) -> None:
    """With the head only if it is requested; what cannot be drafted with is refused before weights are read."""
    checkpoint = load_checkpoint_of("deepseek_v3")
    served = load_model(checkpoint, ModelOptions(), draft_head=True)
    assert isinstance(served, ServedLlama)
    assert isinstance(served.draft_head, MTPHead)
    pages = jax.eval_shape(lambda: served.init_pages(5, 4))
    assert [x.shape for x in jax.tree.leaves(pages)] == [(5, 4, 1, 24)] * 3
    assert isinstance(load_update(checkpoint, ModelOptions()), Llama)
    again = served.with_weights(load_update(checkpoint, ModelOptions(), draft_head=True))
    assert_bits_equal(again.draft_head.fc.kernel[...], served.draft_head.fc.kernel[...])
    cut = load_model(checkpoint, ModelOptions(tensor_parallel_size=1, tensor_parallel_leaves=4), draft_head=True)
    assert isinstance(cut, DraftingPartitionedLlama)
    kernel = cut.draft_head.params["block"]["attention"]["out"]["kernel"]
    assert_bits_equal(jax.device_get(kernel), jax.device_get(served.draft_head.block.attention.out.kernel[...]))
    with pytest.raises(ValueError, match="the head must have the configuration of the model"):
        partition_head(random_head(seed=0), cut.model)
    folder = files.write_folder(tmp_path, files.hf_fields(), files.random_weights())
    with pytest.raises(CheckpointError, match="expected a checkpoint with an MTP head"):
        load_model(load_checkpoint(folder), ModelOptions(), draft_head=True)


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="speculative_tokens must be from 1 to 7 with speculative_algorithm='mtp'"):
        EngineOptions(speculative_algorithm="mtp")
    with pytest.raises(ValueError, match="speculative_algorithm must be one of prompt_lookup, mtp, got 'eagle'"):
        EngineOptions(speculative_algorithm="eagle")
    message = "speculative_algorithm='mtp' needs a model with a head for multi-token prediction, got ToyModel without"
    with pytest.raises(ValueError, match=message):
        Engine(ToyModel.random(seed=0), options=EngineOptions(**DRAFTS))

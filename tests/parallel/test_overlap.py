"""Overlap on the host: how batches are split, the order of stages, strategies, and what is traced."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bijax import parallel
from bijax.parallel import YIELD, BatchSplit, Exchange, Overlap, OverlapStrategy, Transfer

HOSTILE: tuple[list[int], ...] = (
    [1, 1],
    [1, 1, 1],
    [2],
    [3],
    [4097],
    [1, 4096],
    [4096, 1],
    [5, 5, 5, 5],
    [5, 5, 5],
    [0, 7],
    [7, 0],
    [0, 0, 2, 0],
    [1, 0, 0, 1],
    [3, 100, 2],
    [49, 51],
    [48, 52],
    [47, 53],
    [1] * 33,
)


@pytest.mark.parametrize("lengths", HOSTILE, ids=str)
def test_a_split_of_prompts_has_every_token_once(lengths: list[int]) -> None:
    for threshold in (0.0, 0.25, 0.48, 0.5):
        split = parallel.split_prefill(lengths, threshold=threshold)
        if split is None:
            assert threshold == 0 or sum(lengths) < 2
            continue
        first, second = split.children(lengths)
        tokens = [(i, t) for i, begin, end in (*first.pieces, *second.pieces) for t in range(begin, end)]
        assert tokens == [(i, t) for i, length in enumerate(lengths) for t in range(length)]
        middle = first.parent_token_range[1]
        assert (first.parent_token_range, second.parent_token_range) == ((0, middle), (middle, sum(lengths)))
        assert first.num_tokens == sum(end - begin for _, begin, end in first.pieces) > 0
        assert second.num_tokens == sum(end - begin for _, begin, end in second.pieces) > 0
        even_enough = min(first.num_tokens, second.num_tokens) >= threshold * sum(lengths)
        assert first.num_tokens == sum(lengths) // 2 or (even_enough and not split.tokens)


def test_where_prompts_are_split() -> None:
    split = parallel.split_prefill
    assert split([]) is split([0]) is split([1]) is split([0, 1, 0]) is None
    assert split([48, 52]) == BatchSplit(1)  # just even enough
    assert split([47, 53]) == BatchSplit(1, 3)
    assert split([53, 47]) == BatchSplit(0, 50)
    assert split([47, 53], threshold=0.47) == BatchSplit(1)
    assert split([9], threshold=0) is split([0, 9], threshold=0) is None
    assert split([1, 2, 1]) == BatchSplit(1, 1)
    assert split([1, 2, 1], threshold=0.25) == BatchSplit(2)  # of two equal places the later one
    assert split([5, 0, 5]) == BatchSplit(2)


def test_where_sequences_that_decode_are_split() -> None:
    assert [parallel.split_decode(n) for n in (0, 1)] == [None, None]
    assert [parallel.split_decode(n) for n in (2, 3, 8)] == [BatchSplit(1), BatchSplit(1), BatchSplit(4)]


def test_what_a_batch_of_rows_is_split_into() -> None:
    two = Overlap("two_batch")
    assert [two.split(*shape) for shape in ((1, 1), (4, 1), (1, 512), (4, 512))] == [
        *(None, BatchSplit(2), BatchSplit(0, 256), BatchSplit(2))
    ]
    assert Overlap("two_batch", 0.0).split(1, 512) is None
    assert Overlap("single_batch").split(4, 512) is None


def test_padding_of_a_half() -> None:
    first, _ = BatchSplit(1).children([5, 4])
    assert [first.padded_length(n) for n in (1, 4, 5, 8)] == [5, 8, 5, 8]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: parallel.split_prefill([1, -1]), ValueError, r"must not be negative, got \[1, -1\]"),
        (lambda: parallel.split_prefill([1.5, 2]), TypeError, "lengths"),  # type: ignore[list-item]
        (lambda: parallel.split_prefill([4], threshold=0.51), ValueError, r"from 0 to 0\.5, got 0\.51"),
        (lambda: parallel.split_prefill([4], threshold=float("nan")), ValueError, "got nan"),
        (lambda: parallel.split_prefill([4], threshold=True), TypeError, "must be a number, got True"),
        (lambda: parallel.split_decode(-1), ValueError, "must not be negative, got -1"),
        (lambda: parallel.split_decode(2.0), TypeError, "sequences"),  # type: ignore[arg-type]
        (lambda: BatchSplit(0, 0), ValueError, "got none of both"),
        (lambda: BatchSplit(-1, 2), ValueError, "sequences must not be negative, got -1"),
        (lambda: BatchSplit(2).children([3, 4]), ValueError, "2 sequences and 0 tokens must be less than the batch"),
        (lambda: BatchSplit(0, 3).children([3, 4]), ValueError, "0 sequences and 3 tokens must be less"),
        (lambda: BatchSplit(1).children([3, 4])[0].padded_length(0), ValueError, "multiple must be positive, got 0"),
        (lambda: Overlap("three_batch"), ValueError, "'two_batch' or 'single_batch', got 'three_batch'"),  # type: ignore[arg-type]
        (lambda: Overlap("two_batch", 0.7), ValueError, r"got 0\.7"),
        (lambda: parallel.turns(3, 3, 0), ValueError, "batches must be 1 or 2, got 3"),
        (lambda: parallel.turns(3, 2, 4), ValueError, "from 0 to the 3 stages, got 4"),
        (lambda: parallel.turns(3, 2, -1), ValueError, "from 0 to the 3 stages, got -1"),
        (lambda: parallel.turns(3, 2, 1.0), TypeError, "delta_stages"),  # type: ignore[arg-type]
        (lambda: OverlapStrategy(("a", YIELD)), ValueError, "each stage must have an operation"),
        (lambda: OverlapStrategy(("a", YIELD, YIELD, "b")), ValueError, "each stage must have an operation"),
        (lambda: OverlapStrategy(("a", YIELD, "a")), ValueError, "must be different ones"),
        (
            lambda: parallel.overlap_strategy("llama", "prefill"),
            ValueError,
            "family must be one of deepseek",
        ),
        (lambda: parallel.overlap_strategy("mimo", "verify"), ValueError, "mode must be one of prefill, decode"),  # type: ignore[arg-type]
        (lambda: parallel.overlap_strategy("mimo", "decode", batches=3), ValueError, "batches must be 1 or 2, got 3"),
        (lambda: parallel.join_parts([], None), ValueError, "at least one part, got none"),
    ],
)
def test_bad_input(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("stages", [1, 2, 3, 7])
def test_turns(stages: int) -> None:
    """Each half runs all its stages in order; the first is `delta_stages` ahead, and never late."""
    assert parallel.turns(stages, 1, 0) == [(0, stage) for stage in range(stages)]
    for delta in range(stages + 1):
        order = parallel.turns(stages, 2, delta)
        for half in (0, 1):
            assert [stage for batch, stage in order if batch == half] == list(range(stages))
        for stage in range(stages):
            assert order.index((0, stage)) < order.index((1, stage))
        for stage in range(delta, stages):
            assert order.index((1, stage - delta)) == order.index((0, stage)) + 1


def test_strategies() -> None:
    """Every family and mode: what waits for a transfer is in the stage after the one that starts it."""
    for family in ("deepseek", "qwen3_moe", "mimo"):
        for mode, number, delta in (("prefill", 3, 0), ("decode", 6, 2)):
            strategy = parallel.overlap_strategy(family, mode)  # type: ignore[arg-type]
            stages = strategy.stages
            assert (len(stages), strategy.delta_stages, strategy.ordered) == (number, delta, mode == "prefill")
            where = {name: index for index, names in enumerate(stages) for name in names}
            assert where["dispatch_b"] == where["dispatch_a"] + 1
            assert where["combine_b"] == where["combine_a"] + 1
            assert ("shared_experts" in where) == (family == "deepseek")
    assert parallel.overlap_strategy("qwen3_moe", "decode") == parallel.overlap_strategy("mimo", "decode")


def traced(ordered: bool, delta: int) -> tuple[list[str], Any]:
    """Returns the operations of a program of two halves with two stages each, in its order, and the results."""
    log: list[str] = []

    def first(values: Any, count: Any) -> Any:
        log.append(f"first {int('b' in values)}")
        return {"sent": Transfer(values["x"] + 1, Exchange(None)), "kept": values["x"] * 2}, count + 1

    def second(values: Any, count: Any) -> Any:
        log.append(f"second {int('b' in values)}")
        return {"y": values["sent"] * values["kept"], "sent": None}, count * 2

    def run(a: jax.Array, b: jax.Array) -> Any:
        found, count = parallel.run_overlapped(
            [first, second], [{"x": a}, {"x": b, "b": b}], shared=0, delta_stages=delta, ordered=ordered
        )
        assert all("sent" not in values for values in found)
        return [values["y"] for values in found], count

    given = jnp.float32(3), jnp.float32(4)
    jaxpr = jax.make_jaxpr(run)(*given)
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    return [*log, *names], jax.jit(run)(*given)


def test_the_order_of_a_program() -> None:
    log, (found, count) = traced(True, 0)
    assert log[:4] == ["first 0", "first 1", "second 0", "second 1"]
    assert (np.asarray(found).tolist(), count) == ([24.0, 40.0], 8)  # (((0 + 1) + 1) * 2) * 2
    assert log.count("optimization_barrier") == 3
    log, (found, count) = traced(False, 1)
    assert log[:4] == ["first 0", "second 0", "first 1", "second 1"]
    assert (np.asarray(found).tolist(), count) == ([24.0, 40.0], 6)  # (((0 + 1) * 2) + 1) * 2
    assert "optimization_barrier" not in log


def test_what_is_on_its_way_waits_for_nothing() -> None:
    """A transfer starts from what a barrier lets pass, and no barrier takes what arrives."""
    moved: list[Any] = []

    class Move:
        def __call__(self, x: jax.Array) -> jax.Array:
            moved.append(jax.lax.neg(x))
            return moved[-1]

    move = Move()

    def stage(values: Any, shared: Any) -> Any:
        return {"sent": Transfer(values["x"] + 1, move)}, shared

    def done(values: Any, shared: Any) -> Any:
        return {"y": values["sent"], "sent": None}, shared

    def run(a: jax.Array, b: jax.Array) -> Any:
        found, _ = parallel.run_overlapped([stage, done], [{"x": a}, {"x": b}])
        return [values["y"] for values in found]

    eqns = jax.make_jaxpr(run)(1.0, 2.0).eqns
    barriers = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    moves = [eqn for eqn in eqns if eqn.primitive.name == "neg"]
    assert len(moves) == 2
    for eqn in moves:
        assert any(eqn.invars[0] in barrier.outvars for barrier in barriers)
        arrives = next(i for i, barrier in enumerate(barriers) if eqn.invars[0] in barrier.outvars)
        following = barriers[arrives + 1 : arrives + 2]  # that of the other half's next stage
        assert not any(eqn.outvars[0] in barrier.invars for barrier in following)


def test_a_wrong_order_is_found() -> None:
    """The control of the shared value: with the second half first, it is another one."""

    def stage(values: Any, shared: Any) -> Any:
        return {"y": shared}, shared * 2 + values["x"]

    halves = [{"x": 1}, {"x": 5}]
    found, shared = parallel.run_overlapped([stage], halves, shared=0, ordered=False)
    swapped, other = parallel.run_overlapped([stage], halves[::-1], shared=0, ordered=False)
    assert ([v["y"] for v in found], shared) == ([0, 1], 7)
    assert ([v["y"] for v in swapped], other) == ([0, 5], 11)


def test_operations_of_one_batch() -> None:
    """A transfer that is read is started once; one that is not read is returned."""
    starts: list[int] = []

    class Move:
        def __call__(self, x: int) -> int:
            starts.append(x)
            return x * 10

    send = lambda name, x: lambda known: {name: Transfer(x, Move())}  # noqa: E731
    found = parallel.run_operations(
        [send("a", 1), send("b", 2), lambda known: {"y": known["a"] + known["a"], "x": None}], {"x": 3}
    )
    assert (found["y"], found["a"], found["x"], starts) == (20, 10, None, [1])
    assert isinstance(found["b"], Transfer)

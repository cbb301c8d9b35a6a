"""Stages of two halves of a batch in turns: one half computes while rows of the other travel."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from jax import lax

from bijax.core.checks import integer
from bijax.parallel._transfers import Transfer

type Values = dict[str, Any]
"""What is known of a batch: pytrees by name."""

type Operation = Callable[[Values], Values]
"""Takes the values of a batch and returns the new ones, None for a value that can be dropped."""

type Stage = Callable[[Values, Any], tuple[Values, Any]]
"""Takes the values of a batch and the shared pytree; returns the new values and the new shared pytree."""

_OP: Final = "bijax.parallel.run_overlapped"


def run_operations(operations: Iterable[Operation], values: Mapping[str, Any]) -> Values:
    """Runs operations one after another on one batch: a stage, or all of a layer.

    A transfer is started where an operation reads it; those that none has read are returned as they are.

    Args:
        operations: The operations.
        values: What is known.

    Returns:
        What is new; None for values that are not needed any more.

    Example:
        >>> from bijax.parallel import Exchange
        >>> import jax.numpy as jnp
        >>> send = lambda v: {"sent": Transfer(v["x"] + 1, Exchange(None)), "x": None}
        >>> receive = lambda v: {"y": v["sent"] * 2}
        >>> run_operations([send, receive], {"x": jnp.float32(3)})["y"].item()
        8.0
    """
    known, new = _Known(values), set[str]()
    for operation in operations:
        found = operation(known)
        known.update(found)
        new |= set(found)
    return {name: dict.get(known, name) for name in new | known.arrived}


class _Known(dict[str, Any]):
    """Values, whose transfers are started when they are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.arrived: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if isinstance(value, Transfer):
            value = self[name] = value.start()
            self.arrived.add(name)
        return value


def turns(stages: int, batches: int, delta_stages: int) -> list[tuple[int, int]]:
    """Returns (batch, stage) in the order in which `run_overlapped` runs them.

    Args:
        stages: Number of stages.
        batches: 1 or 2.
        delta_stages: Stages that the first batch is ahead of the second.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If there are not one or two batches, or `delta_stages` is not from 0 to the number of stages.

    Example:
        >>> turns(3, 2, 1)
        [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)]
    """
    stages, delta_stages = integer(_OP, "stages", stages), integer(_OP, "delta_stages", delta_stages)
    if integer(_OP, "batches", batches) not in (1, 2):
        raise ValueError(f"{_OP}: batches must be 1 or 2, got {batches}.")
    if not 0 <= delta_stages <= stages:
        raise ValueError(f"{_OP}: delta_stages must be from 0 to the {stages} stages, got {delta_stages}.")
    if batches == 1:
        return [(0, stage) for stage in range(stages)]
    order = [(0, stage) for stage in range(delta_stages)]
    for stage in range(delta_stages, stages):
        order += [(0, stage), (1, stage - delta_stages)]
    return order + [(1, stage) for stage in range(stages - delta_stages, stages)]


def run_overlapped(
    stages: Sequence[Stage],
    batches: Sequence[Mapping[str, Any]],
    *,
    shared: Any = None,
    delta_stages: int = 0,
    ordered: bool = True,
) -> tuple[list[Values], Any]:
    """Runs the stages of one or two batches in turns, in one traced program.

    A `Transfer` that a stage returns leaves when the stage has been computed, and the next stage of that batch reads
    what arrived; the stages of the other batch between the two do not depend on it, so XLA can compute them meanwhile.

    XLA orders by data and not by the text of a program. With `ordered` the turns become data: what a stage computes and
    what the next one starts from pass one `jax.lax.optimization_barrier`, but for what is on its way. So a transfer
    leaves before the next stage starts, and no stage waits for a transfer of the other batch.

    Args:
        stages: The stages of all layers.
        batches: What is known of each batch in the beginning.
        shared: A pytree that stages read and change in the order of the turns, such as a cache.
        delta_stages: Stages that the first batch is ahead of the second.
        ordered: Whether the turns are data.

    Returns:
        What is known of each batch at the end, and the shared pytree.

    Raises:
        TypeError: As `turns`.
        ValueError: As `turns`.

    Guarantee: the order of the stages changes no bit of a batch: its stages get the same arrays in any order, but for
    `shared`, of which a stage may read only what earlier stages of its own batch, or earlier stages with lower numbers
    than its own of the first batch, have written.

    Source: the two batch overlap of SGLang (https://github.com/sgl-project/sglang), which follows DeepSeek-AI,
    "DeepSeek-V3 Technical Report" (https://arxiv.org/abs/2412.19437), section 3.

    Example:
        >>> import jax.numpy as jnp
        >>> stages = [lambda v, s: ({"x": v["x"] + 1}, s), lambda v, s: ({"y": v["x"] * 2}, s + 1)]
        >>> found, count = run_overlapped(stages, [{"x": jnp.float32(1)}, {"x": jnp.float32(2)}], shared=0)
        >>> [values["y"].item() for values in found], count
        ([4.0, 6.0], 2)
    """
    running, last = [_Running(values) for values in batches], None
    for batch, number in turns(len(stages), len(running), delta_stages):
        own = running[batch]
        if last is not None:
            if ordered and (last is not own or last.leaving):
                _order(last, own)
            last.depart()
        new, shared = stages[number](own.values, shared)
        own.take(new)
        last = own
    if last is not None:
        last.depart()
    return [batch.values for batch in running], shared


class _Running:
    """A batch between its stages.

    Attributes:
        known: Values that have been computed.
        new: Names of those that the last stage computed.
        leaving: Transfers that have not been started.
        coming: Values that are on their way until the next stage of the batch.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.known: Values = dict(values)
        self.new: set[str] = set()
        self.leaving: dict[str, Transfer] = {}
        self.coming: Values = {}

    @property
    def values(self) -> Values:
        """Everything, for the next stage."""
        return self.known | self.coming

    def take(self, new: Values) -> None:
        """Takes the results of a stage. What was on its way before it has arrived."""
        self.known, self.coming = self.values, {}
        for name, value in new.items():
            self.known.pop(name, None)
            if isinstance(value, Transfer):
                self.leaving[name] = value
            elif value is not None:
                self.known[name] = value
        self.new = {name for name, value in new.items() if name in self.known and value is not None}

    def depart(self) -> None:
        """Starts the transfers."""
        self.coming |= {name: transfer.start() for name, transfer in self.leaving.items()}
        self.leaving = {}


def _order(last: _Running, following: _Running) -> None:
    """Lets what `following` starts from depend on what the last stage computed and sends."""
    computed = {name: last.known[name] for name in last.new}
    leaving = {name: transfer.arrays for name, transfer in last.leaving.items()}
    start = {name: value for name, value in following.known.items() if following is not last or name not in computed}
    (computed, leaving), start = lax.optimization_barrier(((computed, leaving), start))
    following.known |= start
    last.known |= computed
    last.leaving = {n: Transfer(arrays, last.leaving[n].move) for n, arrays in leaving.items()}

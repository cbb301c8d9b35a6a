"""The steps of a row program: which are needed, and in which order they hold the least."""

from collections.abc import Iterable, Sequence

from pallas_kernels.row_program.program import REDUCTIONS, Step


def used(steps: Sequence[Step], wanted: Iterable[int]) -> list[Step]:
    """Returns the steps that make wanted values, and what those are made of."""
    needed, found = {*wanted}, []
    for step in reversed(steps):
        if step.result in needed:
            needed |= {o for o in step.operands if isinstance(o, int)}
            found.append(step)
    return found[::-1]


def late(steps: Sequence[Step]) -> list[Step]:
    """Returns steps in an order in which nothing stands before a reduction but what the reduction waits for.

    What is computed before a reduction and wanted behind it is held.
    """
    makers = {step.result: step for step in steps}
    found: dict[int, Step] = {}

    def add(step: Step) -> None:
        if step.result in found:
            return
        for operand in step.operands:
            if isinstance(operand, int) and operand in makers:
                add(makers[operand])
        found[step.result] = step

    for step in steps:
        if step.operation in REDUCTIONS:
            add(step)
    for step in steps:
        add(step)
    return list(found.values())

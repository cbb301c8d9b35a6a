"""The steps of a row program: which are needed, and an order that holds few values."""

from collections.abc import Iterable, Sequence

from pallas_kernels.row_program.program import REDUCTIONS, Step


def used(steps: Sequence[Step], wanted: Iterable[int]) -> list[Step]:
    """Returns the steps that compute the wanted values, and their inputs."""
    needed, found = {*wanted}, []
    for step in reversed(steps):
        if step.result in needed:
            needed |= {o for o in step.operands if isinstance(o, int)}
            found.append(step)
    return found[::-1]


def late(steps: Sequence[Step]) -> list[Step]:
    """Orders steps so that only the inputs of a reduction come before it.

    A value computed before a reduction and used after it must be held.
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

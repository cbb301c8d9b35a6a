"""Hopper schedules of products of few rows whose weights are wgmma's rows from registers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ChainSchedule:
    """Tiles and stages of a product of few rows.

    Attributes:
        columns: Columns of the weights in a block: 16, 32 or 64, or 8 of 4-byte weights.
        rows: Rows of the activations in a block, a multiple of 8.
        k_step: Elements of K in a stage.
        stages: Stages in shared memory.
        ahead: Stages whose copies of weights threads start before they wait for the first; 0 for copies by TMA.
    """

    columns: int
    rows: int
    k_step: int
    stages: int
    ahead: int = 0

"""Drafts of a model's own head, after a step whose tokens the sequences have."""

import numpy as np

from bijax.serving.draft_head import hand_out, repacked, room_of, wants_drafts
from bijax.serving.programs import Programs
from bijax.serving.step import Step


def draft_after(step: Step, programs: Programs, page_size: int) -> None:
    """Lets the head draft the next tokens of the sequences of a step, if it is used.

    Args:
        step: The step; its results were read.
        programs: The programs of the engine.
        page_size: Tokens of a page.
    """
    made = []
    for batch, packed, hidden in step.hidden:
        packed, room = repacked(batch, packed), room_of(batch.works, batch.shape[0], page_size)
        drafts = programs.draft(hidden, packed, room, drafts=any(map(wants_drafts, batch.works)))
        for work in batch.works:
            work.sequence.drafts = []
        if drafts is not None:
            made.append((batch, drafts, packed, room))
    for batch, drafts, packed, room in made:
        hand_out(batch.works, np.asarray(drafts), packed, room)

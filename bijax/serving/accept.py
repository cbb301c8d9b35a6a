"""Which of the tokens that a step sampled for a sequence become the sequence's own."""

from bijax.serving.scheduler import Work
from bijax.serving.step import Results


def accept(work: Work, results: Results) -> int:
    """Passes a sequence its sampled tokens, and ends it if it is complete.

    Drafts were computed as if they were the next tokens, which they are up to the first one that differs from what was
    sampled in its place. What was sampled after that one is dropped.

    Args:
        work: What the step computed for the sequence.
        results: Those of the step.

    Returns:
        The number of tokens that the sequence received.
    """
    sequence = work.sequence
    if not work.samples:
        if work.reaches_end:
            if work in results.embedded:
                sequence.request.embedding = tuple(results.embedded[work].tolist())
            sequence.finish("length")
        return 0
    drafts = work.tokens[len(work.tokens) - work.drafts :] if work.drafts else ()
    measured = results.measured[work] if sequence.request.params.logprobs else None
    taken = 0
    for place, token in enumerate(results.sampled[work]):
        if token < 0:
            sequence.finish("abort", "the logits hold nan, from the model or the penalties, or no token is allowed")
            break
        taken += 1
        sequence.append(token, None if measured is None else measured[place])
        if sequence.finish_reason is not None or place == work.drafts or drafts[place] != token:
            break
    return taken

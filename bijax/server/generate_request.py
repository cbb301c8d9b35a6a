"""The body of SGLang's `/generate`."""

from collections.abc import Sequence
from typing import cast

from bijax.serving import SamplingParams
from bijax.serving.params import MAX_TOP_LOGPROBS

from .errors import ApiError
from .prompts import Prompt
from .sampling_fields import SamplingFields
from .schema import OneOrMany, OneOrManyTokenIds, RequestBody


class GenerateSampling(SamplingFields):
    """`sampling_params`."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None

    def renamed(self) -> dict[str, str]:
        """SGLang's name of the seed."""
        return {"seed": "sampling_seed"}


class GenerateBody(RequestBody):
    """One prompt, or a list of them. What is a list has one entry for each prompt."""

    text: OneOrMany[str] | None = None
    input_ids: OneOrManyTokenIds | None = None
    sampling_params: OneOrMany[GenerateSampling] | None = None
    rid: OneOrMany[str] | None = None
    return_logprob: OneOrMany[bool] | None = None
    logprob_start_len: OneOrMany[int] | None = None
    top_logprobs_num: OneOrMany[int] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    priority: int = 0

    def sources(self) -> tuple[bool, Sequence[str | list[int]]]:
        """Whether the prompts came as a list, so that the reply is one, and the prompts.

        Raises:
            ApiError: With status 400, if there is no prompt, or two kinds.
        """
        match self.text, self.input_ids:
            case str(text), None:
                return False, [text]
            case [*texts], None if texts:
                return True, texts
            case None, [int(), *_] as tokens:
                return False, [cast(list[int], tokens)]
            case None, [list(), *_] as lists:
                return True, cast(list[list[int]], lists)
        raise ApiError(400, "give one prompt or several, either as text or as input_ids", field="text")

    def prompts(self) -> list[Prompt]:
        """The prompts with their parameters.

        Raises:
            ApiError: With status 400, if there is no prompt, or a value is out of range.
        """
        is_list, sources = self.sources()
        count = len(sources)
        sampling = _spread("sampling_params", self.sampling_params, count, GenerateSampling())
        rids = _spread("rid", self.rid, count, "")
        logprob = _spread("return_logprob", self.return_logprob, count, False)
        start = _spread("logprob_start_len", self.logprob_start_len, count, -1)
        top = _spread("top_logprobs_num", self.top_logprobs_num, count, 0)
        field = "text" if self.text is not None else "input_ids"
        return [
            Prompt(
                source,
                _params(sampling[i], logprob[i], start[i], top[i]),
                f"{field}.{i}" if is_list else field,
                rid=rids[i] or None,
                priority=self.priority,
            )
            for i, source in enumerate(sources)
        ]


def _params(sampling: GenerateSampling, logprob: bool, start: int, top: int) -> SamplingParams:
    if start < -1:
        raise ApiError(400, f"must be at least 0, or -1 for no log-probabilities of the prompt, got {start}",
                       field="logprob_start_len")  # fmt: skip
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise ApiError(400, f"must be from 0 to {MAX_TOP_LOGPROBS}, got {top}", field="top_logprobs_num")
    return sampling.params(
        inside="sampling_params.",
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        seed=sampling.sampling_seed,
        logprobs=logprob,
        top_logprobs=top if logprob else 0,
        prompt_logprobs=logprob and start >= 0,
        logprob_start_len=max(start, 0),
    )


def _spread[T](field: str, value: T | list[T] | None, count: int, default: T) -> list[T]:
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise ApiError(400, f"a list must have an entry for each of the {count} prompts, got {len(value)}", field=field)
    return value

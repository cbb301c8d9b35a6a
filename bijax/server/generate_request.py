"""The body of SGLang's `/generate`."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

from bijax.serving.params import MAX_TOP_LOGPROBS

from .adapters import find_adapter, with_adapter
from .errors import ApiError
from .field_names import FieldNames
from .model import ServedModel
from .neutral import GENERATE, GENERATE_SAMPLING, Neutral
from .prompts import Prompt
from .sampling_fields import SamplingFields
from .schema import OneOrMany, OneOrManyTokenIds, RequestBody


class GenerateSampling(SamplingFields):
    """`sampling_params`."""

    neutral: ClassVar[Neutral] = GENERATE_SAMPLING

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None

    def renamed(self) -> dict[str, str]:
        """SGLang's name of the seed."""
        return {"seed": "sampling_seed"}


class GenerateBody(RequestBody):
    """One prompt, or a list of them. What is a list has one entry for each prompt."""

    neutral: ClassVar[Neutral] = GENERATE
    nested: ClassVar[Mapping[str, type[RequestBody]]] = {"sampling_params": GenerateSampling}

    text: OneOrMany[str] | None = None
    input_ids: OneOrManyTokenIds | None = None
    sampling_params: OneOrMany[GenerateSampling] | None = None
    rid: OneOrMany[str] | None = None
    lora_path: OneOrMany[str | None] | None = None
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

    def prompts(self, model: ServedModel) -> list[Prompt]:
        """The prompts with their parameters.

        Args:
            model: What is served.

        Raises:
            ApiError: With status 400, if there is no prompt, or a value is out of range; 404, if there is no such
                adapter.
        """
        is_list, sources = self.sources()
        count = len(sources)
        sampling = _spread("sampling_params", self.sampling_params, count, GenerateSampling())
        rids = _spread("rid", self.rid, count, "")
        adapters = [find_adapter(model, None, name) for name in _spread("lora_path", self.lora_path, count, None)]
        logprob = _spread("return_logprob", self.return_logprob, count, False)
        start = _spread("logprob_start_len", self.logprob_start_len, count, -1)
        top = _spread("top_logprobs_num", self.top_logprobs_num, count, 0)
        field = "text" if self.text is not None else "input_ids"
        inside = "sampling_params.{}." if isinstance(self.sampling_params, list) else "sampling_params."
        found = [
            _prompt(
                source,
                f"{field}.{i}" if is_list else field,
                sampling[i],
                sampling[i].names(inside.format(i)),
                (logprob[i], start[i], top[i]),
                rid=rids[i] or None,
                priority=self.priority,
            )
            for i, source in enumerate(sources)
        ]
        return [one for prompt, adapter in zip(found, adapters, strict=True) for one in with_adapter([prompt], adapter)]


def _prompt(
    source: str | list[int],
    field: str,
    sampling: GenerateSampling,
    names: FieldNames,
    logprobs: tuple[bool, int, int],
    *,
    rid: str | None,
    priority: int,
) -> Prompt:
    logprob, start, top = logprobs
    if start < -1:
        raise ApiError(400, f"must be at least 0, or -1 for no log-probabilities of the prompt, got {start}",
                       field="logprob_start_len")  # fmt: skip
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise ApiError(400, f"must be from 0 to {MAX_TOP_LOGPROBS}, got {top}", field="top_logprobs_num")
    params = sampling.params(
        names,
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens,
        seed=sampling.sampling_seed,
        logprobs=logprob,
        top_logprobs=top if logprob else 0,
        prompt_logprobs=logprob and start >= 0,
        logprob_start_len=max(start, 0),
    )
    return Prompt(source, params, field, names, rid=rid, priority=priority)


def _spread[T](field: str, value: T | list[T] | None, count: int, default: T) -> list[T]:
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise ApiError(400, f"a list must have an entry for each of the {count} prompts, got {len(value)}", field=field)
    return value

"""The sampling parameters that all endpoints share, and how they become the engine's."""

import re
from typing import Any

from pydantic import Field

from bijax.serving import SamplingParams

from .errors import ApiError
from .schema import LogitBias, RequestBody, Strings, TokenIds

_FIELD = re.compile(r"SamplingParams: (\w+)")  # each error of SamplingParams begins with the field


class SamplingFields(RequestBody):
    """Sampling parameters of one prompt. A field that is absent or null has its default; the engine checks ranges."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: LogitBias = Field(default_factory=dict)
    allowed_token_ids: TokenIds | None = None
    stop: Strings = ()
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    n: int | None = None

    def renamed(self) -> dict[str, str]:
        """The engine's name -> the name in this request, where they differ."""
        return {}

    def params(self, *, inside: str = "", **other: Any) -> SamplingParams:
        """The engine's parameters.

        Args:
            inside: Where in the request these fields stand, for errors: "sampling_params.", or nothing.
            other: Parameters that do not come from a field of the same name; None leaves the default.

        Raises:
            ApiError: With status 400 and the field's name as the request has it, if a value is out of range.
        """
        given = {name: getattr(self, name) for name in SamplingFields.model_fields} | other
        if given["top_k"] in (-1, 0):  # both mean "all" to clients of SGLang and vLLM
            given["top_k"] = None
        try:
            return SamplingParams(**{name: value for name, value in given.items() if value is not None})
        except (TypeError, ValueError) as error:
            raise self._explained(error, inside) from None

    def _explained(self, error: Exception, inside: str) -> ApiError:
        message = str(error)
        match = _FIELD.match(message)
        if match is None:
            return ApiError(400, message)
        renamed = self.renamed()
        for ours, theirs in renamed.items():
            message = re.sub(rf"\b{ours}\b", theirs, message)
        field = renamed.get(match[1], match[1])
        return ApiError(400, message.removeprefix(f"SamplingParams: {field} ").removesuffix("."), field=inside + field)

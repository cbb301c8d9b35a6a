"""The sampling parameters that all endpoints share, and how they become the engine's."""

from typing import Any

from pydantic import Field

from bijax.serving import SamplingParams

from .field_names import FieldNames
from .schema import LogitBias, Strings, TokenIds
from .structured import StructuredFields


class SamplingFields(StructuredFields):
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
    skip_special_tokens: bool | None = None

    def renamed(self) -> dict[str, str]:
        """The engine's name -> the name in this request, where they differ."""
        return {}

    def names(self, inside: str = "") -> FieldNames:
        """The names of the engine's parameters here.

        Args:
            inside: Prefix of these fields in the request: "sampling_params.", or nothing.
        """
        constraint = next(iter(self.constraints()), "grammar")
        return FieldNames(inside, self.renamed() | {"grammar": constraint})

    def params(self, names: FieldNames, **other: Any) -> SamplingParams:
        """The engine's parameters.

        Args:
            names: Their names in the request, for errors.
            other: Parameters that do not come from a field of the same name; None leaves the default.

        Raises:
            ApiError: With status 400 and the field's name as the request has it, if a value is out of range.
        """
        own = (name for name in SamplingFields.model_fields if name not in StructuredFields.model_fields)
        given = {name: getattr(self, name) for name in own} | {"grammar": self.grammar(names)} | other
        if given["top_k"] in (-1, 0):  # both mean "all" to clients of SGLang and vLLM
            given["top_k"] = None
        try:
            return SamplingParams(**{name: value for name, value in given.items() if value is not None})
        except (TypeError, ValueError) as error:
            raise names.explained(error) from None

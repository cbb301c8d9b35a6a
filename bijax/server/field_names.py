"""The names that the engine's sampling parameters have in a request."""

import dataclasses
import re
from collections.abc import Mapping

from .errors import ApiError

_FIELD = re.compile(r"SamplingParams: (\w+)")  # each error about a sampling parameter begins with its name


@dataclasses.dataclass(frozen=True)
class FieldNames:
    """Names for errors.

    Attributes:
        inside: Prefix of the parameters in the request: "sampling_params.", or nothing.
        renamed: The engine's name -> the name in the request, where they differ.

    Example:
        >>> names = FieldNames(renamed={"max_new_tokens": "max_tokens"})
        >>> names.explained(ValueError("SamplingParams: max_new_tokens must be at least 0, got -1.")).field
        'max_tokens'
        >>> names.explained(ValueError("Engine: the prompt is too long."), "prompt").field
        'prompt'
    """

    inside: str = ""
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __call__(self, name: str) -> str:
        """The place in the request of a parameter that the engine calls so."""
        return self.inside + self.renamed.get(name, name)

    def explained(self, error: Exception, otherwise: str | None = None) -> ApiError:
        """The answer, with status 400, to a request that the engine refuses.

        Args:
            error: What `SamplingParams` or the engine raised.
            otherwise: The field to blame if it is not a sampling parameter.
        """
        message = str(error)
        match = _FIELD.match(message)
        if match is None:
            return ApiError(400, message, field=otherwise)
        message = message.removeprefix(f"{match[0]} ").removesuffix(".")
        for ours, theirs in self.renamed.items():
            message = re.sub(rf"\b{ours}\b", theirs, message)
        return ApiError(400, message, field=self(match[1]))

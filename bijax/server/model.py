"""The server's view of the model that it serves."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from .errors import ApiError


class Tokenizer(Protocol):
    """Text to tokens and back; `flax_layers.checkpoint.Tokenizer` is one."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; ValueError if a character has none."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, U+FFFD for invalid UTF-8."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The tokens of a conversation; ValueError if the chat template refuses it.

        `tools` is passed alone to a tokenizer whose attribute `chat_template` shows that it knows them.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token."""
        ...


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A model under its name.

    Attributes:
        name: As `/v1/models` lists it.
        path: Where it was loaded from.
        vocab_size: Tokens are from 0 to below it.
        max_model_len: Longest sequence, prompt and output together, in tokens.
        tokenizer: None serves token ids alone.
        load_weights: Reads other weights for the same model from a path, as the engine takes them; None refuses that.
            It raises ValueError or OSError if they do not fit or are not there.
        adapters: The names of its LoRA adapters, with the paths that they were loaded from.
    """

    name: str
    path: str
    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer | None = None
    load_weights: Callable[[str], Any] | None = None
    adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def text(self, field: str) -> Tokenizer:
        """The tokenizer.

        Raises:
            ApiError: With status 400, if it is missing.
        """
        if self.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer; send input_ids to /generate", field=field)
        return self.tokenizer

"""Text to token ids and back."""

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
import tokenizers.decoders

from .chat_template import ChatTemplate

_SPELT_BYTE = re.compile("<0x[0-9A-F]{2}>")


class Tokenizer:
    """The tokenizer of a checkpoint, with its chat template.

    Args:
        backend: A tokenizer of the package `tokenizers`. Truncation and padding, if set, are switched off on it.
        chat_template: The jinja2 chat template, or None.
        special_tokens: Text of the special tokens by role, for example {"eos_token": "</s>"}; the template sees them.
        eos_token_ids: Tokens that end generation.

    Attributes:
        eos_token_ids: Tokens that end generation.
        special_token_ids: Tokens that `decode` skips with `skip_special_tokens`.
        vocab_size: One more than the largest token id. The model's vocabulary may be larger (padded rows).

    Raises:
        CheckpointError: If the chat template does not compile.

    Example:
        >>> from flax_layers.checkpoint import load_checkpoint, smollm2_path
        >>> tokenizer = load_checkpoint(smollm2_path()).tokenizer
        >>> tokenizer.encode("Is 12 > 7?")
        [4182, 216, 33, 34, 2986, 216, 39, 47]
        >>> tokenizer.decode([4182, 216, 33, 34, 2986, 216, 39, 47])
        'Is 12 > 7?'
        >>> print(tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."},
        ...                                      {"role": "user", "content": "Hi"}], add_generation_prompt=True))
        <|im_start|>system
        Be brief.<|im_end|>
        <|im_start|>user
        Hi<|im_end|>
        <|im_start|>assistant
        <BLANKLINE>
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None,
        special_tokens: Mapping[str, str],
        eos_token_ids: tuple[int, ...],
    ) -> None:
        # A tokenizer.json may carry the settings of its training, which would cut or pad the text.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = None if chat_template is None else ChatTemplate(chat_template, special_tokens)
        self._unknown_bytes = _unknown_bytes(backend)
        added = backend.get_added_tokens_decoder()
        self._added = {token.content for token in added.values()}
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.eos_token_ids = eos_token_ids
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def chat_template(self) -> str | None:
        """The chat template of the checkpoint, or None."""
        return None if self._chat_template is None else self._chat_template.source

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text.

        A special token written out in the text becomes that token, as in `transformers`; do not pass text that others
        wrote without looking for them.

        Args:
            text: Any text, the empty one included.
            add_special_tokens: Whether to add the tokens that the checkpoint puts around every text (a BOS token, for
                many models). False for text that a chat template made.

        Returns:
            Token ids.

        Raises:
            TypeError: If `text` is not a string.
            ValueError: If `text` holds what this vocabulary has no token for. Some byte-level vocabularies lack the
                bytes of rare control characters; most libraries drop these without a word.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {type(text).__name__}")
        self._check_bytes(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Decodes token ids. `decode(encode(text)) == text` unless the checkpoint normalises text or adds tokens.

        Args:
            ids: Token ids. Bytes that are not whole UTF-8 (a token may end inside a character) become U+FFFD.
            skip_special_tokens: Whether to leave special tokens out of the text.

        Raises:
            TypeError: If an id is not an integer.
            ValueError: If an id has no token.
        """
        ids = [operator.index(token_id) for token_id in ids]
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size or self._backend.id_to_token(token_id) is None:
                raise ValueError(f"token ids must be from 0 to {self.vocab_size - 1} and have a token, got {token_id}")
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        r"""Returns the bytes of a token inside a text. A token may begin or end inside a character.

        Args:
            token_id: A token id.

        Raises:
            TypeError: If the id is not an integer.
            ValueError: If the id has no token.

        Example:
            >>> from flax_layers.checkpoint import load_checkpoint, smollm2_path
            >>> tokenizer = load_checkpoint(smollm2_path()).tokenizer
            >>> [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode("7 ♞")]
            [b'7', b' \xe2\x99', b'\x9e']
        """
        text = self.decode([token_id])
        symbols = self._backend.id_to_token(token_id) or ""  # `decode` has checked that it exists
        if symbols in self._added:
            return text.encode()
        if isinstance(self._backend.decoder, tokenizers.decoders.ByteLevel):
            return bytes(map(_BYTES.__getitem__, symbols))
        # Other vocabularies spell bytes outside their characters as <0x0A>.
        if _SPELT_BYTE.fullmatch(symbols):
            return bytes([int(symbols[3:5], 16)])
        # Their decoders drop the space before the first word of a text, so the token is read as the second.
        return self.decode([token_id, token_id])[len(text) :].encode()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Renders messages to text with the chat template of the checkpoint.

        Encode the text with `add_special_tokens=False`: the template writes the special tokens itself.

        Args:
            messages: At least one mapping with `role` and `content`, both strings.
            add_generation_prompt: Whether to end with the opening of the assistant's answer.
            tools: Functions that the model may call, as OpenAI's API describes them; a template that does not know
                tools ignores them.

        Raises:
            ValueError: If the checkpoint has no chat template, if a message lacks a part, or if the template refuses
                the messages.
        """
        if self._chat_template is None:
            raise ValueError("this checkpoint has no chat template; encode the text itself or use a chat model")
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Renders messages with the chat template and encodes the result.

        Args:
            messages: As for `apply_chat_template`.
            add_generation_prompt: As for `apply_chat_template`.
            tools: As for `apply_chat_template`.

        Raises:
            ValueError: As for `apply_chat_template` and `encode`.
        """
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return self.encode(text, add_special_tokens=False)

    def _check_bytes(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text must be valid Unicode, got the lone surrogate {error.object[error.start]!r} "
                f"at index {error.start}; decode the bytes it came from first"
            ) from error
        if not self._unknown_bytes:
            return
        normalizer = self._backend.normalizer
        normalised = text if normalizer is None else normalizer.normalize_str(text)
        if self._unknown_bytes.isdisjoint(normalised.encode()):
            return
        index, character = next(
            (index, char) for index, char in enumerate(normalised) if not self._unknown_bytes.isdisjoint(char.encode())
        )
        raise ValueError(
            f"the vocabulary of this checkpoint has no token for {character!r} (U+{ord(character):04X}) "
            f"at index {index}; remove the character from the text"
        )


def _unknown_bytes(backend: tokenizers.Tokenizer) -> frozenset[int]:
    # Only byte-level vocabularies lose bytes; other kinds have an unknown token or spell bytes out.
    if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
        return frozenset()
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return frozenset(byte for byte, symbol in enumerate(_byte_symbols()) if symbol not in vocabulary)


def _byte_symbols() -> list[str]:
    """Returns the character for each byte in a byte-level vocabulary (from the GPT-2 release).

    Bytes that are printable, non-space Latin-1 characters map to themselves; the others to the code points from 256 on.

    Example:
        >>> symbols = _byte_symbols()
        >>> symbols[ord("a")], symbols[ord(" ")], symbols[0]
        ('a', 'Ġ', 'Ā')
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTES = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}

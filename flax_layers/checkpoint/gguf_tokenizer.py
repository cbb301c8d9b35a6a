"""The tokenizer of a GGUF file, rebuilt from its metadata."""

import dataclasses
from collections.abc import Callable

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from .errors import CheckpointError
from .gguf_file import GGUFFile
from .gguf_sentencepiece import sentencepiece_backend
from .tokenizer import Tokenizer

# Token types of the GGUF specification that are matched in the text before anything else.
_CONTROL = 3
_USER_DEFINED = 4

_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}

# How Llama 3 and Qwen 2 split a text into words; they differ in the length of a run of digits. In order: English
# contractions; letters with one leading sign or space; digits; signs with a leading space and trailing newlines;
# newlines with the space before them; spaces, less the one that leads the next word.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """The meaning of a value of `tokenizer.ggml.pre`.

    Attributes:
        pre_tokenizer: Makes the step that cuts text into words of byte symbols.
        normalizer: Makes the step before it, or None.
        ignore_merges: Whether a word that is a token is kept whole, regardless of the merges.
        add_bos: Whether every text starts with a BOS token if the file does not say.
    """

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(_WORDS.format(digits=digits)), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3 = Kind(lambda: _words("{1,3}"), ignore_merges=True, add_bos=True)

KINDS = {
    "gpt-2": Kind(_gpt2),
    "smollm": Kind(_smollm),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Kind(lambda: _words(""), normalizer=normalizers.NFC),
}


def gguf_tokenizer(file: GGUFFile, eos_token_ids: tuple[int, ...]) -> Tokenizer | None:
    """Rebuilds the tokenizer of a GGUF file.

    It is byte-level BPE with the pre-tokenisation that the file names, or has the pieces of SentencePiece.

    Args:
        file: A GGUF file with a vocabulary of the kind `gpt2` or `llama`.
        eos_token_ids: Tokens that end generation.

    Returns:
        The tokenizer; None if the file has none.

    Raises:
        CheckpointError: If the vocabulary is of another kind, if the pre-tokenisation is not one of those known here,
            or if tokens, types, merges or special tokens contradict each other.
    """
    if not any(key.startswith("tokenizer.ggml.") for key in file.metadata):
        return None
    model = file.get("tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{file.path}: expected a tokenizer.ggml.model of 'gpt2' (byte-level BPE) or 'llama' (SentencePiece), got"
            f" {model!r}; use a checkpoint with such a tokenizer, or a folder with a tokenizer.json, or load it without"
            " its tokenizer"
        )
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    types = file.get_list("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{file.path}: expected one token type per token, got {len(types)} for {len(tokens)} tokens"
        )
    if model == "llama":
        backend, add_bos = sentencepiece_backend(file, tokens, types), True
    else:
        backend, add_bos = _byte_level_backend(file, tokens)
    for special, token_type in ((True, _CONTROL), (False, _USER_DEFINED)):
        texts = [token for token, kind_of_token in zip(tokens, types, strict=True) if kind_of_token == token_type]
        backend.add_tokens([tokenizers.AddedToken(text, special=special, normalized=False) for text in texts])
    special_tokens = {role: _token(file, tokens, key) for role, key in _SPECIAL_TOKENS.items() if key in file.metadata}
    _add_around(file, backend, special_tokens, add_bos)
    return Tokenizer(
        backend,
        chat_template=file.find("tokenizer.chat_template", str),
        special_tokens=special_tokens,
        eos_token_ids=eos_token_ids,
    )


def _byte_level_backend(file: GGUFFile, tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns a byte-level BPE, and whether every text starts with a BOS token if the file does not say."""
    pre = file.get("tokenizer.ggml.pre", str)
    if pre not in KINDS:
        raise CheckpointError(
            f"{file.path}: the known values of tokenizer.ggml.pre are {sorted(KINDS)}, got {pre!r}; "
            "use a folder with a tokenizer.json"
        )
    if file.get("tokenizer.ggml.add_space_prefix", bool, False):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.add_space_prefix must be false for byte-level BPE, got true"
        )
    kind = KINDS[pre]
    backend = tokenizers.Tokenizer(_bpe(file, tokens, kind.ignore_merges))
    if kind.normalizer is not None:
        backend.normalizer = kind.normalizer()
    backend.pre_tokenizer = kind.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, kind.add_bos


def _bpe(file: GGUFFile, tokens: list[str], ignore_merges: bool) -> models.BPE:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{file.path}: the vocabulary holds the same token twice; the file is damaged")
    merges: list[tuple[str, str]] = []
    for merge in file.get_list("tokenizer.ggml.merges", str):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise CheckpointError(
                f"{file.path}: a merge must be two tokens that make a third, got {merge!r}; the file is damaged"
            )
        merges.append((left, right))
    return models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges)


def _token(file: GGUFFile, tokens: list[str], key: str) -> str:
    token_id = file.get(key, int)
    if not 0 <= token_id < len(tokens):
        raise CheckpointError(
            f"{file.path}: {key} must be below the {len(tokens)} tokens of the vocabulary, got {token_id}"
        )
    return tokens[token_id]


def _add_around(file: GGUFFile, backend: tokenizers.Tokenizer, special_tokens: dict[str, str], add_bos: bool) -> None:
    before = file.get("tokenizer.ggml.add_bos_token", bool, add_bos)
    after = file.get("tokenizer.ggml.add_eos_token", bool, False)
    used = [role for role, wanted in (("bos_token", before), ("eos_token", after)) if wanted]
    for role in used:
        if role not in special_tokens:
            raise CheckpointError(
                f"{file.path}: every text shall get a {role}, but {_SPECIAL_TOKENS[role]!r} is missing"
            )
    if not used:
        return
    parts = [
        *([special_tokens["bos_token"]] if before else []),
        "$A",
        *([special_tokens["eos_token"]] if after else []),
    ]
    ids = [(special_tokens[role], file.get(_SPECIAL_TOKENS[role], int)) for role in used]
    backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=ids)

"""Tokenizers of GGUF files that SentencePiece made: pieces with scores, which say what is joined first."""

from typing import Final

import tokenizers
from tokenizers import decoders, models, normalizers

from .errors import CheckpointError
from .gguf_file import GGUFFile

SPACE: Final = "\u2581"
"""Stands for a space in pieces."""

_NORMAL: Final = 1


def sentencepiece_backend(file: GGUFFile, tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    """Returns the byte-pair tokenizer that joins pieces as SentencePiece does.

    SentencePiece joins the two neighbours whose joint piece has the highest score. Here every way to cut a piece into
    two others is a merge, the merges sorted by the score of the whole, as `transformers` converts such models. Bytes of
    characters that are no piece are spelled out (`<0x0A>`).

    Args:
        file: The file.
        tokens: Its tokens.
        types: The type of each.

    Raises:
        CheckpointError: If scores are missing or do not fit, a token is there twice, a byte has no token, or a space is
            put before every text.
    """
    scores = file.get_list("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise CheckpointError(f"{file.path}: expected one score per token, got {len(scores)} for {len(tokens)} tokens")
    if file.get("tokenizer.ggml.add_space_prefix", bool, True):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.add_space_prefix must be false, as Gemma has it, got true or nothing; use a"
            " folder with a tokenizer.json"
        )
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{file.path}: the vocabulary holds the same token twice; the file is damaged")
    lost = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
    if lost:
        raise CheckpointError(f"{file.path}: the vocabulary has no token for the byte {lost[0]}; the file is damaged")
    unknown = file.find("tokenizer.ggml.unknown_token_id", int)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(tokens, types, scores, vocabulary),
            unk_token=None if unknown is None or not 0 <= unknown < len(tokens) else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _merges(
    tokens: list[str], types: list[int], scores: list[float], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Returns every cut of a normal piece into two others; the highest score first, then the lowest ids."""
    found = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind != _NORMAL:
            continue
        for place in range(1, len(token)):
            left, right = vocabulary.get(token[:place]), vocabulary.get(token[place:])
            if left is not None and right is not None:
                found.append((-score, left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, left, right in found]

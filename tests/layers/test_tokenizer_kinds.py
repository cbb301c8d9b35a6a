"""Tokenizers rebuilt from small GGUF files and from folders: cutting, merging, added tokens, errors."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from flax_layers.checkpoint import CheckpointError, Tokenizer, load_checkpoint
from flax_layers.checkpoint.gguf_tokenizer import KINDS
from tests.layers import checkpoint_files as files
from tests.layers import reference_bpe as reference

CUTS: dict[str, reference.Cut] = {
    "gpt-2": reference.gpt2_words,
    "smollm": reference.smollm_words,
    "llama-bpe": reference.llama3_words,
    "llama3": reference.llama3_words,
    "llama-v3": reference.llama3_words,
    "qwen2": reference.qwen2_words,
}


def gguf_tokenizer(path: Path, **changes: Any) -> Tokenizer:
    """The tokenizer of the tiny GGUF model, with some `tokenizer.ggml.` metadata changed; None removes a key."""
    metadata = files.gguf_metadata() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    kept = {key: value for key, value in metadata.items() if value is not None}
    return load_checkpoint(files.write_gguf(path / "model.gguf", kept)).tokenizer


def words(pre: str, text: str) -> list[str]:
    """The words that the pre-tokenisation cuts, from the places that it reports."""
    pieces = KINDS[pre].pre_tokenizer().pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


def test_every_kind_has_a_reference() -> None:
    assert CUTS.keys() == KINDS.keys()


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "I'm 12345 ok!!\n\n  x", ["I", "'m", " 12345", " ok", "!!", "\n\n ", " x"]),
        ("gpt-2", "I'M x_1", ["I", "'", "M", " x", "_", "1"]),
        ("smollm", "a 12 b", ["a", " ", "1", "2", " b"]),
        ("smollm", "v1.5  2", ["v", "1", ".", "5", "  ", "2"]),
        ("llama-bpe", "I'M 12345 ok!!\n\n  x", ["I", "'M", " ", "123", "45", " ok", "!!\n\n", " ", " x"]),
        ("llama-bpe", "a_b\tc \n d.\r\n", ["a", "_b", "\tc", " \n", " d", ".\r\n"]),
        ("llama-bpe", "  \n\n  ", ["  \n\n", "  "]),
        ("qwen2", "I'M 12345 ok!!\n\n  x", ["I", "'M", " ", "1", "2", "3", "4", "5", " ok", "!!\n\n", " ", " x"]),
    ],
)
def test_words(pre: str, text: str, expected: list[str]) -> None:
    assert words(pre, text) == CUTS[pre](text) == expected


def _stable(char: str) -> bool:
    return unicodedata.category(char) == unicodedata.ucd_3_2_0.category(char) != "Cn"


@pytest.mark.parametrize("pre", sorted(set(CUTS) - {"llama3", "llama-v3"}))
@given(
    text=st.lists(
        st.one_of(
            st.characters(exclude_categories=["Cs", "Cn"]).filter(_stable),
            st.sampled_from(
                [" ", "  ", "\n", "\r", "\r\n", "\t", "'", "'s", "'LL", "'Re", "123", "4", ".", "_", "é", "中"]
            ),
        ),
        max_size=30,
    ).map("".join)
)
@settings(max_examples=200, deadline=None)
def test_words_of_any_text(pre: str, text: str) -> None:
    assert words(pre, text) == CUTS[pre](text)


@pytest.mark.parametrize("pre", sorted(CUTS))
def test_encoding_against_the_reference(tmp_path: Path, pre: str) -> None:
    tokenizer = gguf_tokenizer(tmp_path, pre=pre, add_bos_token=False)
    slow = reference.ReferenceBPE(files.TOKENS, files.MERGES, files.SPECIALS, CUTS[pre])
    for text in ("", "abc ab 123 1234", "ab\n<s>abc</s> <tool>12", "\x00\x1d 中文 \U000bffff", "<tool", "cab abcabc"):
        assert tokenizer.encode(text) == slow.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words_that_are_tokens(tmp_path: Path) -> None:
    """Llama 3 takes a word that is a token whole, even where no merges lead to it."""
    tokens = [*files.TOKENS[:-1], "xyz"]
    merges = [" ".join(merge) for merge in files.MERGES[:-1]]
    single = gguf_tokenizer(tmp_path, pre="llama-bpe", tokens=tokens, merges=merges, add_bos_token=False)
    assert single.encode("xyz") == [len(tokens) - 1]
    split = gguf_tokenizer(tmp_path, pre="qwen2", tokens=tokens, merges=merges)
    assert split.encode("xyz") == [tokens.index(char) for char in "xyz"]


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tmp_path, pre="qwen2")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    assert gguf_tokenizer(tmp_path, pre="smollm").decode(tokenizer.encode("e\u0301")) == "\u00e9"


def test_tokens_around_the_text(tmp_path: Path) -> None:
    assert gguf_tokenizer(tmp_path, pre="smollm").encode("") == []
    assert gguf_tokenizer(tmp_path, pre="smollm", add_bos_token=True).encode("") == [0]
    assert gguf_tokenizer(tmp_path, pre="llama-bpe").encode("") == [0]
    assert gguf_tokenizer(tmp_path, pre="llama-bpe", add_bos_token=False, add_eos_token=True).encode("") == [1]
    both = gguf_tokenizer(tmp_path, pre="smollm", add_bos_token=True, add_eos_token=True)
    assert both.encode("") == [0, 1]
    assert both.encode("", add_special_tokens=False) == []
    assert both.encode_chat([{"role": "user", "content": ""}])[:2] == both.encode("<s>u", add_special_tokens=False)


def test_user_defined_tokens_are_not_special(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(tmp_path)
    assert tokenizer.encode("<s><tool></s>") == [0, 2, 1]
    assert tokenizer.decode([0, 2, 1], skip_special_tokens=True) == "<tool>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, r"expected a tokenizer\.ggml\.model of 'gpt2' \(byte-level BPE\) or 'llama' .*got 't5'"),
        ({"pre": "default"}, r"the known values of tokenizer\.ggml\.pre are \['gpt-2', .*'smollm'\], got 'default'"),
        ({"pre": None}, r"'tokenizer\.ggml\.pre' is missing"),
        ({"add_space_prefix": True}, r"add_space_prefix must be false"),
        ({"tokens": None}, r"'tokenizer\.ggml\.tokens' is missing"),
        ({"tokens": [*files.TOKENS[:-1], "a"]}, r"holds the same token twice"),
        ({"tokens": list(range(files.VOCAB))}, r"must be a list of str, got an element 0"),
        ({"token_type": [1, 2]}, rf"one token type per token, got 2 for {files.VOCAB}"),
        ({"merges": ["a b", "ab x"]}, r"a merge must be two tokens that make a third, got 'ab x'"),
        ({"merges": ["ab"]}, r"a merge must be two tokens that make a third, got 'ab'"),
        ({"padding_token_id": files.VOCAB}, rf"must be below the {files.VOCAB} tokens"),
        ({"bos_token_id": None, "add_bos_token": True}, r"every text shall get a bos_token, but"),
        ({"tokens": [*files.TOKENS, "extra"], "token_type": [1] * (files.VOCAB + 1)}, "the tokenizer has"),
    ],
)  # fmt: skip
def test_bad_metadata(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        gguf_tokenizer(tmp_path, **changes)


def test_folder_and_gguf_agree(tmp_path: Path) -> None:
    folder = load_checkpoint(files.write_folder(tmp_path / "folder")).tokenizer
    rebuilt = gguf_tokenizer(tmp_path)
    message = [{"role": "user", "content": "abc 12"}]
    for text in ("", "abc 123\n", "<s>x<tool>", "é中🙂"):
        assert folder.encode(text) == rebuilt.encode(text)
        assert folder.decode(folder.encode(text)) == text
    assert folder.apply_chat_template(message) == rebuilt.apply_chat_template(message) == "<s>user:abc 12</s>"
    assert folder.encode_chat(message) == rebuilt.encode_chat(message)


def test_settings_of_the_training_do_not_cut_the_text(tmp_path: Path) -> None:
    folder = files.write_folder(tmp_path)
    backend = files.tokenizer_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_checkpoint(folder).tokenizer
    assert tokenizer.decode(tokenizer.encode("a long text")) == "a long text"


def test_random_encoding_is_refused(tmp_path: Path) -> None:
    folder = files.write_folder(tmp_path)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["dropout"] = 0.1
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"dropout must be absent, got 0\.1"):
        load_checkpoint(folder)


def test_tokens_around_the_text_of_a_folder(tmp_path: Path) -> None:
    folder = files.write_folder(tmp_path)
    backend = files.tokenizer_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_checkpoint(folder).tokenizer
    assert tokenizer.encode("a") == [0, *tokenizer.encode("a", add_special_tokens=False)]


def test_missing_bytes_of_a_small_vocabulary() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "Ġ": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, chat_template=None, special_tokens={}, eos_token_ids=())
    assert tokenizer.encode("a a") == [0, 1, 0]
    with pytest.raises(ValueError, match=r"no token for 'b' \(U\+0062\) at index 2"):
        tokenizer.encode("a b")
    with pytest.raises(ValueError, match="has no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


def test_bytes_of_tokens(tmp_path: Path) -> None:
    """The bytes of all tokens of a text are those of the text, special tokens included."""
    tokenizer = gguf_tokenizer(tmp_path, pre="smollm", add_bos_token=False)
    for text in ("abc ab 123", "ab\n<s>abc</s> <tool>12", "中文 é🙂"):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    for token_id in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match="token ids must be from 0"):
            tokenizer.token_bytes(token_id)


def test_bytes_of_tokens_of_vocabularies_that_spell_them_out() -> None:
    vocabulary = {"▁a": 0, "b": 1, "<0xE2>": 2, "<0x0A>": 3, "<0x0A": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend, chat_template=None, special_tokens={}, eos_token_ids=())
    assert [tokenizer.token_bytes(i) for i in range(5)] == [b" a", b"b", b"\xe2", b"\n", b"<0x0A"]

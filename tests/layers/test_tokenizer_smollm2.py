"""The tokenizer of the real model, against published encodings and a slow reference."""

import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_layers.checkpoint import Tokenizer, load_checkpoint, smollm2_path
from flax_layers.checkpoint.gguf_file import open_gguf
from tests.layers.reference_bpe import ReferenceBPE, smollm_words

# The vocabulary lacks these bytes. Only these control characters and the unassigned planes 4 to 11 need them in UTF-8.
UNKNOWN_CONTROLS = "\x04\x06\x13\x14\x16\x1d"

HOSTILE = [
    "",
    " ",
    "   ",
    "\n",
    "\t\t \n\r\n  \n",
    "trailing  ",
    "  leading",
    "a  b   c",
    "0123456789",
    "3.14159 -1e-10 1,000,000 007",
    "x1y22z333",
    "١٢٣ ۴۵۶ ४५६ Ⅻ ½ ²",
    "don't I'LL we've they'd it's 'tis ''s '",
    "Привет, мир! Ελληνικά שלום مرحبا",
    "你好，世界。日本語テキスト 한국어",
    "हिन्दी தமிழ் ไทย ქართული አማርኛ",
    "👩‍👩‍👧‍👦 👍🏽 🇫🇷 ❤️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "e\u0301 vs \u00e9, a\u0323\u0307 Z\u0351\u036f\u0343a\u0325l",
    "\u200b\u200d\ufeff\u00ad\u2060",
    "\u00a0nbsp\u3000ideographic\u2028line\u2029par\u0085nel\u1680",
    "\x00\x01\x02\x03\x05\x07\x08\x0b\x0c\x0e\x1b\x1c\x1e\x1f\x7f\x80\x9f",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0001f9ff \U000e0041 \U0003134a \U0010ffff",
    "def f(x):\n    return x  # comment\n\n\n\tpass",
    "https://example.org/a?b=c&d=%20#e",
    "<|im_start|>user\nHi<|im_end|>\n",
    "a<|im_end|>1<|endoftext|> <|im_start|>",
    "<|im_start<|im_start|>|> <|IM_END|> <repo_name> <reponame>",
    "ĠĊ Ġ literally",
    "a" * 300,
    "ab" * 150,
    "!" * 70,
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_checkpoint(smollm2_path()).tokenizer


@pytest.fixture(scope="module")
def reference() -> ReferenceBPE:
    file = open_gguf(smollm2_path())
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    merges: list[Any] = [tuple(merge.split(" ")) for merge in file.get_list("tokenizer.ggml.merges", str)]
    assert tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return ReferenceBPE(tokens, merges, tokens[:17], smollm_words)


# Published results of the model's original tokenizer in `transformers` and of llama.cpp.
PUBLISHED = {
    "hello world": [28120, 905],
    '" and "hello world"': [18, 284, 476, 28120, 905, 18],
    "La capitale de la France est Paris.": [15319, 47765, 1121, 367, 2618, 4649, 1264, 7042, 30],
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nQuelle est la capitale de la France ? Réponds en une phrase.<|im_end|>\n"
    "<|im_start|>assistant\n": [
        *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2),
        *(198, 1, 4093, 198, 65, 2726, 290, 1264, 2618, 47765, 1121, 367, 2618, 4649, 9148, 428, 2756, 96, 19870, 430),
        *(16520, 8715, 30, 2, 198, 1, 520, 9531, 198),
    ],
}  # fmt: skip

# Recorded here; the reference below agrees.
RECORDED = {
    "don't\t\n\n  x  ": [12420, 982, 197, 8866, 1792, 256],
    "Привет, мир!": [155, 249, 46879, 16464, 32547, 28, 41337, 7872, 9175, 17],
    "你好 世界": [18645, 250, 48392, 138, 216, 7906, 240, 178, 239, 230],
    "👩‍👩‍👧 é": [10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 26411],
    "Hello<|im_end|>\n١٢٣ Ⅻ": [19556, 2, 198, 164, 111, 164, 112, 164, 113, 216, 173, 223, 121],
}


@pytest.mark.parametrize("known", [PUBLISHED, RECORDED], ids=["published", "recorded"])
def test_known_encodings(tokenizer: Tokenizer, known: dict[str, list[int]]) -> None:
    for text, ids in known.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text


def test_special_tokens_and_sizes(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)
    assert [tokenizer.encode(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [[0], [1], [2]]
    assert tokenizer.decode([1, 28120, 2]) == "<|im_start|>hello<|im_end|>"
    assert tokenizer.decode([1, 28120, 2], skip_special_tokens=True) == "hello"


def test_printable_ascii_follows_the_special_tokens(tokenizer: Tokenizer) -> None:
    """After 17 special tokens the vocabulary lists the bytes in order, from `!` (33) on: id = byte - 16."""
    for byte in range(33, 127):
        assert tokenizer.encode(chr(byte)) == [byte - 16]


@pytest.mark.parametrize("number", ["0", "42", "3.14159", "1234567890", "-273.15", "10" * 40])
def test_every_digit_is_a_token(tokenizer: Tokenizer, number: str) -> None:
    assert tokenizer.encode(number) == [ord(char) - 16 for char in number]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_against_the_reference(tokenizer: Tokenizer, reference: ReferenceBPE, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == text


def _stable(char: str) -> bool:
    """Whether the character has the category that it had in Unicode 3.2, so that libraries of any age agree on it."""
    return unicodedata.category(char) == unicodedata.ucd_3_2_0.category(char) != "Cn" and char not in UNKNOWN_CONTROLS


PIECES = st.one_of(
    st.characters(exclude_categories=["Cs", "Cn"], exclude_characters=UNKNOWN_CONTROLS, max_codepoint=0x2FFFF).filter(
        _stable
    ),
    st.sampled_from(
        [" ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "12", ".", "é", "<|im_end|>", "the", " of", "中", "🙂"]
    ),
)


@given(st.lists(PIECES, max_size=40).map("".join))
@settings(max_examples=100, deadline=None)
def test_any_text_against_the_reference(tokenizer: Tokenizer, reference: ReferenceBPE, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("char", [*UNKNOWN_CONTROLS, "\U00040000", "\U000bffff"])
def test_text_without_tokens_is_refused_not_dropped(tokenizer: Tokenizer, char: str) -> None:
    with pytest.raises(ValueError, match=rf"no token for .*\(U\+{ord(char):04X}\) at index 3; remove the character"):
        tokenizer.encode(f"abc{char}d")


def test_bad_arguments(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"lone surrogate '\\ud83d' at index 1"):
        tokenizer.encode("a\ud83d")
    with pytest.raises(TypeError, match="text must be a str, got bytes"):
        tokenizer.encode(b"abc")  # type: ignore[arg-type]
    for token_id in (-1, 49152, 1 << 40):
        with pytest.raises(ValueError, match=rf"token ids must be from 0 to 49151 and have a token, got {token_id}"):
            tokenizer.decode([28120, token_id])
    with pytest.raises(TypeError):
        tokenizer.decode([1.0])  # type: ignore[list-item]


def test_part_of_a_character_is_a_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("👩")[:1]) == "\ufffd"
    assert tokenizer.decode([]) == ""


DEFAULT_SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


def test_chat_template(tokenizer: Tokenizer) -> None:
    user = {"role": "user", "content": "  Hi <b>&'\"\n"}
    system = {"role": "system", "content": "Be brief."}
    assistant = {"role": "assistant", "content": "Hello!"}
    render = tokenizer.apply_chat_template
    turn = "<|im_start|>user\n  Hi <b>&'\"\n<|im_end|>\n"
    brief = "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert render([user]) == DEFAULT_SYSTEM + turn
    assert render([user], add_generation_prompt=True) == DEFAULT_SYSTEM + turn + "<|im_start|>assistant\n"
    assert render([system, user]) == brief + turn
    assert render([system, user, assistant]) == brief + turn + "<|im_start|>assistant\nHello!<|im_end|>\n"
    assert render([system]) == brief


def test_encoded_chat(tokenizer: Tokenizer) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    # Published for this model and prompt.
    assert tokenizer.encode_chat(question, add_generation_prompt=True) == [
        *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2),
        *(198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
    ]  # fmt: skip

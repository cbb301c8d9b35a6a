"""Text of tokens that come one by one, and stop strings."""

from bijax.serving.text import TextStream


class Bytes:
    """A tokenizer whose tokens are bytes of UTF-8."""

    def decode(self, tokens: list[int]) -> str:
        if any(token > 255 for token in tokens):
            raise ValueError("no such token")
        return bytes(tokens).decode(errors="replace")


def stream(text: str, stop: tuple[str, ...] = ()) -> tuple[TextStream, list[str], str | None]:
    """Returns a stream after a text, what was sure after each byte, and the stop string that ended it."""
    found, sure = TextStream(Bytes(), stop), []
    for byte in text.encode():
        before = len(found)
        found.add(byte)
        reason = found.find_stop(len(found) - before)
        sure.append(found.sure)
        if reason is not None:
            return found, sure, reason
    return found, sure, None


def test_characters_come_whole() -> None:
    found, sure, _ = stream("aé€😀b")
    assert sure == ["a", "a", *["aé"] * 3, *["aé€"] * 4, "aé€😀", "aé€😀b"][: len(sure)]
    assert found.whole == "aé€😀b"


def test_an_incomplete_character_comes_at_the_end() -> None:
    found = TextStream(Bytes(), ())
    for byte in "a€".encode()[:-1]:
        found.add(byte)
    assert found.whole == "a"
    found.finish()
    assert found.whole == "a\ufffd"


def test_stop_strings() -> None:
    found, sure, reason = stream("hello world", stop=("zzz", "lo w"))
    assert reason == "lo w"
    assert found.whole == "hel"
    assert sure == ["h", "he", "he", "he", "hel", "hel", "hel"][: len(sure)] or sure[-1] == "hel"
    assert all("hel".startswith(s) for s in sure)  # nothing was shown that had to be taken back


def test_what_may_become_a_stop_string_is_held_back() -> None:
    _, sure, reason = stream("abcabd", stop=("abcabe",))
    assert reason is None
    assert sure == ["", "", "", "", "", "abcabd"]


def test_tokens_without_text() -> None:
    found = TextStream(Bytes(), ())
    for token in (104, 999, 105):
        found.add(token)
    assert found.whole == "hi"


def test_tokens_that_are_left_out() -> None:
    found = TextStream(Bytes(), ("hi",), left_out={35})
    for token in b"#h#i#":
        found.add(token)
        if found.find_stop(1) is not None:
            break
    assert (found.whole, found.tail(0)) == ("", "hi")


def test_the_tail_holds_what_is_not_whole() -> None:
    found = TextStream(Bytes(), ())
    for byte in "a€".encode()[:-1]:
        found.add(byte)
    assert (found.whole, found.tail(0), found.tail(1)) == ("a", "a\ufffd", "\ufffd")

"""The chat prompts that the demo answers."""

from pathlib import Path

from bijax.demo.errors import DemoError

# Of different lengths, so that batches are ragged and a chunk edge falls elsewhere in each; the longest pass 64 tokens.
BUILT_IN = (
    "Why does a bicycle stay upright while it moves?",
    "Write a short poem about the sea and the wind.",
    "What is 17 * 23 + 4096? Show every step of the calculation.",
    "¿Por qué el cielo es azul durante el día y rojo al atardecer?",
    "Hi!",
    "Write a Python function that takes a list of words and returns the ones that are palindromes, "
    "ignoring upper and lower case. Explain how it works and give two examples of its use.",
    "请用一句话介绍一下北京。",
    "Please summarise the following text in one sentence. The lighthouse on the northern cape was built in 1871 from "
    "granite that had to be shipped across the bay in 64 separate loads. For ninety years a keeper and his family "
    "lived at its foot, trimmed the lamp every four hours, and wrote down the weather, the passing ships and the "
    "birds that struck the glass. When the light was made automatic in 1961, the last keeper left eleven thousand "
    "pages of notes, which biologists now read to learn how the routes of migrating birds have changed.",
)


def choose_prompts(choice: str) -> tuple[str, ...]:
    """Reads the value of `--prompts`.

    Args:
        choice: A whole number N, for the first N of the built-in prompts, or the path of a UTF-8 text file with one
            prompt in each line. Blank lines are skipped.

    Returns:
        At least one prompt.

    Raises:
        DemoError: If the number is out of range, or if the file cannot be read or holds no prompt.

    Example:
        >>> choose_prompts("1")
        ('Why does a bicycle stay upright while it moves?',)
    """
    try:
        count = int(choice)
    except ValueError:
        return _read_prompts(Path(choice))
    if not 1 <= count <= len(BUILT_IN):
        raise DemoError(
            f"--prompts must be from 1 to {len(BUILT_IN)} (the number of built-in prompts) or a file, got {count}; "
            "write more prompts into a text file, one in each line, and give its path"
        )
    return BUILT_IN[:count]


def _read_prompts(path: Path) -> tuple[str, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DemoError(
            f"--prompts must be a number or a UTF-8 text file with one prompt in each line, got {str(path)!r}: {error}"
        ) from error
    prompts = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not prompts:
        raise DemoError(f"--prompts: {path} holds no prompt; write one in each line")
    return prompts

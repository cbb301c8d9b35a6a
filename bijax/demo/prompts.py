"""The chat prompts that the demo answers."""

from pathlib import Path

from bijax.demo.errors import DemoError

# Open questions, whose answers have many equally probable words; of different lengths, so that batches are ragged.
BUILT_IN = (
    "Tell me a short story about a robot.",
    "Invent a name for a coffee shop.",
    "Write a haiku about autumn.",
    "Write a postcard from the mountains.",
    "What is love?",
    "Write a Python function that returns the words of a list that are palindromes, ignoring case.",
    "What should I do on a rainy Sunday?",
    "Write a short poem about the sea and the wind.",
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
        ('Tell me a short story about a robot.',)
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

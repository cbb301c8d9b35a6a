"""The tokenizer of a Hugging Face folder."""

from pathlib import Path
from typing import Any

import tokenizers

from .errors import CheckpointError
from .hf_fields import read_json
from .tokenizer import Tokenizer

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


# Files of tokenizers in unsupported formats.
_OTHER_FORMS = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")


def hf_tokenizer(folder: Path, eos_token_ids: tuple[int, ...]) -> Tokenizer | None:
    """Reads `tokenizer.json`, and the chat template and special tokens next to it.

    The template comes from `chat_template.jinja`, else from `tokenizer_config.json`; among several, the one named
    `default` is used, as in `transformers`.

    Args:
        folder: A Hugging Face folder.
        eos_token_ids: Tokens that end generation.

    Returns:
        The tokenizer; None if the folder has none in any format.

    Raises:
        FileNotFoundError: If there is no `tokenizer.json`, but a tokenizer in another format.
        CheckpointError: If a file is damaged or the tokenizer is not deterministic (BPE dropout).
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [name for name in (*_OTHER_FORMS, "tokenizer_config.json") if (folder / name).is_file()]
        if not others:
            return None
        raise FileNotFoundError(
            f"{folder} has {others[0]}, but no tokenizer.json; save the tokenizer there in the fast format, or load the"
            " checkpoint without its tokenizer"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:
        # For a file that it cannot read the package raises a bare Exception, or PyO3's panic, a BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"{path}: expected a tokenizer, got {error}; the file is damaged: get it again"
        ) from error
    dropout = getattr(backend.model, "dropout", None)
    if dropout:
        raise CheckpointError(f"{path}: dropout must be absent, got {dropout}; it would make the encoding random")
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    return Tokenizer(
        backend,
        chat_template=_chat_template(folder, config),
        special_tokens={
            role: _text(config[role], role, config_path) for role in _ROLES if config.get(role) is not None
        },
        eos_token_ids=eos_token_ids,
    )


def _text(token: Any, role: str, path: Path) -> str:
    # Written as a string, or as an object that also says how the token is matched.
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise CheckpointError(f"{path}: {role} must be a string or an object with 'content', got {token!r}")
    return text


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: expected UTF-8 text, got {error}; the file is damaged") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        if "default" not in named:
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'}: one of several chat templates must be named 'default', "
                f"got {list(named)}"
            )
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template must be a string, got {template!r}")
    return template

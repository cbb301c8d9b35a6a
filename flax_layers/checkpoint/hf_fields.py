"""Fields of the JSON files in a Hugging Face folder."""

import json
import math
from pathlib import Path
from typing import Any, Final, TypeGuard

from .errors import CheckpointError

_INT32: Final = 2**31 - 1

MOST_LISTED: Final = 2**16
"""Most layers of a model, and most columns of a head: lists are made of them before the weights are looked at."""


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        FileNotFoundError: If the file does not exist.
        CheckpointError: If it is not JSON or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, got {error}; the file is damaged: get it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}; the file is damaged")
    return value


def whole_number(
    fields: dict[str, Any], name: str, path: Path, default: int | None = None, *, most: int = _INT32
) -> int:
    """Returns an integer of the file.

    Raises:
        CheckpointError: If it is missing without a default, is not an integer, or is above `most`.
    """
    value = fields.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool):
        raise CheckpointError(f"{path}: {name} must be an integer, got {value!r}; the file is damaged or incomplete")
    if value > most:
        raise CheckpointError(f"{path}: {name} must be at most {most}, got {value}; the file is damaged")
    return value


def number(value: object, name: str, path: Path) -> float:
    """Returns a finite number of the file as a float.

    Raises:
        CheckpointError: If it is not.
    """
    if not is_finite(value):
        raise CheckpointError(f"{path}: {name} must be a finite number, got {value!r}; the file is damaged")
    return float(value)


def is_finite(value: object) -> TypeGuard[float]:
    """Returns whether a value is a number that a float can hold, and not infinite or nan."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer
        return False


def flag(fields: dict[str, Any], name: str, path: Path) -> bool:
    """Returns whether something holds that is absent, null, true or false in the file.

    Raises:
        CheckpointError: If it is something else.
    """
    value = fields.get(name) or False
    if value is not True and value is not False:
        raise CheckpointError(f"{path}: {name} must be true or false, got {value!r}; the file is damaged")
    return value

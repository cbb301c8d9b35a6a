"""Models of the Hugging Face hub."""

import importlib.util
import re
from pathlib import Path
from typing import Final

HUB_NAME: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]


def download(name: str) -> Path:
    """Returns the folder of a model in the hub's cache, and downloads what is missing there.

    `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` work as usual.

    Args:
        name: OWNER/MODEL.

    Raises:
        FileNotFoundError: If it is not there and cannot be downloaded. The message says how to do it elsewhere.
    """
    remedy = (
        f"on a machine with a network, run `pip install huggingface_hub` and `hf download {name} --local-dir"
        f" {name.partition('/')[2]}`, copy the folder here and give its path"
    )
    if importlib.util.find_spec("huggingface_hub") is None:
        raise FileNotFoundError(
            f"there is no file or folder {name}, and the package huggingface_hub, which could download the model of"
            f" that name, is not installed: run `pip install huggingface_hub`; or, {remedy}"
        )
    # Optional, and slow to import.
    import huggingface_hub

    try:
        # What is in the cache is taken as it is: a server that starts again serves the same weights.
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    except (OSError, ValueError):
        pass
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:  # of the network, of its libraries, and of the hub, without a common base
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise FileNotFoundError(
            f"there is no file or folder {name}, and no model of that name could be downloaded from the Hugging Face"
            f" hub ({reason}); {remedy}"
        ) from error

"""Writes constraints.txt: the newest versions of everything that the project and its extras install.

Run by ``make lock``. The versions are resolved, not installed, in a fresh environment of the oldest Python that the
project supports, so that each pin installs there.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 12)
# Not in the project's metadata, but scripts/setup.sh installs them: pip itself and the build backend.
TOOLS = ["pip", "hatchling"]
# Extras whose packages want older versions than the others (google-tunix: safetensors before 0.8) or bring many more
# (gemma: TensorFlow).
APART = {"tunix", "gemma"}
HEADER = """\
# Written by `make lock`; do not edit. Pins every package that the Makefile installs, for all extras.
"""


def resolve(python: Path, requirements: list[str]) -> dict[str, str]:
    """Returns the version that pip would choose for each requirement and for all that it depends on."""
    command = [python, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed", "--report", "-"]
    report = subprocess.run([*command, *requirements], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    packages = [item["metadata"] for item in json.loads(report)["install"]]
    return {re.sub("[-_.]+", "-", package["name"].lower()): package["version"] for package in packages}


def main() -> None:
    if sys.version_info[:2] != OLDEST_PYTHON:
        expected = ".".join(map(str, OLDEST_PYTHON))
        sys.exit(f"make lock needs Python {expected}, not {sys.version.split()[0]}: make lock PYTHON=python{expected}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ",".join(extra for extra in project["optional-dependencies"] if extra not in APART)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-qq", "--upgrade", "pip"], check=True)
        versions = resolve(python, [f".[{extras}]", *TOOLS])
    del versions[project["name"]]
    pins = [f"{name}=={version}\n" for name, version in sorted(versions.items())]
    (ROOT / "constraints.txt").write_text(HEADER + "".join(pins))
    print(f"constraints.txt: {len(pins)} packages pinned")


if __name__ == "__main__":
    main()

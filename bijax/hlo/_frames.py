"""The source line of an instruction.

A module holds tables of files, locations and stack frames, and an instruction the number of a frame. Older modules
store the file and the line in the instruction.
"""

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

_LIBRARIES: Final = re.compile(
    r"/bijax/(?:core|dispatch|lax|ops|hlo|inspect|transform|parallel|testing|sampling|serving)/|/(?:pallas_kernels|flax_layers|(?:site|dist)-packages)/"
    r"|/jax/(?:_src|experimental)/"  # where JAX is used from a checkout
)
_PARTS: Final = {
    "FileNames": r'(\d+) "((?:[^"\\]|\\.)*)"',
    "FileLocations": r"(\d+) \{.*?\bfile_name_id=(\d+).*?\bline=(\d+)",
    "StackFrames": r"(\d+) \{.*?\bfile_location_id=(\d+)(?:.*?\bparent_frame_id=(\d+))?",
}


@dataclasses.dataclass(frozen=True)
class Frames:
    """The tables of a module.

    Attributes:
        files: Path by number.
        locations: Number of the file, and line.
        frames: Number of the location, and number of the calling frame (0: none).
    """

    files: dict[int, str] = dataclasses.field(default_factory=dict)
    locations: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    frames: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def source(self, metadata: Mapping[str, str]) -> str:
        """Returns "FILE:LINE" of the innermost line outside libraries, or else of the innermost line.

        Args:
            metadata: Metadata of an instruction; the result is empty if it holds no location.
        """
        if "source_file" in metadata:
            return f"{metadata['source_file']}:{metadata.get('source_line', '?')}"
        stack = list(self._stack(int(metadata.get("stack_frame_id", 0))))
        return user_line(stack) or next((f"{file}:{line}" for file, line in stack), "")

    def _stack(self, frame: int) -> Iterator[tuple[str, int]]:
        while frame in self.frames:
            location, parent = self.frames[frame]
            file, line = self.locations.get(location, (0, 0))
            if file in self.files:
                yield self.files[file], line
            frame = parent if parent < frame else 0  # a damaged table must not cause an infinite loop


def user_line(stack: Sequence[tuple[str, int]]) -> str:
    """Returns "FILE:LINE" of the innermost line outside libraries; empty if there is none.

    Args:
        stack: Files and lines, the innermost first.
    """
    return next((f"{file}:{line}" for file, line in stack if not _LIBRARIES.search(f"/{file}")), "")


def short_line(line: str) -> str:
    """Returns "FILE:LINE" without folders; a cell of a notebook is named as the notebook names it, "In[5]:14".

    Args:
        line: "FILE:LINE", or empty; a tilde before it, for a line that is near, is kept.
    """
    if line.startswith("~"):
        return f"~{short_line(line[1:])}"
    file, _, number = line.rpartition(":")
    # IPython compiles each cell as a file with a hash for its name.
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    naming = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cell = naming(file) if naming and file else None
    return f"{cell[1]}:{number}" if cell else line.rpartition("/")[2]


def read_frames(tables: Mapping[str, list[str]]) -> Frames:
    """Reads the lines of the tables.

    Args:
        tables: Lines of each table by title.
    """
    found = {
        title: [match.groups() for line in tables.get(title, ()) if (match := re.match(pattern, line.strip()))]
        for title, pattern in _PARTS.items()
    }
    parents = [int(parent or 0) for _, _, parent in found["StackFrames"]]
    # XLA writes the number of the calling frame plus one, so the outermost frame seems to call itself.
    offset = 1 if parents and min(parents) > 0 else 0
    return Frames(
        files={int(number): path for number, path in found["FileNames"]},
        locations={int(number): (int(file), int(line)) for number, file, line in found["FileLocations"]},
        frames={int(n): (int(place), int(parent or 0) - offset) for n, place, parent in found["StackFrames"]},
    )

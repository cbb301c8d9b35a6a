"""The colours of the picture."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Colours for a light or a dark page.

    Attributes:
        page: Background.
        box: Background of a text.
        ink: Text.
        faint: Less important text.
        same: The same bits.
        changed: A text that changes.
        parted: Tokens after the first one that changes.
    """

    page: str
    box: str
    ink: str
    faint: str
    same: str
    changed: str
    parted: str


LIGHT = Scheme("#ffffff", "#f4f5f7", "#222222", "#666666", "#cfe8dc", "#c0271f", "#2d2142")
DARK = Scheme("#131416", "#1f2125", "#e4e6ea", "#a0a5ad", "#26503f", "#ff7b6e", "#d9ccf2")

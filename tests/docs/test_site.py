"""The site in a browser: no page scrolls sideways, cuts a name, or has a picture that a dark page makes unreadable."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import site
from tests.docs.pages import ROOT

needs_chromium = pytest.mark.skipif(site.browser() is None, reason="needs Chromium, Debian's package chromium")
PAGE = "<!doctype html><style>{style}</style><article>{body}</article>"
PICTURE = '<svg xmlns="http://www.w3.org/2000/svg" width="90" height="60"><rect {}/></svg>'
CUT = "h1 {width: 5em; overflow: hidden; white-space: nowrap}"


@pytest.mark.tier("full")
@needs_chromium
def test_faults_are_found(tmp_path: Path) -> None:
    """The control: a page with each fault, and one with none."""
    pages = {
        "good": PAGE.format(style="", body="<h1>A name</h1>"),
        "wide": PAGE.format(style="article {width: 1200px}", body="<p>text</p>"),
        "cut": PAGE.format(style=CUT, body=f"<h1>{'name ' * 30}</h1>"),
    }
    pictures = {
        "ink": 'width="20" height="60" fill="black"',
        "pale": 'width="20" height="60" fill="white"',
        "slab": 'width="90" height="60" fill="white"',
    }
    for name, shape in pictures.items():
        (tmp_path / f"{name}.svg").write_text(PICTURE.format(shape))
        pages[name] = PAGE.format(style="", body=f'<img src="{name}.svg">')
    for name, text in pages.items():
        (tmp_path / f"{name}.html").write_text(text)
    found = site.faults(tmp_path)
    assert {(page, what) for page, _, what, _ in found} == {
        ("wide.html", "scrolls sideways"),
        ("cut.html", "cuts a name"),
        ("ink.html", "has dark ink on a dark page"),
        ("slab.html", "has a white picture on a dark page"),
    }
    assert {width for page, width, *_ in found if page == "wide.html"} == {375, 800, 1100}


@pytest.mark.tier("full")
@needs_chromium
def test_every_page_at_every_width(tmp_path: Path) -> None:
    missing = [name for name in ("sphinx", "furo", "myst_nb") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs the extra docs; not installed: {', '.join(missing)}")
    build = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "-q", str(ROOT / "docs"), str(tmp_path / "site")]
    subprocess.run(build, cwd=ROOT, check=True)
    assert len(site.pages(tmp_path / "site")) > 30
    assert site.faults(tmp_path / "site") == []

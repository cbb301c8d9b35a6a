"""The built site as a browser shows it: `python -m tests.docs.site FOLDER` lists what is wrong with its pages.

A page of this module, served next to the site, opens every page in a frame of each width and looks for sideways
scrolling, cut names, and, on a dark page, pictures that cannot be read.
"""

import contextlib
import functools
import http.server
import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTHS = (375, 800, 1100, 1366, 1440)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 900
LEFT_OUT = ("_modules", "_sources", "_static", "genindex", "py-modindex", "search")

_MEASURE = """<!doctype html><body><script>
const PAGES = %(pages)s, WIDTHS = %(widths)s;
const names = ".toc-tree a, .sidebar-tree a, h1, h2, h3, dt.sig, .sidebar-brand-text";

function wait(frame) { return new Promise(done => { frame.onload = () => requestAnimationFrame(() => done()); }); }

function look(frame, page, width) {
  const found = [], doc = frame.contentDocument, root = doc.documentElement;
  if (root.scrollWidth > root.clientWidth)
    found.push([page, width, "scrolls sideways", root.scrollWidth + " > " + root.clientWidth]);
  for (const element of doc.querySelectorAll(names)) {
    const style = frame.contentWindow.getComputedStyle(element), box = element.getBoundingClientRect();
    const hidden = !box.width || style.visibility == "hidden" || box.right <= 0 || box.left >= width;
    const clips = style.overflowX == "hidden" || style.textOverflow == "ellipsis";
    if (!hidden && (box.right > root.clientWidth + 1 || (clips && element.scrollWidth > element.clientWidth + 1)))
      found.push([page, width, "cuts a name", element.textContent.trim().slice(0, 80)]);
  }
  return found;
}

async function dark(frame, page) {
  const found = [], doc = frame.contentDocument;
  doc.body.dataset.theme = "dark";
  await new Promise(done => setTimeout(done, 50));
  for (const image of doc.querySelectorAll("article img")) {
    if (frame.contentWindow.getComputedStyle(image).display == "none") continue;
    const copy = new Image();
    await new Promise((done, fail) => {
      copy.onload = done;
      copy.onerror = () => fail("not loaded: " + image.src.slice(0, 200));
      copy.src = image.src;
    });
    const canvas = document.createElement("canvas"), width = canvas.width = 240, height = canvas.height = 160;
    const context = canvas.getContext("2d");
    context.drawImage(copy, 0, 0, width, height);
    const data = context.getImageData(0, 0, width, height).data;
    let clear = 0, ink = 0, light = 0;
    for (let i = 0; i < data.length; i += 4) {
      if (data[i + 3] < 128) { clear++; continue; }
      ink++;
      light += (0.2126 * data[i] + 0.7152 * data[i + 1] + 0.0722 * data[i + 2]) / 255;
    }
    const through = clear / (clear + ink), mean = light / Math.max(ink, 1);
    const own = image.closest(".cell_output") !== null;  // a notebook's pictures bring their background
    const background = frame.contentWindow.getComputedStyle(image).backgroundColor;
    const white = background == "rgb(255, 255, 255)";
    if (through > 0.2 && !white && mean < 0.3)
      found.push([page, "dark", "has dark ink on a dark page", image.getAttribute("src")]);
    if (through <= 0.2 && !own && mean > 0.7)
      found.push([page, "dark", "has a white picture on a dark page", image.getAttribute("src")]);
  }
  return found;
}

(async () => {
  const found = [];
  for (const page of PAGES) {
    const frame = document.createElement("iframe");
    frame.style.cssText = "border:0;height:900px";
    document.body.appendChild(frame);
    frame.style.width = WIDTHS[0] + "px";
    const loaded = wait(frame);
    frame.src = "/" + page;
    await loaded;
    for (const width of WIDTHS) {
      frame.style.width = width + "px";
      frame.contentDocument.documentElement.offsetWidth;
      found.push(...look(frame, page, width));
    }
    try { found.push(...await dark(frame, page)); }
    catch (error) { found.push([page, "dark", "could not be looked at", String(error)]); }
    frame.remove();
  }
  await fetch("/found", {method: "POST", body: JSON.stringify({pages: PAGES.length, found})});
})();
</script>"""


def browser() -> str | None:
    """Returns the path of Chromium, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def pages(site: Path) -> list[str]:
    """Returns the pages that people read."""
    found = [path.relative_to(site) for path in sorted(site.rglob("*.html"))]
    return [path.as_posix() for path in found if path.parts[0].removesuffix(".html") not in LEFT_OUT]


def faults(site: Path) -> list[list[Any]]:
    """Returns what is wrong: page, width or "dark", what, and where.

    Raises:
        RuntimeError: If there is no browser, or if it does not answer.
    """
    command = browser()
    if command is None:
        raise RuntimeError(f"expected one of {', '.join(BROWSERS)} on the PATH, found none")
    answers: queue.Queue[Any] = queue.Queue()
    with _served(site, answers) as address, tempfile.TemporaryDirectory() as profile:
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        arguments += ["--window-size=1600,1000", f"--user-data-dir={profile}", "--remote-debugging-port=0"]
        process = subprocess.Popen(
            [command, *arguments, f"{address}/measure"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            answer = answers.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise RuntimeError(f"the browser did not answer within {TIMEOUT_S} s") from None
        finally:
            process.terminate()
            process.wait()
    assert answer["pages"] == len(pages(site))
    found: list[list[Any]] = answer["found"]
    return found


@contextlib.contextmanager
def _served(site: Path, answers: "queue.Queue[Any]") -> Iterator[str]:
    measure = (_MEASURE % {"pages": json.dumps(pages(site)), "widths": json.dumps(WIDTHS)}).encode()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/measure":
                super().do_GET()
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(measure)

        def do_POST(self) -> None:
            answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]))
    print("\n".join(": ".join(map(str, line)) for line in wrong) or "nothing is wrong")
    sys.exit(bool(wrong))

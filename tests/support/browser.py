"""Measure the pages of a built site in headless Chromium, which need not be there."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-component-update", "--disable-background-networking", "--hide-scrollbars"),
]
PATH = "/measured"
SCRIPT = """<!doctype html><body><script>
const measure = async () => {
  const measured = [];
  for (const width of %(widths)s) {
    const frame = document.createElement("iframe");
    frame.style = `border: 0; width: ${width}px; height: 800px`;
    document.body.append(frame);
    for (const page of %(pages)s) {
      await new Promise((done) => { frame.onload = done; frame.src = page; });
      const inner = frame.contentDocument, root = inner.documentElement;
      const cut = [...inner.querySelectorAll(".content *")].filter(
        (each) => each.scrollWidth > each.clientWidth + 1 && each.matches(".table-wrapper, .equations, .diagram, .output, pre"));
      measured.push([page, width, root.scrollWidth, cut.map((each) => `${each.className} ${each.scrollWidth}`)]);
    }
    frame.remove();
  }
  await fetch("%(path)s", {method: "POST", body: JSON.stringify(measured)});
};
measure();
</script>"""


def browser() -> str | None:
    """Return the path of a browser; None without one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def measured(
    site: Path, pages: Sequence[str], widths: Sequence[int], scratch: Path
) -> list[tuple[str, int, int, list[str]]]:
    """Return for each page and width of a window the width of its content, and what scrolls sideways in it.

    Args:
        site: folder of the built site.
        pages: paths of pages in it.
        widths: widths of the window in pixels.
        scratch: folder for the browser's profile.
    """
    found: Queue[str] = Queue()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != PATH:
                super().do_GET()
                return
            script = SCRIPT % {
                "pages": json.dumps([f"/{page}" for page in pages]),
                "widths": json.dumps(widths),
                "path": PATH,
            }
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(script.encode())

        def do_POST(self) -> None:
            found.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Write no log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}{PATH}"
    program = browser()
    assert program is not None
    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={scratch}", "--remote-debugging-port=0", address],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        return [(page.lstrip("/"), *rest) for page, *rest in json.loads(found.get(timeout=600))]
    finally:
        process.kill()
        process.wait()
        server.shutdown()

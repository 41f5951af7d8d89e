"""Pictures of the board for docs/board.md: `python -m tests.helpers.board_pictures RUNS RUN docs/pictures`.

RUNS is a folder of runs, RUN the one whose page is shown. Needs Chromium. Colours are reduced to a palette, so that a
picture stays below 100 kB.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlencode

import uvicorn
from PIL import Image

from longhaul.training import board, runs
from tests.helpers import browser
from tests.helpers.browser import Browser

COLOURS = 64


def main(where: str, run: str, out: str) -> None:
    config = uvicorn.Config(board.application(where), port=0, log_config=None, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    others = urlencode([("run", name) for name in runs.names(Path(where))])
    window = Browser(browser.find() or "")
    for name, path, dark, ready in (
        ("board-list", "/", False, "#runs tbody tr:not(.gap)"),
        ("board-run", f"/run/{run}", True, "#live.on"),
        ("board-compare", f"/compare?{others}", False, "canvas"),
    ):
        window.show(dark=dark)
        window.open(address + path)
        window.page.wait_for_selector(ready)
        window.page.wait_for_timeout(500)
        shot = Image.open(io.BytesIO(window.page.screenshot())).convert("RGB")
        shot.quantize(COLOURS).save(Path(out) / f"{name}.png", optimize=True)
    window.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Board: a local web page of the runs in a folder, which lives while they train. A Starlette application.

It only reads the runs' files, and looks at them while a page is open. Every text of a run reaches the page as JSON and
is shown as text. The page loads nothing from elsewhere; its policy forbids inline scripts. A run's report and pictures
have scripts of their own, and are shown in a sandbox without access to the board.

On loopback the Host header must be a loopback name, so that no web site can reach the board by a name of its own (DNS
rebinding). Beyond loopback every request needs the token: as `?token=` once, which becomes a cookie, or as a header.
"""

from __future__ import annotations

import asyncio
import csv
import hmac
import io
import json
import math
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from longhaul.runtime import files
from longhaul.runtime.errors import RunError
from longhaul.telemetry import pages, sinks
from longhaul.training import comparison, runs, store
from longhaul.training.runs import Curves

POINTS = 1000
"""Most rows of a run's curves; a screen has few pixels more."""

MOST_COMPARED = 100

PERIOD, REMOTE_PERIOD = 0.5, 5.0
"""Seconds between two looks at a folder while a page is open; likewise at a store's address."""

MOST_OPEN = 16
"""Runs whose curves are held."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")

COOKIE = "longhaul-token"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
BOXED = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'self'"
)
"""Policies of the board's pages, and of what a run's own page may do."""

ASSETS = {
    "board.js": "text/javascript",
    "board.css": "text/css",
    "uplot/uPlot.iife.min.js": "text/javascript",
    "uplot/uPlot.min.css": "text/css",
}

Scope = dict[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class Folder:
    """The runs at an address or in a folder, as far as they have been read."""

    def __init__(self, where: str) -> None:
        self.where, self.remote = where, store.address(where) is not None
        self.path = runs.local(where)
        self.period = REMOTE_PERIOD if self.remote else PERIOD
        self.trouble = ""
        self._known: dict[str, Any] = {}
        self._open: dict[str, Curves] = {}
        self._looked, self._lock = -math.inf, threading.RLock()
        self.all: list[runs.Summary] = []

    def look(self) -> None:
        """Read what is new, if the last look is a period ago."""
        with self._lock:
            if time.monotonic() - self._looked < self.period:
                return
            try:
                runs.local(self.where)
                self.trouble = ""
            except RunError as error:
                self.trouble = str(error)
            self.all = runs.summaries(self.path, self._known)
            self._looked = time.monotonic()

    def of(self, name: str) -> Path:
        """Folder of a run by its name. Raises KeyError for any other word."""
        if name not in runs.names(self.path):
            raise KeyError(name)
        return self.path / name

    def curves(self, name: str) -> tuple[Curves, bool]:
        """(curves of a run, brought up to date; True if they began anew)."""
        with self._lock:
            curves = self._open.pop(name, None) or Curves(self.of(name))
            self._open[name] = curves  # the last used one is the last
            while len(self._open) > MOST_OPEN:
                del self._open[next(iter(self._open))]
            return curves, curves.update()

    def detail(self, name: str) -> dict[str, Any]:
        """All of a run but its curves."""
        folder = self.of(name)
        about, result = runs.document(folder / "run.json"), runs.document(folder / "result.json")
        findings: dict[Any, Any] = {}
        health = folder / "health.jsonl"
        for line in sinks.read(health) if health.is_file() else []:
            findings[line.get("check"), line.get("since")] = line
        return {
            "summary": runs.summary(folder)._asdict(),
            "about": {key: value for key, value in about.items() if key != "run"},
            "config": runs.config(folder),
            "result": {key: value for key, value in result.items() if key not in ("members", "chains")},
            "chains": result.get("chains") or [],
            "findings": list(findings.values()),
            "memory": runs.document(folder / "memory.json"),
            "report": (folder / "report.html").is_file(),
        }

    def compared(self, names: Sequence[str], metric: str, axis: str) -> dict[str, Any]:
        """Runs beside each other: curves of one metric, differing settings, statistics over the seeds of a setting."""
        curves = {name: self.curves(name)[0] for name in names}
        configs = {name: runs.config(self.of(name)) for name in names}
        together = comparison.groups(configs)
        metrics = sorted({found for each in curves.values() for found in each.names if found not in runs.AXES})
        metric = metric if metric in metrics or runs.RETURN not in metrics else runs.RETURN
        over = [comparison.over_seeds([curves[name] for name in group], metric, axis) for group in together]
        lines = {}
        for name, each in curves.items():
            thin = each.thinned(POINTS)
            empty: list[Any] = []
            lines[name] = [_short(thin.get(axis, empty)), _short(thin.get(metric, empty))]
        return {
            "metric": metric,
            "metrics": metrics,
            "summaries": [runs.summary(self.of(name))._asdict() for name in names],
            "differences": comparison.differences(configs),
            "groups": together,
            "rows": [row._asdict() for row in comparison.table(curves, together, [metric])],
            "lines": lines,
            "over": [[_short(part.tolist()) for part in each] for each in over],
        }


def _short(values: Sequence[float | None]) -> list[float | None]:
    """Values with six digits, whole numbers as they are; None for what is not finite."""
    return [
        None if value is None or not math.isfinite(value) else int(value) if value % 1 == 0 else float(f"{value:.6g}")
        for value in values
    ]


def _json(value: Any) -> str:
    return json.dumps(files.finite(value), allow_nan=False, separators=(",", ":"))


# ------------------------------------------------------------------------------------------------------------ pictures


class Pictures:
    """Player pages of runs' newest checkpoints, made on demand by `longhaul render`, one at a time."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._dir = Path(tempfile.mkdtemp(prefix="longhaul-board-"))
        self._busy = asyncio.Lock()

    def page(self, name: str) -> Path | None:
        """Newest page of a run; None before the first."""
        return max(self._dir.glob(f"{self._number(name)}-*.html"), key=lambda path: path.stat().st_mtime, default=None)

    async def make(self, name: str) -> str:
        """Make the page of a run's newest checkpoint; -> the reason if it can't be made, or ""."""
        folder = self._folder.of(name)
        if self._folder.remote:
            return f"longhaul render {self._folder.where}/{name} --out drive.html makes it on a machine of the run's"
        steps = files.checkpoint_steps(folder)
        if not steps:
            return "there is no checkpoint yet"
        out = self._dir / f"{self._number(name)}-{steps[-1]}.html"
        async with self._busy:
            if out.exists():
                return ""
            words = ("-m", "longhaul", "render", str(folder.absolute()), "--out", str(out))
            process = await asyncio.create_subprocess_exec(
                sys.executable, *words, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
            )
            try:
                _, said = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
        lines = said.decode(errors="replace").strip().splitlines()
        return "" if out.exists() else (lines or ["it ended without a picture"])[-1].removeprefix("longhaul: error: ")

    def _number(self, name: str) -> str:
        return name.encode().hex()


# --------------------------------------------------------------------------------------------------------- application


def application(where: str, token: str | None = None, hosts: Sequence[str] = LOOPBACK) -> App:
    """Application that shows the runs at `where`.

    With a `token` every request needs it; without one the Host header must name one of `hosts`. Raises RunError if a
    store is out of reach.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    folder = Folder(where)
    pictures = Pictures(folder)
    shell = pages.asset("board.html", "longhaul.training")

    def answer(value: Any) -> Response:
        return Response(_json(value), media_type="application/json")

    async def page(request: Request) -> Response:
        return Response(shell, media_type="text/html")

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name in ("page.css", "report.css"):
            return Response(pages.asset(name), media_type="text/css")
        return Response(pages.asset(name, "longhaul.training"), media_type=ASSETS[name])

    async def listed(request: Request) -> Response:
        await run_in_threadpool(folder.look)
        found = [each._asdict() for each in folder.all]
        return answer({"where": folder.where, "trouble": folder.trouble, "runs": found})

    async def detail(request: Request) -> Response:
        return answer(await run_in_threadpool(folder.detail, request.path_params["name"]))

    def thinned(name: str, start: int | None = None) -> dict[str, Any]:
        curves, anew = folder.curves(name)
        begin = 0 if anew or start is None or start > curves.count else start
        thin = curves.thinned(POINTS, begin) if curves.count > begin else {}
        columns = {metric: _short(values) for metric, values in thin.items()}
        return {"start": begin, "count": curves.count, "columns": columns}

    async def curves(request: Request) -> Response:
        return answer(await run_in_threadpool(thinned, request.path_params["name"]))

    async def compare(request: Request) -> Response:
        query = request.query_params
        names = list(dict.fromkeys(query.getlist("run")))[:MOST_COMPARED]
        axis = query.get("axis", runs.AXES[0])
        if not names or axis not in runs.AXES:
            return PlainTextResponse("give run=NAME, and axis as one of " + ", ".join(runs.AXES), 400)
        found = await run_in_threadpool(folder.compared, names, query.get("metric", runs.RETURN), axis)
        if not request.url.path.endswith(".csv"):
            return answer(found)
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["run", axis, found["metric"]])
        writer.writerows(
            [_cell(name), x, y] for name, (xs, ys) in found["lines"].items() for x, y in zip(xs, ys, strict=True)
            if y is not None
        )  # fmt: skip
        headers = {"content-disposition": 'attachment; filename="runs.csv"'}
        return Response(text.getvalue(), media_type="text/csv", headers=headers)

    async def report(request: Request) -> Response:
        path = folder.of(request.path_params["name"]) / "report.html"
        return FileResponse(path, media_type="text/html") if path.is_file() else PlainTextResponse("none yet", 404)

    async def player(request: Request) -> Response:
        name = request.path_params["name"]
        if request.method == "POST":
            return answer({"trouble": await pictures.make(name)})
        path = pictures.page(name)
        return FileResponse(path, media_type="text/html") if path else PlainTextResponse("none yet", 404)

    async def events(request: Request) -> Response:
        """Server-sent events: of the list the summaries that changed, of a run its new records and its state."""
        name = request.query_params.get("run")
        if name is not None:
            folder.of(name)

        async def of_list() -> AsyncIterator[str]:
            before: dict[str, runs.Summary] | None = None
            while True:
                await run_in_threadpool(folder.look)
                now = {each.name: each for each in folder.all}
                if before is not None and now != before:
                    changed = [each._asdict() for each in now.values() if before.get(each.name) != each]
                    yield f"event: runs\ndata: {_json({'changed': changed, 'names': list(now)})}\n\n"
                before = now
                yield ": here\n\n"
                await asyncio.sleep(2 * folder.period)

        async def of_run(name: str) -> AsyncIterator[str]:
            count, before = int(request.query_params.get("count", 0)), ""
            while True:
                if folder.remote:
                    await run_in_threadpool(folder.look)
                rows = await run_in_threadpool(thinned, name, count)
                if rows["count"] != count or rows["start"] != count:
                    count = rows["count"]
                    yield f"event: rows\ndata: {_json(rows)}\n\n"
                state = _json(await run_in_threadpool(folder.detail, name))
                if state != before:
                    before = state
                    yield f"event: run\ndata: {state}\n\n"
                yield ": here\n\n"
                await asyncio.sleep(PERIOD)

        stream = of_list() if name is None else of_run(name)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def unknown(request: Request, error: Exception) -> Response:
        return PlainTextResponse("there is no such run here", 404)

    return _guarded(
        Starlette(
            routes=[
                Route("/", page),
                Route("/run/{name}", page),
                Route("/compare", page),
                Route("/assets/{name:path}", asset),
                Route("/api/runs", listed),
                Route("/api/run/{name}", detail),
                Route("/api/run/{name}/curves", curves),
                Route("/api/compare", compare),
                Route("/api/compare.csv", compare),
                Route("/api/events", events),
                Route("/report/{name}", report),
                Route("/player/{name}", player, methods=["GET", "POST"]),
            ],
            exception_handlers={KeyError: unknown},
        ),
        token,
        hosts,
    )


def _cell(text: str) -> str:
    """Text of a CSV cell that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def _guarded(app: App, token: str | None, hosts: Sequence[str]) -> App:
    """Application behind the checks of host, origin and token, which adds the headers of its policy."""

    async def guarded(scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        host = headers.get("host", "")
        boxed = scope["path"].startswith(("/report/", "/player/"))
        added = [
            (b"content-security-policy", (BOXED if boxed else POLICY).encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
        ]

        async def send_with(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message["headers"], *added]}
            await send(message)

        async def refuse(status: int, text: str, *more: tuple[bytes, bytes]) -> None:
            head = [(b"content-type", b"text/plain; charset=utf-8"), *more]
            await send_with({"type": "http.response.start", "status": status, "headers": head})
            await send({"type": "http.response.body", "body": text.encode()})

        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if token is None and name.strip("[]") not in hosts:
            await refuse(421, "this board answers on this machine's loopback names only")
            return
        if scope["method"] != "GET" and headers.get("origin") not in (f"http://{host}", f"https://{host}"):
            await refuse(403, "a board takes this from its own pages only")
            return
        if token is not None:
            query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            given = dict(query).get("token", "")
            if given and hmac.compare_digest(given.encode(), token.encode()):
                rest = urlencode([(key, value) for key, value in query if key != "token"])
                to = "/" + scope["raw_path"].decode("latin-1").lstrip("/") + (f"?{rest}" if rest else "")
                cookie = f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/"
                await refuse(303, "", (b"location", to.encode()), (b"set-cookie", cookie.encode()))
                return
            cookies = dict(part.strip().partition("=")[::2] for part in headers.get("cookie", "").split(";"))
            known = headers.get("authorization", "").removeprefix("Bearer ") or cookies.get(COOKIE, "")
            if not hmac.compare_digest(known.encode(), token.encode()):
                await refuse(401, "open the address that longhaul board printed, with its token")
                return
        await app(scope, receive, send_with)

    return guarded

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
import re
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from longhaul.runtime import files, object_store
from longhaul.runtime.errors import RunError
from longhaul.telemetry import pages, sinks
from longhaul.training import comparison, runs
from longhaul.training.runs import Curves
from longhaul.training.serving import connections

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response

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

Scope = MutableMapping[str, Any]
Headers = list[tuple[bytes, bytes]]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class Folder:
    """The runs at an address or in a folder, as far as they have been read."""

    def __init__(self, where: str) -> None:
        self.where, self.remote = where, object_store.address(where) is not None
        self.path = runs.local(where)
        self.period = REMOTE_PERIOD if self.remote else PERIOD
        self.trouble = ""
        self._known: dict[str, Any] = {}
        self._open: dict[str, Curves] = {}
        self._looked, self._lock = -math.inf, threading.RLock()
        self.all: list[runs.Summary] = []

    def look(self) -> None:
        """Update by what is new, if the last look is a period ago."""
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
        if name in ("", ".", "..") or "/" in name or "\0" in name or not (self.path / name / "run.json").is_file():
            raise KeyError(name)
        return self.path / name

    def curves(self, name: str) -> tuple[Curves, bool]:
        """(curves of a run, brought up to date; True if they were read from the beginning)."""
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
        for line in _records(folder / "health.jsonl"):
            findings[str(line.get("check")), str(line.get("since"))] = line
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

    def stamps(self, name: str) -> dict[str, Any]:
        """Marks that change when a run has something new: whether it trains, and its files' times and sizes."""
        folder = self.of(name)
        stamps: dict[str, Any] = {file: runs.stamp(folder / file) for file in (*runs.REMOTE, "checkpoints")}
        return stamps | {"trains": runs.trains(folder)}

    def thinned(self, name: str, start: int | None = None) -> dict[str, Any]:
        """Curves of a run in few rows, from record `start` on if they go on from there."""
        curves, anew = self.curves(name)
        begin = 0 if anew or start is None or start > curves.count else start
        thin = curves.thinned(POINTS, begin) if curves.count > begin else {}
        return {"start": begin, "count": curves.count, "columns": {m: _short(values) for m, values in thin.items()}}

    def evaluations(self, name: str) -> list[dict[str, Any]]:
        """Evaluations that a run has made so far."""
        return _records(self.of(name) / runs.EVALUATIONS)

    def compared(self, names: Sequence[str], metric: str, axis: str) -> dict[str, Any]:
        """Runs beside each other: curves of one metric, differing settings, statistics over the seeds of a setting."""
        curves = {name: self.curves(name)[0] for name in names}
        configs = {name: runs.config(self.of(name)) for name in names}
        together = comparison.groups(configs)
        metrics = sorted({name for own in curves.values() for name in own.names if name not in runs.AXES})
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


def _records(path: Path) -> list[dict[str, Any]]:
    """Records of a file; none where it is missing or damaged, which the run's own commands tell."""
    try:
        return sinks.read(path)
    except (OSError, ValueError):
        return []


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
        weakref.finalize(self, shutil.rmtree, self._dir, ignore_errors=True)  # at the program's end, too
        self._busy = asyncio.Lock()

    def page(self, name: str) -> Path | None:
        """Newest page of a run; None before the first."""
        return max(self._dir.glob(f"{self._number(name)}-*.html"), key=lambda path: path.stat().st_mtime, default=None)

    async def make(self, name: str) -> str:
        """Reason for which the page of a run's newest checkpoint can't be made; "" where it is made."""
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
            arguments = ("-m", "longhaul", "render", str(folder.absolute()), "--out", str(out))
            process = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
            )
            try:
                _, output = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
        lines = output.decode(errors="replace").strip().splitlines()
        return "" if out.exists() else (lines or ["it ended without a picture"])[-1].removeprefix("longhaul: error: ")

    def _number(self, name: str) -> str:
        return name.encode().hex()


# --------------------------------------------------------------------------------------------------------- application


class Answers:
    """Answers of the board to requests, a method a route."""

    def __init__(self, where: str) -> None:
        from starlette import responses

        self._as = responses
        self.folder = Folder(where)
        self.pictures = Pictures(self.folder)
        self._shell = pages.asset("board.html", "longhaul.training")

    async def page(self, request: Request) -> Response:
        return self._as.Response(self._shell, media_type="text/html")

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name in ("page.css", "report.css"):
            return self._as.Response(pages.asset(name), media_type="text/css")
        return self._as.Response(pages.asset(name, "longhaul.training"), media_type=ASSETS[name])

    async def listed(self, request: Request) -> Response:
        await asyncio.to_thread(self.folder.look)
        rows = [_listed(each) for each in self.folder.all]
        return self._json({"where": self.folder.where, "trouble": self.folder.trouble, "runs": rows})

    async def detail(self, request: Request) -> Response:
        return self._json(await asyncio.to_thread(self.folder.detail, request.path_params["name"]))

    async def evaluations(self, request: Request) -> Response:
        return self._json(await asyncio.to_thread(self.folder.evaluations, request.path_params["name"]))

    async def curves(self, request: Request) -> Response:
        return self._json(await asyncio.to_thread(self.folder.thinned, request.path_params["name"]))

    async def compare(self, request: Request) -> Response:
        query = request.query_params
        names = list(dict.fromkeys(query.getlist("run")))[:MOST_COMPARED]
        axis = query.get("axis", runs.AXES[0])
        if not names or axis not in runs.AXES:
            return self._as.PlainTextResponse("give run=NAME, and axis as one of " + ", ".join(runs.AXES), 400)
        table = await asyncio.to_thread(self.folder.compared, names, query.get("metric", runs.RETURN), axis)
        return self._csv(table, axis) if request.url.path.endswith(".csv") else self._json(table)

    async def report(self, request: Request) -> Response:
        return self._file(self.folder.of(request.path_params["name"]) / "report.html")

    async def player(self, request: Request) -> Response:
        name = request.path_params["name"]
        if request.method == "POST":
            return self._json({"trouble": await self.pictures.make(name)})
        return self._file(self.pictures.page(name))

    async def events(self, request: Request) -> Response:
        """Server-sent events: of the list the summaries that changed, of a run its new records and its state."""
        name = request.query_params.get("run")
        if name is None:
            stream = self._of_list()
        else:
            self.folder.of(name)
            count = request.query_params.get("count", "0")
            stream = self._of_run(name, int(count) if re.fullmatch("[0-9]{1,15}", count) else 0)
        return self._as.StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def _of_list(self) -> AsyncIterator[str]:
        before: dict[str, runs.Summary] | None = None
        while True:
            await asyncio.to_thread(self.folder.look)
            now = {each.name: each for each in self.folder.all}
            if before is not None and now != before:
                changed = [_listed(each) for each in now.values() if before.get(each.name) != each]
                yield _event("runs", {"changed": changed, "names": list(now)})
            before = now
            yield ": here\n\n"
            await asyncio.sleep(2 * self.folder.period)

    async def _of_run(self, name: str, count: int) -> AsyncIterator[str]:
        """Looks at the files' sizes and times, and reads only where one of them changed."""
        seen: dict[str, Any] = {}
        while True:
            if self.folder.remote:
                await asyncio.to_thread(self.folder.look)
            stamps = self.folder.stamps(name)
            if stamps != seen:
                rows = await asyncio.to_thread(self.folder.thinned, name, count)
                if rows["count"] != count or rows["start"] != count:
                    count = rows["count"]
                    yield _event("rows", rows)
                yield _event("run", await asyncio.to_thread(self.folder.detail, name))
                if seen and stamps[runs.EVALUATIONS] != seen[runs.EVALUATIONS]:
                    yield _event("evaluations", await asyncio.to_thread(self.folder.evaluations, name))
                seen = stamps
            yield ": here\n\n"
            await asyncio.sleep(PERIOD)

    def _file(self, path: Path | None) -> Response:
        if path is None or not path.is_file():
            return self._as.PlainTextResponse("none yet", 404)
        return self._as.FileResponse(path, media_type="text/html")

    def _json(self, value: Any) -> Response:
        return self._as.Response(_json(value), media_type="application/json")

    def _csv(self, table: dict[str, Any], axis: str) -> Response:
        """Curves of a comparison as a file."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["run", axis, table["metric"]])
        for name, (xs, ys) in table["lines"].items():
            writer.writerows([_cell(name), x, y] for x, y in zip(xs, ys, strict=True) if y is not None)
        headers = {"content-disposition": 'attachment; filename="runs.csv"'}
        return self._as.Response(text.getvalue(), media_type="text/csv", headers=headers)


def application(where: str, token: str | None = None) -> App:
    """Application that shows the runs at `where`.

    With a `token` every request needs it; without one the Host header must name this machine. Raises RunError if a
    store is out of reach.
    """
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    answers = Answers(where)
    threading.Thread(target=answers.folder.look, daemon=True).start()  # while the browser opens
    routes = [
        Route("/", answers.page),
        Route("/run/{name}", answers.page),
        Route("/compare", answers.page),
        Route("/assets/{name:path}", answers.asset),
        Route("/api/runs", answers.listed),
        Route("/api/run/{name}", answers.detail),
        Route("/api/run/{name}/curves", answers.curves),
        Route("/api/run/{name}/evaluations", answers.evaluations),
        Route("/api/compare", answers.compare),
        Route("/api/compare.csv", answers.compare),
        Route("/api/events", answers.events),
        Route("/report/{name}", answers.report),
        Route("/player/{name}", answers.player, methods=["GET", "POST"]),
    ]

    async def unknown(request: Request, error: Exception) -> Response:
        return PlainTextResponse("there is no such run here", 404)

    async def busy(request: Request, error: Exception) -> Response:
        if "start new thread" not in str(error):
            raise error
        return PlainTextResponse("no thread can start on this machine at present; ask again later", 503)

    return _guarded(Starlette(routes=routes, exception_handlers={KeyError: unknown, RuntimeError: busy}), token)


def _listed(summary: runs.Summary) -> dict[str, Any]:
    """A summary as the list shows it; a sparkline's values need no more than three digits."""
    spark = [float(f"{value:.3g}") for value in summary.spark]
    return summary._asdict() | {"spark": spark, "checkpoints": summary.checkpoints[-1:]}


def _event(name: str, value: Any) -> str:
    return f"event: {name}\ndata: {_json(value)}\n\n"


def _cell(text: str) -> str:
    """Text of a CSV cell that no spreadsheet takes for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def _guarded(app: App, token: str | None) -> App:
    """Application behind the checks of host, origin and token, which adds the headers of its policy."""

    async def guarded(scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
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

        refusal = _refusal(scope, token)
        if refusal is None:
            await app(scope, receive, send_with)
            return
        status, text, headers = refusal
        headers = [(b"content-type", b"text/plain; charset=utf-8"), *headers]
        await send_with({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text.encode()})

    return guarded


def _refusal(scope: Scope, token: str | None) -> tuple[int, str, Headers] | None:
    """Answer (status, text, headers) to a request that does not pass the checks; None for one that does.

    An address with the right token passes at its second request: it is answered by the way to the same address without
    the token, which becomes a cookie.
    """
    headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
    host = headers.get("host", "")
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if token is None and name.strip("[]") not in LOOPBACK:
        return 421, "this board answers on this machine's loopback names only", []
    if scope["method"] != "GET" and headers.get("origin") not in (f"http://{host}", f"https://{host}"):
        return 403, "a board takes this from its own pages only", []
    if token is None:
        return None
    query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    sent = dict(query).get("token", "")
    if sent and hmac.compare_digest(sent.encode(), token.encode()):
        rest = urlencode([(key, value) for key, value in query if key != "token"])
        to = "/" + scope["raw_path"].decode("latin-1").lstrip("/") + (f"?{rest}" if rest else "")
        cookie = f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/"
        return 303, "", [(b"location", to.encode()), (b"set-cookie", cookie.encode())]
    cookies = dict(part.strip().partition("=")[::2] for part in headers.get("cookie", "").split(";"))
    known = headers.get("authorization", "").removeprefix("Bearer ") or cookies.get(COOKIE, "")
    if not hmac.compare_digest(known.encode(), token.encode()):
        return 401, "open the address that longhaul board printed, with its token", []
    return None


# ------------------------------------------------------------------------------------------------------------- server


def server(app: App, most: int = connections.MOST, silent: float = connections.SILENT) -> uvicorn.Server:
    """Server of an application whose connections are bounded, so that strangers take neither descriptors nor memory."""
    import uvicorn

    # uvicorn's configuration of logging closes the handlers that are there, and absl's closes its stream, stderr
    config = uvicorn.Config(
        app, log_config=None, log_level="error", access_log=False, timeout_graceful_shutdown=1, lifespan="off",
        ws="none", http=connections.protocol(most, silent),
    )  # fmt: skip
    return uvicorn.Server(config)

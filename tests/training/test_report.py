"""The report, read back: what must stand in it, what may be missing, and that no text of a run becomes markup."""

from __future__ import annotations

import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longhaul.driving.render import save
from longhaul.driving.render.recording import Recording
from longhaul.telemetry import pages
from longhaul.telemetry.health import Finding
from longhaul.training import members, report
from tests.helpers import browser
from tests.helpers.browser import Browser

WICKED = "</script><b>bold</b>\"'&"
VOID = {"meta", "input", "line", "path", "circle", "rect", "br"}


class Document(HTMLParser):
    """The text of a page by the tag around it; fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.stack.append(tag)
        self.texts.append((tag, ""))
        assert not {"src", "onload", "onerror"} & {name for name, _ in attrs}
        assert all(value and re.fullmatch(r"#episode-\d+(-\d+)?", value) for name, value in attrs if name == "href")

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack:
            self.texts.append((self.stack[-1], data))

    def of(self, tag: str) -> list[str]:
        return [text.strip() for name, text in self.texts if name == tag and text.strip()]


def recording(label: str = "trained", count: int = 80, agents: int = 40, points: int = 0) -> Recording:
    generator = np.random.default_rng(0)
    line = np.cumsum(generator.normal(size=(points, 2)), 0).astype(np.float32)
    return Recording(
        id="scene", dt=0.1, pose=generator.normal(size=(count, agents, 3)).astype(np.float32),
        size=np.ones((agents, 2), np.float32), kind=np.ones(agents, np.int8), present=np.ones((count, agents), bool),
        controlled=np.arange(agents) == 0, expert=None, route=np.zeros((0, 2), np.float32),
        light_position=np.zeros((0, 2), np.float32), light_state=np.zeros((0, count), np.int8),
        drawing=((6, line),) if points else (), events={"collision": None}, label=label, metrics={},
    )  # fmt: skip


def record(i: int, **metrics: Any) -> dict[str, Any]:
    return {
        "update": i,
        "env_steps": 100 * i,
        "agent_steps": 100 * i,
        "wall_seconds": 0.1 * i,
        "sps": 1000.0,
        **metrics,
    }


def written(path: Path, **parts: Any) -> str:
    report.write_report(path, **{"run": {}, "records": [], "result": {}, **parts})
    return path.read_text("utf-8")


RESULT = {
    "status": "done",
    "agent_steps": 12_345_678,
    "train_seconds": 3723.0,
    "evaluation": {
        "log": {"accuracy": 1.0, "collision": 0.0, "progress": 1.0, "length": 80.0, "episodes": 16},
        "untrained": {"accuracy": 0.1, "collision": 0.5, "progress": 0.2, "length": 20.0, "episodes": 128},
        "trained": {"accuracy": 0.9, "collision": 0.0, "progress": None, "length": 79.0, "episodes": 128},
    },
}


def test_a_whole_report_says_what_the_run_did(tmp_path: Path) -> None:
    run = {
        "id": "run-7", "recipe": "driving", "commit": "0123456789abcdef", "machine": {"cores": 2},
        "provenance": {"versions": {"jax": "0.10.2", "wandb": None}, "cpus": 2},
        "command": ["longhaul", "train", "driving", "--run-name", "two words"],
        "config": {"gamma": 0.99},
    }  # fmt: skip
    records = [record(i, **{"episode/return": float(i), "loss/policy_loss": -0.1}) for i in range(1, 11)]
    text = written(tmp_path / "report.html", run=run, records=records, result=RESULT, recordings=[recording()])
    page = Document(text)
    assert "run-7 · Longhaul" in page.of("title")
    assert "driving · commit 0123456789ab" in page.of("p")
    assert "longhaul train driving --run-name 'two words'" in page.of("code")
    assert {"12,345,678", "1 h 2 min", "1,000", "cores 2", "2", "jax 0.10.2"} <= {*page.of("dd")}
    assert {"Return", "Policy loss", "Speed of training"} <= {*page.of("span")}
    assert ",".join(page.of("h2")) == "Key figures,Evaluation,Driving,Learning curves,Where it comes from,Configuration"
    assert json.loads(page.of("pre")[0]) == run
    assert "://" not in text


def test_the_evaluation_has_rows_in_order_and_marks_the_best(tmp_path: Path) -> None:
    text = written(tmp_path / "report.html", result=RESULT)
    rows = re.findall(r'<tr[^>]*><th scope="row">(\w+)</th>(.*?)</tr>', text)
    assert [policy for policy, _ in rows] == ["trained", "untrained", "log"]
    cells = {policy: re.findall(r"<td([^>]*)>([^<]*)</td>", row) for policy, row in rows}
    best = {policy: [value for mark, value in row if "best" in mark] for policy, row in cells.items()}
    assert best == {
        "trained": ["0.900", "0.000"],
        "untrained": [],
        "log": [],
    }  # among policies, references apart
    assert [value for _, value in cells["trained"]] == ["0.900", "–", "0.000", "79.00", "128"]


def test_no_best_where_nothing_tells() -> None:
    assert report.best_policies("length", {"a": {"length": 1.0}, "b": {"length": 2.0}}) == set()
    assert report.best_policies("goal", {"a": {"goal": 0.0}, "b": {"goal": 0.0}}) == set()
    assert report.best_policies("goal", {"a": {"goal": math.nan}, "b": {"goal": 0.5}, "c": {"goal": 0.1}}) == {"b"}


def test_no_text_becomes_markup(tmp_path: Path) -> None:
    run = dict.fromkeys(("id", "recipe", "commit", "command", "machine", WICKED), WICKED) | {
        "versions": {WICKED: WICKED}
    }
    result = {"status": WICKED, "evaluation": {WICKED: {WICKED: 1.0, "episodes": 1}}}
    records = [record(i, **{WICKED: 1.0, f"{WICKED}/return": 1.0, "other/return": 1.0}) for i in (1, 2)]
    wicked = recording(WICKED)._replace(id=WICKED, events={WICKED: 3}, metrics={WICKED: 1.0})
    text = written(tmp_path / "report.html", run=run, records=records, result=result, recordings=[wicked])
    page = Document(text)
    assert "bold" not in page.of("b")
    assert f"{WICKED}" in page.of("h1")[0]
    data = next(json.loads(script) for script in page.of("script") if script.startswith('{"maps"'))
    assert data["recordings"][0]["label"] == WICKED


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"records": [record(1, **{"episode/return": 3.0})]},
        {"records": [record(i, **{"episode/return": math.nan, "loss/value_loss": None}) for i in range(5)]},
        {"records": [{"episode/return": 1.0}, {"episode/return": 2.0}]},
        {"records": [record(1, note="text", flag=True, nested={"a": 1})]},
        {"result": {"status": "stopped", "evaluation": None, "sps": math.inf, "train_seconds": None}},
        {"result": {"evaluation": {"trained": None, "idm": {}, "log": {"per_scenario": [1, 2]}}}},
        {"run": {"id": None, "command": None, "machine": None, "versions": {}}},
    ],
)
def test_missing_pieces_are_left_out(parts: dict[str, Any], tmp_path: Path) -> None:
    text = written(tmp_path / "run-x" / "report.html", **parts)
    page = Document(text)
    assert page.of("h1") == ["run-x"]
    visible = re.sub(r"<(style|script|pre)\b.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.search(r"\b(nan|inf|None|null)\b", visible, re.IGNORECASE)


def test_unknown_metrics_have_curves_too(tmp_path: Path) -> None:
    page = Document(
        written(tmp_path / "r.html", records=[record(i, **{"ppo/clip_fraction": 0.1 * i}) for i in range(3)])
    )
    assert "Further curves (1)" in page.of("summary")
    assert "ppo/clip_fraction" in page.of("span")


def test_the_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    written(path, run={"id": "first"})
    bad = recording()._replace(ego=99)
    with pytest.raises(ValueError, match="ego is 99"):
        report.write_report(path, run={"id": "second"}, records=[], result={}, recordings=[bad])
    assert "first" in path.read_text("utf-8")
    assert [child.name for child in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.slow
def test_a_long_run_with_six_recordings_stays_small(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    names = ("episode/return", "episode/length", "loss/policy_loss", "ppo/entropy", "ppo/approx_kl", "ppo/other")
    records = [record(i, **dict(zip(names, generator.normal(size=6).tolist(), strict=True))) for i in range(5000)]
    recordings = [recording(label, agents=128, points=20_000) for label in "abcdef"]
    assert len(written(tmp_path / "report.html", records=records, recordings=recordings)) < 3_000_000


def test_thinning_keeps_both_extremes_and_gaps() -> None:
    y = np.zeros(100_000)
    y[31_415], y[27_182] = 7.0, -3.0
    y[50_000:60_000] = np.nan
    line = pages.thin(pages.Series("a", np.arange(100_000.0), y))
    assert len(line.x) <= pages.POINTS
    assert line.x[np.nanargmax(line.y)] == 31_415
    assert line.x[np.nanargmin(line.y)] == 27_182
    assert np.isnan(line.y).any()
    assert (np.diff(line.x) > 0).all()


def test_a_point_stands_where_its_value_says() -> None:
    x, y = np.array([0.0, 50.0, 100.0]), np.array([0.0, 10.0, 5.0])
    text = pages.figure("a", [pages.Series("a", x, y)], "steps")
    low, high = (float(value) for value in re.search(r'data-y="(\S+) (\S+)"', text).groups())
    points = np.array(re.findall(r"[ML]([\d.]+) ([\d.]+)", re.search(r'data-line d="([^"]+)"', text)[1]), float)
    inner = pages.HEIGHT - pages.TOP - pages.BOTTOM
    np.testing.assert_allclose(points[:, 0], np.linspace(pages.LEFT, pages.WIDTH - pages.RIGHT, 3), atol=0.01)
    np.testing.assert_allclose((pages.HEIGHT - pages.BOTTOM - points[:, 1]) / inner * (high - low) + low, y, atol=0.01)


def test_a_gap_breaks_the_line_and_a_lone_point_is_a_disc() -> None:
    y = np.array([1.0, 2.0, np.nan, 3.0, np.nan])
    text = pages.figure("a", [pages.Series("a", np.arange(5.0), y)], "steps")
    assert re.search(r'data-line d="([^"]+)"', text)[1].count("M") == 2
    assert text.count("<circle") == 1
    assert pages.figure("a", [pages.Series("a", np.arange(2.0), np.full(2, np.nan))], "steps") == ""


def test_a_constant_metric_has_an_axis() -> None:
    for value in (0.0, 1e-12, -5.0, 1e12):
        text = pages.figure("a", [pages.Series("a", np.array([1.0, 2.0]), np.full(2, value))], "steps")
        low, high = (float(number) for number in re.search(r'data-y="(\S+) (\S+)"', text).groups())
        assert low < value < high or low == value == 0


def test_smoothing_is_the_mean_of_the_known() -> None:
    y = np.array([1.0, np.nan, 3.0, 5.0, np.nan, np.nan, np.nan])
    np.testing.assert_allclose(pages.smooth(y, 3), [1, 2, 4, 4, 5, np.nan, np.nan])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10e6, [0, 2e6, 4e6, 6e6, 8e6, 10e6]), (-0.3, 0.9, [-0.2, 0, 0.2, 0.4, 0.6, 0.8]), (3, 3, [3])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    np.testing.assert_allclose(pages.ticks(low, high), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("value", "step", "expected"),
    [
        (1_500_000, 500_000, "1.5M"), (1_000_000, 500_000, "1.0M"), (500_000, 500_000, "500k"), (0.25, 0.05, "0.25"),
        (0.0, 1.0, "0"), (-3e-4, 1e-4, "-3e-4"), (2e9, 1e9, "2G"), (1234.0, None, "1.23k"), (80.0, 20.0, "80"),
    ],
)  # fmt: skip
def test_numbers_on_axes_are_short(value: float, step: float | None, expected: str) -> None:
    assert pages.short(value, step) == expected


def test_embedded_data_cannot_leave_its_script() -> None:
    value = {"a": "</script><!-- & \u2028", "b": [1, None, 2.5]}
    text = pages.embed(value)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == value
    with pytest.raises(ValueError, match="JSON compliant"):
        pages.embed(math.nan)


def test_the_assets_name_every_role_and_part_that_the_player_needs() -> None:
    script, markup, colours = (
        *(pages.asset(f"player.{kind}", report.web_player.PACKAGE) for kind in ("js", "html")),
        report.web_player.colours(),
    )
    wanted = set(re.findall(r'(?:part|plot)\("(\w+)"', script))
    assert wanted == set(re.findall(r'data-role="(\w+)"', markup))
    roles = set(re.findall(r'role: "(\w+)"', script)) | set(re.findall(r'ink\("(\w+)"\)', script))
    assert roles <= set(re.findall(r"--map-(\w+):", colours))


# ------------------------------------------------------------------------------------------------- in a real browser


page = pytest.fixture(scope="module")(browser.opened)


def driven(label: str, scene: str, speed: float, **events: int | None) -> Recording:
    """6 s straight east at `speed`; what happens is in `events`."""
    count = 61
    pose = np.zeros((count, 2, 3), np.float32)
    pose[:, 0, 0] = 0.1 * speed * np.arange(count)
    pose[:, 1] = (40, 3, 0)
    return recording(label, count, 2)._replace(
        id=scene, pose=pose, size=np.full((2, 2), 2.0, np.float32), expert=pose[:, 0],
        drawing=((2, np.array([[-20, 0], [100, 0]], np.float32)),),
        events={"collision": None, "offroad": None, "goal": None, **events}, metrics={"progress": 0.5, WICKED: 1.0},
    )  # fmt: skip


def whole_report(folder: Path) -> Path:
    """A report with every section, names full of markup."""
    scenes = {"trained": ({"collision": 30}, {"offroad": 20}, {"collision": 50}, {}), "log": ({"goal": 60},) * 4}
    recordings = [
        driven(label, f"scene {i} {WICKED}", 4.0 + 2.0 * i, **events)
        for label, each in scenes.items()
        for i, events in enumerate(each)
    ]
    rows = [
        {"member": i, "seed": i % 2, "hyperparameters": {"lr": 1e-3 * (1 + i // 2)},
         "evaluation": {"trained": {"return": float(i), WICKED: 1.0, "episodes": 4}}}
        for i in range(4)
    ]  # fmt: skip
    names = ("episode/return", "episode/length", WICKED)
    records = [record(i, **dict.fromkeys(names, float(i))) for i in range(1, 200)]
    chains = [{"prompt": WICKED, "chain": f"{WICKED} 7", "right": True}]
    written(
        folder / "report.html", run={"id": WICKED, "recipe": "driving", "command": [WICKED]}, records=records,
        result=RESULT | {"chains": chains}, recordings=recordings,
        runs=members.section(Path("none"), {"members": rows}),
        findings=[Finding("entropy", 0.1, 0.2, WICKED, "lower it", 3)],
    )  # fmt: skip
    return folder / "report.html"


def test_failures_come_first_and_lead_to_their_episodes(page: Browser, tmp_path: Path) -> None:
    path = whole_report(tmp_path)
    page.show()
    page.open(path)
    assert page.run("return [...document.querySelectorAll('h2')].map((one) => one.textContent)")[:3] == [
        "Key figures", "Failures", "Runs",
    ]  # fmt: skip
    heads = page.run("return [...document.querySelectorAll('.failures h3')].map((one) => one.textContent)")
    assert heads == ["collision (2)", "offroad (1)", "not reached (1)"]
    shown = page.run("return [...document.querySelectorAll('.gallery a')].map((one) => one.textContent)")
    said = ["5.0 s, 8.0 m/s", "3.0 s, 4.0 m/s", "2.0 s, 6.0 m/s", "50 % of the route left"]  # by speed
    assert shown == [f"scene {i} {WICKED}{says}" for i, says in zip((2, 0, 1, 3), said, strict=True)]
    colours = page.run("""
        const [first] = document.querySelectorAll(".gallery canvas"), { width, height } = first;
        const data = new Uint32Array(first.getContext("2d").getImageData(0, 0, width, height).data.buffer);
        return new Set(data).size;""")
    assert colours > 10  # it is drawn
    state = """const part = (role) => document.querySelector(`[data-role="${role}"]`);
        return [part("scenario").value, part("policy").selectedOptions[0].textContent, part("slider").value];"""

    def becomes(*wanted: str) -> bool:
        """True once the player shows it: a link's target is shown after the press has returned."""
        ends = time.monotonic() + 10.0
        while page.run(state) != list(wanted) and time.monotonic() < ends:
            time.sleep(0.02)
        return page.run(state) == list(wanted)

    page.page.click(".gallery a >> nth=0")
    assert becomes("2", "trained", "40")  # a second before the collision
    page.page.focus("tr.reference a")
    page.press("Enter")
    assert becomes("0", "log", "0")
    page.page.focus("text=not reached >> nth=-1")
    page.press("Enter")
    assert becomes("3", "trained", "0")
    page.page.click(".player-others button >> nth=1")
    assert becomes("3", "log", "0")
    page.page.click("[data-role=speed]")
    assert page.run(state)[2] != "0"
    assert page.run("return location.hash") == "#episode-3"
    assert page.requests() == [path.as_uri()]
    assert page.faults() == []
    assert page.run("return document.querySelectorAll('main b').length") == len(shown)  # no text became markup
    assert page.violations() == []


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, True), (390, False), (390, True)])
def test_pages_hold_at_every_width_and_scheme(width: int, dark: bool, page: Browser, tmp_path: Path) -> None:
    path = whole_report(tmp_path)
    save.save([driven("trained", WICKED, 5.0, collision=10), driven("log", WICKED, 5.0)], tmp_path / "drive.html")
    for each in (path, tmp_path / "drive.html"):
        page.show(width, dark)
        page.open(each)
        page.run("document.querySelectorAll('details').forEach((one) => { one.open = true; });")
        assert page.violations() == [], each.name
        assert page.wider_than_the_window() == [], each.name
        assert page.faults() == []
        assert page.requests() == [each.as_uri()]

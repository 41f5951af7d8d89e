"""The player in a real browser: what it draws and what its controls do, by clicks and keys as a user makes them.

Runs where a browser of Chromium's family is on the path. Pages are opened from files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longhaul.driving.render import save
from longhaul.driving.render.recording import LIGHT, Recording, Verdict
from tests.helpers import browser
from tests.helpers.browser import Browser

HELPERS = """
window.part = (role) => document.querySelector(`.player [data-role="${role}"]`);
window.seconds = () => parseFloat(part("clock").textContent);
window.playing = () => part("play").getAttribute("aria-pressed") === "true";
window.until = async (done) => { while (!done()) await new Promise((go) => setTimeout(go, 10)); };
window.metre = () => part("canvas").clientWidth / 80;
window.context = () => part("canvas").getContext("2d");
window.at = (x, y) => {  // the colour at x, y metres from the middle, east and north, at zoom 1
  const canvas = part("canvas"), left = canvas.width / 2 + x * metre(), top = canvas.height / 2 - y * metre();
  return [...context().getImageData(Math.round(left), Math.round(top), 1, 1).data].slice(0, 3);
};
window.place = (x, y) => {  // the same place in the window
  const box = part("canvas").getBoundingClientRect();
  return [box.left + box.width / 2 + x * metre(), box.top + box.height / 2 - y * metre()];
};
window.facts = () => [...part("facts").children].map((one) => one.textContent);
window.names = (role) => [...part(role).options].map((option) => option.textContent);
window.set = (role, value, event) => {
  part(role).value = String(value);
  part(role).dispatchEvent(new Event(event, { bubbles: true }));
};
window.scrub = (frame) => set("slider", frame, "input");
"""

page = pytest.fixture(scope="module")(browser.opened)


def recording(**changes: Any) -> Recording:
    """8 s: the ego drives east at 5 m/s; vehicle 1, driven too, 10 m north of it west at 2.5 m/s, and ends after 4 s.

    A pedestrian stands 8 m south of where the ego is after 2 s.
    """
    count = 81
    pose = np.zeros((count, 4, 3), np.float32)
    pose[:, 0, 0] = 0.5 * np.arange(count)
    pose[:, 1, 0], pose[:, 1, 1], pose[:, 1, 2] = 20 - 0.25 * np.arange(count), 10, np.pi
    pose[:, 2] = (10, -8, 0)
    present = np.ones((count, 4), bool)
    present[41:, 1], present[:, 3] = False, False
    made = Recording(
        id="straight", dt=0.1, pose=pose, size=np.array([[4.5, 2.0], [4.5, 2.0], [0.8, 0.8], [0, 0]], np.float32),
        kind=np.array([1, 1, 2, 0], np.int8), present=present, controlled=np.array([True, True, False, False]),
        expert=pose[:, 0], route=np.array([[0, 0], [80, 0]], np.float32),
        light_position=np.array([[30, 4]], np.float32), light_state=np.repeat(np.array([[1]], np.int8), count, 1),
        drawing=((2, np.array([[-20, 0], [100, 0]], np.float32)), (15, np.array([[-20, -5], [100, -5]], np.float32))),
        events={"goal": 60, "collision": None}, label="trained", metrics={"progress": 0.75},
        others=(Verdict(1, {"collision": 40}, {"progress": 0.25}),),
    )  # fmt: skip
    return made._replace(**changes)


def show(page: Browser, folder: Path, *recordings: Recording) -> None:
    save.save(recordings or (recording(),), folder / "drive.html")
    page.open(folder / "drive.html")
    page.run(HELPERS)


def press(page: Browser, role: str) -> None:
    """Clicks on a control."""
    x, y, width, height = page.run(
        f"const box = part('{role}').getBoundingClientRect(); return [box.left, box.top, box.width, box.height]"
    )
    page.click(x + width / 2, y + height / 2)


def rgb(role: str) -> list[int]:
    return [int(LIGHT[role][i : i + 2], 16) for i in (1, 3, 5)]


def test_it_draws_and_asks_for_nothing(page: Browser, tmp_path: Path) -> None:
    show(page, tmp_path)
    colours, ego, north = page.run("""
        const { width, height } = part("canvas"), data = context().getImageData(0, 0, width, height).data;
        const found = new Set();
        for (let i = 0; i < data.length; i += 4) found.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
        return [found.size, at(-0.5, 0), at(20, 10)];""")
    assert colours > 20
    assert ego == rgb("ego")
    assert north == rgb("ego")  # whoever is driven has this colour
    assert page.run("return at(-0.5, 20)") == rgb("ground")
    assert page.requests() == [(tmp_path / "drive.html").as_uri()]
    assert page.faults() == []


def test_it_plays_at_its_rate_pauses_ends_and_begins_again(page: Browser, tmp_path: Path) -> None:
    """The player's clock against the browser's: never ahead of it, and it gets on."""
    show(page, tmp_path)
    assert page.run("return [seconds(), playing()]") == [0.0, False]
    page.run("window.began = performance.now();")
    press(page, "play")
    on, reached, passed = page.run("""
        const on = playing();
        await until(() => seconds() >= 1); return [on, seconds(), (performance.now() - began) / 1000];""")
    assert on is True
    assert 1.0 <= reached <= passed + 0.1
    assert page.run("return at(-0.5, 0)") == rgb("ego")  # the camera moves with it
    press(page, "play")
    stopped, stays = page.run(
        "const at = seconds(); await new Promise((go) => setTimeout(go, 300)); return [at, seconds()];"
    )
    assert stopped == stays
    assert page.run("return playing()") is False
    page.run("set('rate', '4', 'change'); window.before = seconds(); window.began = performance.now();")
    press(page, "play")
    gained, passed, end, on = page.run("""
        await until(() => seconds() > before + 1); const gained = seconds() - before;
        const passed = (performance.now() - began) / 1000;
        await until(() => !playing()); return [gained, passed, seconds(), playing()];""")
    assert gained <= 4 * passed + 0.1
    assert (end, on) == (8.0, False)
    press(page, "play")
    page.run("await until(() => seconds() < 7 && playing())")  # from the beginning
    assert page.faults() == []


def test_scrubbing_sets_the_time_and_marks_lead_to_events(page: Browser, tmp_path: Path) -> None:
    show(page, tmp_path)
    press(page, "play")
    page.run("scrub(20)")
    assert page.run("return [seconds(), playing(), at(0, -8)]") == [2.0, False, rgb("pedestrian")]
    # half of the slider by the mouse
    press(page, "slider")
    assert page.run("return seconds()") == pytest.approx(4.0, abs=0.1)
    assert page.run("return [...part('ticks').children].map((mark) => mark.textContent)") == ["goal"]
    x, y = page.run("const box = part('ticks').children[0].getBoundingClientRect();"
                    "return [box.left + box.width / 2, box.top + 8]")  # fmt: skip
    page.click(x, y)
    assert page.run("return [seconds(), Number(part('slider').value), at(4.2, 0)]") == [6.0, 60, rgb("good")]
    assert page.run("scrub(59); return at(4.2 + 0.5, 0)") != rgb("good")  # not before it happened
    assert page.faults() == []


def test_who_is_clicked_is_followed_to_the_middle(page: Browser, tmp_path: Path) -> None:
    show(page, tmp_path)
    assert page.run("return names('follow')") == ["ego", "vehicle 1, driven", "pedestrian 2"]
    ego = ["agent", "ego", "size", "4.5 × 2 m", "goal", "at 6.0 s", "progress", "0.75"]
    assert page.run("return facts()") == ego
    page.run("scrub(20)")  # the ego is at (10, 0), the other one at (15, 10), the pedestrian at (10, -8)
    page.click(*page.run("return place(0, -8)"))
    assert page.run("return [part('follow').value, at(0, 0), at(-0.5, 8)]") == ["2", rgb("pedestrian"), rgb("ego")]
    assert page.run("return [facts()[1], facts().pop()]") == ["pedestrian 2", "none: it is not driven"]
    page.click(*page.run("return place(-20, -20)"))  # nobody is there
    assert page.run("return part('follow').value") == "2"
    page.click(*page.run("return place(5, 18)"))
    assert page.run("return [part('follow').value, at(0.5, 0)]") == ["1", rgb("ego")]
    assert page.run("return facts().slice(4)") == ["collision", "at 4.0 s", "progress", "0.25"]
    assert page.run("return [...part('ticks').children].map((mark) => mark.textContent)") == ["collision"]
    # where it ended the view stays, with a ring around the place
    assert page.run("scrub(70); return [at(0.5, 0), at(-4.2, 0)]") == [rgb("ground"), rgb("fault")]
    page.run("part('canvas').focus()")
    page.press("Escape")
    assert page.run("return [part('follow').value, facts(), at(-0.5, 0)]") == ["0", ego, rgb("ego")]
    page.run("set('follow', 2, 'change')")
    assert page.run("return at(0, 0)") == rgb("pedestrian")
    assert page.faults() == []


def test_keys_zoom_and_the_outline_of_the_log(page: Browser, tmp_path: Path) -> None:
    show(page, tmp_path)
    page.click(*page.run("return place(30, 20)"))  # gives the canvas the focus
    for key, expected in (("ArrowRight", 0.1), ("ArrowRight", 0.2), ("ArrowLeft", 0.1), ("End", 8.0), ("Home", 0.0)):
        page.press(key)
        assert page.run("return seconds()") == expected, key
    page.press(" ")
    page.run("await until(() => playing() && seconds() > 0.2)")
    page.press(" ")
    assert page.run("return playing()") is False
    page.run("scrub(20)")
    assert page.run("return at(0, -8)") == rgb("pedestrian")
    press(page, "nearer")
    press(page, "nearer")
    assert page.run("return [at(0, -8 * 1.25 * 1.25), at(0, -8)]") != [rgb("pedestrian")] * 2
    assert page.run("return at(0, -8 * 1.25 * 1.25)") == rgb("pedestrian")
    page.run("part('canvas').focus()")
    page.press("-")
    press(page, "farther")
    assert page.run("return at(0, -8)") == rgb("pedestrian")
    with_it = page.run("return at(2.25, 0)")
    press(page, "ghost")
    assert page.run("return at(2.25, 0)") != with_it
    legend = page.run("return [...part('legend').children].map((one) => one.textContent)")
    assert legend == ["driven", "route", "log", "pedestrian", "red", "yellow", "green"]
    assert page.faults() == []


def test_scenarios_and_policies_are_chosen(page: Browser, tmp_path: Path) -> None:
    """Who is followed stays, and so does the time, where only the policy changes."""
    first = recording()
    still = first._replace(pose=np.repeat(first.pose[:1], 81, 0), label="constant", others=())
    other = recording(id="elsewhere <b>&</b>", events={})
    show(page, tmp_path, first, still, other)
    assert page.run("return names('scenario')") == ["straight", "elsewhere <b>&</b>"]
    assert page.run("return names('policy')") == ["trained", "constant"]
    page.run("scrub(30); set('follow', 1, 'change'); set('policy', 1, 'change')")
    assert page.run("return [seconds(), part('follow').value, facts().pop()]") == [3.0, "1", "none: it is not driven"]
    page.run("set('scenario', 1, 'change')")
    assert page.run("return [seconds(), part('follow').value, names('policy')]") == [0.0, "0", ["trained"]]
    assert page.faults() == []


def test_a_broken_player_is_seen(page: Browser, tmp_path: Path) -> None:
    """What the tests above look at does fail where the player does."""
    save.save([recording()], tmp_path / "whole.html")
    text = (tmp_path / "whole.html").read_text()
    broken = text.replace("state.time += (passed", "missing.time += (passed")
    assert broken != text
    (tmp_path / "broken.html").write_text(broken.replace("<head>", '<head><link rel="icon" href="x.png">'))
    page.open(tmp_path / "broken.html")
    page.run(HELPERS)
    press(page, "play")
    page.run("await new Promise((go) => setTimeout(go, 200))")
    assert page.run("return seconds()") == 0.0
    assert any("missing is not defined" in fault for fault in page.faults())

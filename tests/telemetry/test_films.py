"""Films in a real browser: played, paused and stepped through; where there are no pictures, the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from longhaul.driving.render import save
from longhaul.telemetry import films
from longhaul.telemetry.films import Film
from longhaul.training import report
from tests.helpers import browser
from tests.helpers.browser import Browser

PROGRAM = browser.find()
COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
IMAGES = [Image.new("RGB", (320, 200), colour) for colour in COLOURS]
WICKED = "<b onclick='alert(1)'>one</b>"

SHOWN = """
    const film = document.querySelector(".film"), picture = film.querySelector("img");
    await picture.decode();
    const c = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
    c.drawImage(picture, 0, 0);
    return [[...c.getImageData(0, 0, 1, 1).data].slice(0, 3), film.querySelector("button").textContent];
"""

page = pytest.fixture(scope="module")(browser.opened)


def shown(page: Browser) -> tuple[int, str]:
    """(number of the picture that is shown, text of the button)."""
    colour, button = page.run(SHOWN)
    return COLOURS.index(tuple(colour)), button


def test_a_film_is_played_paused_and_stepped_through(page: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    result = {"evaluation": {"trained": {"return": 1.0}, "untrained": {"return": 0.0}}}
    drawn = [Film(label, f"3 steps {WICKED}", IMAGES) for label in ("trained", "untrained")]
    report.write_report(path, run={"id": "a"}, records=[], result=result, films=drawn)
    for width, dark in ((1280, False), (390, True)):
        page.show(width, dark)
        page.open(path)
        assert page.violations() == []
        assert page.wider_than_the_window() == []
    assert page.run("return document.querySelectorAll('figcaption b').length") == 2  # no text became markup
    assert shown(page) == (0, "Play")
    page.page.focus(".film input")
    page.press("ArrowRight")
    assert shown(page) == (1, "Play")
    page.page.click(".film button")
    page.page.wait_for_function("document.querySelector('.film input').value === '2'")
    assert shown(page) == (2, "Play")  # it ended
    page.page.click(".film button")
    assert shown(page)[1] == "Pause" or shown(page)[0] == 2
    page.page.click("text=untrained >> nth=0")
    assert page.run("return location.hash") == "#film-untrained"
    assert page.requests() == [path.as_uri()]
    assert page.faults() == []


def test_a_page_of_one_film_has_its_player(page: Browser, tmp_path: Path) -> None:
    save.film(IMAGES, tmp_path / "a.html", WICKED)
    page.open(tmp_path / "a.html")
    assert page.run("return document.querySelector('h1').textContent") == WICKED
    assert shown(page) == (0, "Play")
    assert page.violations() == []


def test_a_long_film_is_thinned_and_one_without_pictures_says_why() -> None:
    assert films.even(500, 100)[:2] + films.even(500, 100)[-1:] == [0, 5, 499]
    assert films.even(3, 100) == [0, 1, 2]
    many = films.section([Film("a", "", [IMAGES[0]] * 300)])
    assert f'max="{films.PICTURES - 1}"' in many
    assert films.section([Film("", f"it has no picture: {WICKED}")]).count("<") == 2
    assert films.section([]) == ""

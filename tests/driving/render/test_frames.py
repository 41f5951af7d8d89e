"""Pictures of driving, read back: frames, pixels and packed data against the recording that they were made of."""

from __future__ import annotations

import base64
import json
import stat
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from longhaul.driving.datasets import log
from longhaul.driving.render import frames, save, web_player
from longhaul.driving.render.recording import (
    Recording,
    Verdict,
    box,
    camera,
    check,
    clip,
    dashes,
    replay,
    simplify,
    speeds,
)
from tests.helpers import driving_scenarios

CENTRE = (frames.SIZE[0] // 2, frames.SIZE[1] // 2)
EGO, VEHICLE, GHOST = frames.COLOURS["ego"], frames.COLOURS["vehicle"], frames.COLOURS["ghost"]

START = ((0, 0), 5), ((0, 20), 0), ((0, 0), 0)
"""Places and speeds of a recording's agents."""


def recording(count: int = 6, **changes: object) -> Recording:
    """The ego drives east from the origin at 5 m/s; a lorry stands 20 m north of where the ego starts, facing north.
    The third is padding."""
    poses = [driving_scenarios.line(start, (speed, 0), count) for start, speed in START]
    poses[1][:, 2] = np.pi / 2
    made = driving_scenarios.scenario(poses, sizes=[(4.5, 2.0), (10.0, 3.0), (0.0, 0.0)], kinds=[1, 1, 0])
    shown = replay(made._replace(id="straight"), "trained")._replace(
        present=np.ones((count, 3), bool), expert=None, route=np.zeros((0, 2), np.float32),
        events={"collision": None}, metrics={"progress": 0.75},
    )  # fmt: skip
    return shown._replace(**changes)  # type: ignore[arg-type]


def pixel(image: Image.Image, recorded: Recording, t: int, x: float, y: float) -> tuple[int, ...]:
    """The colour at the place (x, y) of the world."""
    eye = camera(recorded)[t]
    at = (CENTRE[0] + (x - eye[0]) * frames.PIXELS, CENTRE[1] - (y - eye[1]) * frames.PIXELS)
    return image.convert("RGB").getpixel((int(at[0]), int(at[1])))


def unpack(packed: dict[str, Any]) -> np.ndarray:
    """float64 [P, 2]: what the player makes of packed points."""
    units = np.frombuffer(base64.b64decode(packed["d"]), "<i2").astype(float).reshape(-1, 2)
    return np.where(units == web_player.NOWHERE, np.nan, np.array(packed["o"]) + units * packed["s"])


VOID = {"meta", "input", "br", "line", "path", "circle", "rect"}


class Parsed(HTMLParser):
    """The tags that are left open, and the text inside each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert name not in ("src", "href") or (value or "").startswith("#"), f"{tag} loads {value}"

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def test_gif_reads_back_frame_by_frame(tmp_path: Path) -> None:
    recorded = recording(6)
    save.save([recorded, recorded._replace(label="idm")], tmp_path / "new" / "drive.gif", fps=20)
    with Image.open(tmp_path / "new" / "drive.gif") as image:
        assert image.n_frames == 12
        assert image.size == (640, 480)
        assert image.info["duration"] == 50
        for t in (0, 5):
            image.seek(t)
            assert pixel(image, recorded, t, 0.5 * t - 1.0, 0.0) == EGO
            assert pixel(image, recorded, t, 0.0, 17.0) == VEHICLE  # its rear: the lorry faces north
            assert pixel(image, recorded, t, 3.0 + 0.5 * t, 17.0) == frames.COLOURS["ground"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["drive.gif"], "a partial file was left"


def test_the_camera_follows_north_up() -> None:
    recorded = recording(40)
    image = next(frames.frames(recorded, [39]))
    # the ego, 19.5 m further east, is in the middle; the lorry has moved to the left by as much
    assert image.getpixel((CENTRE[0] - 8, CENTRE[1])) == EGO
    assert image.getpixel((CENTRE[0] - int(19.5 * 8), CENTRE[1] - 17 * 8)) == VEHICLE


def test_a_pose_is_drawn_over_the_whole_box_and_no_more() -> None:
    recorded = recording(2)
    image = next(frames.frames(recorded, [0]))
    mask = np.all(np.asarray(image) == EGO, axis=-1)
    mask[:80], mask[-80:] = False, False  # the legend shows the same colour
    rows, columns = np.nonzero(mask)
    # 4.5 x 2 m at 8 pixels a metre, less the outline of one pixel on each side
    assert abs((np.ptp(columns) + 1) - 36) <= 3
    assert abs((np.ptp(rows) + 1) - 16) <= 3


def test_absent_agents_and_padding_are_not_drawn() -> None:
    recorded = recording(2)
    present = recorded.present.copy()
    present[:, 1] = False
    image = next(frames.frames(recorded._replace(present=present), [0]))
    assert pixel(image, recorded, 0, 0.0, 17.0) == frames.COLOURS["ground"]
    padded = recorded._replace(kind=np.array([1, 0, 0], np.int8))
    assert pixel(next(frames.frames(padded, [0])), recorded, 0, 0.0, 17.0) == frames.COLOURS["ground"]


def test_the_log_is_an_outline_and_nan_is_none() -> None:
    expert = np.array([[10.0, 0.0, 0.0], [np.nan, np.nan, np.nan]], np.float32)
    recorded = recording(2, expert=expert)
    first, second = frames.frames(recorded, [0, 1])
    assert pixel(first, recorded, 0, 10.0, 1.0) == GHOST
    assert pixel(first, recorded, 0, 10.0, 0.0) == frames.COLOURS["ground"]
    assert pixel(second, recorded, 1, 10.0, 1.0) == frames.COLOURS["ground"]


def test_the_map_is_drawn_in_layers() -> None:
    lane = np.array([[-30, 0], [30, 0]], np.float32)
    edge = np.array([[-30, 3], [30, 3]], np.float32)
    zebra = np.array([[10, -2], [12, -2], [12, 2], [10, 2]], np.float32)
    drawing = ((log.EDGE_BOUNDARY, edge), (log.CROSSWALK, zebra), (log.LANE_STREET, lane))
    image = next(frames.frames(recording(2, drawing=drawing), [0]))
    recorded = recording(2)
    assert pixel(image, recorded, 0, 20.0, 0.0) == frames.COLOURS["road"]
    assert pixel(image, recorded, 0, 11.0, 1.0) == frames.COLOURS["crosswalk"]
    assert pixel(image, recorded, 0, 20.0, 3.0) == frames.COLOURS["edge"]
    assert pixel(image, recorded, 0, 20.0, -3.0) == frames.COLOURS["ground"]


def test_lights_and_events_show_from_their_frame_on() -> None:
    recorded = recording(
        3,
        light_position=np.array([[8.0, 0.0], [np.nan, np.nan]], np.float32),
        light_state=np.array([[1, 3, 2], [1, 1, 1]], np.int8),
        events={"collision": 1, "goal": None},
    )
    images = list(frames.frames(recorded, [0, 1, 2]))
    seen = [pixel(image, recorded, t, 8.0, 0.0) for t, image in enumerate(images)]
    assert seen == [frames.COLOURS["red"], frames.COLOURS["green"], frames.COLOURS["amber"]]
    ring = [pixel(image, recorded, t, 0.5, 4.1) for t, image in enumerate(images)]
    assert ring == [frames.COLOURS["ground"], frames.COLOURS["fault"], frames.COLOURS["fault"]]


def test_all_colours_of_a_frame_survive_the_palette() -> None:
    image = Image.new("RGB", (len(frames.COLOURS), 1))
    image.putdata(list(frames.COLOURS.values()))
    back = image.quantize(palette=save._palette(), dither=Image.Dither.NONE).convert("RGB")
    assert [back.getpixel((x, 0)) for x in range(image.width)] == list(frames.COLOURS.values())


def test_png_is_a_strip_with_a_row_a_recording(tmp_path: Path) -> None:
    save.save([recording(9), recording(9)], tmp_path / "strip.PNG")
    with Image.open(tmp_path / "strip.PNG") as image:
        assert image.size == (5 * 648 - 8, 2 * 488 - 8)
        assert image.getpixel((4 * 648 + CENTRE[0] - 8, 488 + CENTRE[1])) == EGO


def test_html_holds_the_recording_and_needs_nothing_else(tmp_path: Path) -> None:
    wicked = recording(
        6, id="</script><b>&", label="<i>", events={"goal": 5}, metrics={"progress": 0.75, "return": np.nan}
    )
    save.save([wicked, recording(6, id="</script><b>&")], tmp_path / "drive.html")
    text = (tmp_path / "drive.html").read_text("utf-8")
    parsed = Parsed(text)
    assert parsed.open == []
    assert "b" not in parsed.tags
    assert "://" not in text
    data = next(json.loads(script) for script in parsed.scripts if script.startswith("{"))
    assert len(data["maps"]) == 1, "the map of one scenario is kept once"
    first = data["recordings"][0]
    assert (first["id"], first["label"], first["frames"], first["dt"]) == ("</script><b>&", "<i>", 6, 0.1)
    assert first["events"] == [{"name": "goal", "frame": 5, "good": True}]
    assert first["metrics"] == {"progress": 0.75, "return": None}
    assert first["speed"] == [5.0] * 6
    position = unpack(first["position"]).reshape(6, -1, 2)
    np.testing.assert_allclose(position[:, first["ego"]], wicked.pose[:, 0, :2], atol=0.0051)
    assert first["kinds"] == [1, 1], "padding is not kept"


def test_a_page_keeps_whoever_is_driven_and_what_is_known_of_them() -> None:
    """Agents far from the ego are left out, but for the driven ones; places are counted anew."""
    recorded = recording(6)
    pose = np.repeat(recorded.pose[:, :1], 4, axis=1)
    pose[:, 1:3, 0] += 400.0
    recorded = recorded._replace(
        pose=pose, size=np.full((4, 2), 2.0, np.float32), kind=np.ones(4, np.int8), present=np.ones((6, 4), bool),
        controlled=np.array([False, False, True, True]), ego=3,
        others=(Verdict(2, {"offroad": 4, "goal": None}, {"progress": np.nan}),),
    )  # fmt: skip
    packed = web_player.encode([recorded])["recordings"][0]
    assert (len(packed["kinds"]), packed["ego"], packed["controlled"]) == (3, 2, [0, 1, 1])
    assert packed["numbers"] == [0, 2, 3]
    assert packed["others"] == [
        {"agent": 1, "events": [{"name": "offroad", "frame": 4, "good": False}], "metrics": {"progress": None}}
    ]


def test_mp4_without_ffmpeg_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "_ffmpeg", lambda: None)
    with pytest.raises(ValueError, match=r"drive\.mp4' needs ffmpeg; install it, .* or write a \.gif"):
        save.save([recording()], tmp_path / "drive.mp4")
    assert list(tmp_path.iterdir()) == []


def fake_ffmpeg(folder: Path, program: str) -> str:
    """A program that stands for ffmpeg: its last argument is the file to write, its input raw frames."""
    path = folder / "fake-ffmpeg"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_mp4_hands_ffmpeg_every_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_ffmpeg(tmp_path, 'for last; do :; done; cat > "$last"')
    monkeypatch.setattr(save, "_ffmpeg", lambda: program)
    save.save([recording(3)], tmp_path / "drive.mp4")
    raw = np.frombuffer((tmp_path / "drive.mp4").read_bytes(), np.uint8).reshape(3, 480, 640, 3)
    assert tuple(raw[2, CENTRE[1], CENTRE[0] - 8]) == EGO


def test_mp4_repeats_what_ffmpeg_complained_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = fake_ffmpeg(tmp_path, "echo 'No space left' >&2; exit 3")
    monkeypatch.setattr(save, "_ffmpeg", lambda: program)
    with pytest.raises(RuntimeError, match="No space left"):
        save.save([recording(3)], tmp_path / "drive.mp4")
    assert not (tmp_path / "drive.mp4").exists()


@pytest.mark.parametrize("name", ["drive.webm", "drive", "drive.gif.bak"])
def test_another_suffix_names_the_choices(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is none of \.gif, \.mp4, \.html, \.png"):
        save.save([recording()], tmp_path / name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pose": np.zeros((5, 3, 3), np.float32)}, r"pose has shape \(5, 3, 3\), expected \(6, 3, 3\)"),
        ({"ego": 3}, r"ego is 3, expected 0 \.\. 2"),
        ({"events": {"goal": 6}}, r"goal at frame 6, expected 0 \.\. 5"),
        ({"others": (Verdict(3, {}, {}),)}, r"others has agent 3, expected 0 \.\. 2"),
        ({"others": (Verdict(1, {"goal": 9}, {}),)}, r"goal at frame 9, expected 0 \.\. 5"),
        ({"light_state": np.zeros((1, 6), np.int8)}, "light_state has shape"),
        ({"route": np.full((2, 2), np.nan)}, "not finite"),
        ({"dt": 0.0}, "dt is 0.0"),
    ],
)
def test_arrays_that_do_not_fit_are_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check([recording(6, **changes)])


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 recordings"):
        save.save([], tmp_path / "drive.gif")


def test_speed_and_camera_of_an_ego_that_leaves() -> None:
    recorded = recording(5)
    present = recorded.present.copy()
    present[3:, 0] = False
    gone = recorded._replace(present=present)
    np.testing.assert_allclose(speeds(gone), [5, 5, 5, np.nan, np.nan], rtol=1e-5)
    np.testing.assert_allclose(camera(gone)[:, 0], [0.0, 0.5, 1.0, 1.0, 1.0])


def test_replay_shows_the_scenario_as_logged() -> None:
    poses = [driving_scenarios.line((0, 0), (5, 0), 4), driving_scenarios.line((0, 20), (0, 0), 4)]
    one = driving_scenarios.scenario(poses, lights=[(4.5, [1] * 4), (np.inf, [1] * 4)], road=None)
    scenario = one._replace(kind=np.array([1, 0], np.int8), route_points=np.array([9], np.int32))
    shown = replay(scenario)
    check([shown])
    np.testing.assert_array_equal(shown.controlled, [True, False])
    np.testing.assert_array_equal(shown.present[:, 1], False)
    np.testing.assert_allclose(shown.light_position, [[4.5, 0.0]])
    np.testing.assert_allclose(shown.expert, poses[0])
    assert len(shown.route) == 9


@pytest.mark.parametrize("size", [10.0, 300.0, 5000.0])
def test_packed_points_come_back_to_a_centimetre_or_the_range_s_share(size: float) -> None:
    points = np.random.default_rng(0).uniform(-size, size, (50, 2)) + 1e4
    points[7] = np.nan
    back = unpack(web_player.pack(points))
    known = np.isfinite(points).all(-1)
    np.testing.assert_allclose(back[known], points[known], atol=max(0.0051, 0.52 * size / 32000))
    assert np.isnan(back[7]).all()


def test_polylines_are_cut_thinned_and_dashed() -> None:
    line = np.stack([np.arange(0.0, 101.0), np.zeros(101)], -1)
    bent = np.concatenate([line, [[100.0, 50.0]]])
    np.testing.assert_array_equal(simplify(bent, 0.1), [[0, 0], [100, 0], [100, 50]])
    cut = clip(line, np.array([10.5, -1.0]), np.array([12.5, 1.0]))
    np.testing.assert_array_equal(np.concatenate(cut)[:, 0], [10, 11, 12, 13])
    assert clip(line, np.array([0.0, 5.0]), np.array([100.0, 6.0])) == []
    pieces = dashes(line, 3.0, 4.5)
    np.testing.assert_allclose([piece[[0, -1], 0] for piece in pieces[:2]], [[0, 3], [7.5, 10.5]])


def test_a_thinned_line_stays_within_its_tolerance() -> None:
    angle = np.linspace(0, np.pi, 400)
    circle = 20 * np.stack([np.cos(angle), np.sin(angle)], -1)
    kept = simplify(circle, 0.05)
    # a chord of an arc is furthest from it in its middle: r (1 - cos(half the angle))
    halves = np.diff(np.arctan2(kept[:, 1], kept[:, 0])) / 2
    assert (20 * (1 - np.cos(halves))).max() <= 0.0501
    assert len(kept) < 50


def test_a_box_turns_with_its_heading() -> None:
    corners = box(np.array([1.0, 2.0, np.pi / 2]), 4.0, 2.0)
    np.testing.assert_allclose(corners, [[0, 4], [0, 0], [2, 0], [2, 4]], atol=1e-12)

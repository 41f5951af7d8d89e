"""Pictures of environments: what they show moves as the state does, and where there is none it is said."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from longhaul.algorithms import registry
from longhaul.algorithms.run_context import RunContext
from longhaul.config import recipes
from longhaul.config.resolve import named
from longhaul.config.run import Named
from longhaul.driving.render import save
from longhaul.envs import pictures
from longhaul.envs import registry as environments
from longhaul.envs.classic_control import ClassicState
from longhaul.runtime import mesh as meshes
from longhaul.training import evaluate
from tests.helpers.quick import quick

MARK = [int(pictures.MARK[i : i + 2], 16) for i in (1, 3, 5)]


def drawn(name: str, physics: list[float]) -> np.ndarray:
    """[H, W, 3]"""
    draw = pictures.painter(name, environments.make(name))
    (picture,) = draw([ClassicState(np.array(physics, np.float32), np.int32(0))], [None])
    return np.asarray(picture).astype(int)


def centre(pixels: np.ndarray, code: str) -> np.ndarray:
    """Mean (x, y) of the pixels of a colour, from the middle of the picture, y up."""
    colour = [int(code[i : i + 2], 16) for i in (1, 3, 5)]
    rows, columns = np.nonzero(np.abs(pixels - colour).max(-1) < 8)
    return np.array([columns.mean() - pixels.shape[1] / 2, pixels.shape[0] / 2 - rows.mean()])


def test_cartpole_leans_as_its_angle_says() -> None:
    metre = 480 / 5.2
    upright, leaning = (centre(drawn("cartpole", [1.0, 0, angle, 0]), pictures.MARK) for angle in (0.0, 0.5))
    np.testing.assert_allclose(upright, [metre, 0.0], atol=2)  # the middle of the pole is 0.6 m up
    np.testing.assert_allclose(leaning - upright, [metre * np.sin(0.5) / 2, -metre * (1 - np.cos(0.5)) / 2], atol=2)


@pytest.mark.parametrize(
    ("name", "physics", "colour", "place"),
    [
        ("pendulum", [0.0, 0.0], pictures.MARK, (0, 1)),  # angle 0 is up
        ("pendulum", [np.pi, 0.0], pictures.MARK, (0, -1)),
        ("acrobot", [0.0, 0.0, 0.0, 0.0], pictures.MARK, (0, -1)),  # hangs
        ("acrobot", [np.pi / 2, 0.0, 0.0, 0.0], pictures.MARK, (1, 0)),
        ("mountaincar", [-1.1, 0.0], pictures.BODY, (-1, 1)),
        ("mountaincar-continuous", [0.2, 0.0], pictures.BODY, (1, 1)),
    ],
)
def test_bodies_are_where_the_state_says(name: str, physics: list[float], colour: str, place: tuple[int, int]) -> None:
    found = centre(drawn(name, physics), colour)
    signs = np.where(np.abs(found) < 4, 0, np.sign(found))
    np.testing.assert_array_equal(signs, place)


def test_an_observation_that_is_an_image_is_its_picture() -> None:
    channels = np.zeros((10, 10, 4), bool)
    channels[2, 3, 1] = channels[7, 8, 2] = True
    picture = pictures.image(channels)
    assert picture.size == (320, 320)
    pixels = np.asarray(picture)
    lit = {tuple(place) for place in np.argwhere(pixels[16::32, 16::32].any(-1)).tolist()}
    assert lit == {(2, 3), (7, 8)}
    assert tuple(pixels[80, 112]) != tuple(pixels[240, 272])  # a colour a channel
    frames = np.zeros((4, 84, 84), np.uint8)
    frames[3, :42] = 200  # the last of four
    assert np.asarray(pictures.image(frames))[:, :, 0].mean() == 100
    colours = np.random.default_rng(0).integers(0, 255, (400, 500, 3), np.uint8)
    np.testing.assert_array_equal(np.asarray(pictures.image(colours)), colours)


def untrained(recipe: str, env: str) -> tuple[Any, Any, Any]:
    run = dataclasses.replace(recipes.recipe(recipe), environment=Named(env))
    environment = named(Named(env))
    algorithm = registry.make(environment.spec, run.algorithm, RunContext(updates=1, mean=meshes.identity))
    return run, environment, algorithm.policy(quick(algorithm.init)(jax.random.key(0)))


def test_an_episode_is_drawn_from_its_start_to_its_end(tmp_path: Path) -> None:
    run, environment, policy = untrained("cartpole", "cartpole")
    images = evaluate.filmer(run, "cartpole", environment)(policy).images
    play = evaluate.player(run, environment, 1)(policy)
    assert 8 < len(images) <= play.metrics["length"].value.max() + 500
    rows = [np.nonzero(np.abs(np.asarray(image).astype(int) - MARK).max(-1) < 8) for image in (images[0], images[-1])]
    assert np.ptp(rows[1][1]) > np.ptp(rows[0][1]) + 8  # the pole fell: it is wider from left to right
    for suffix in (".gif", ".png", ".html"):
        save.film(images, tmp_path / f"a{suffix}", "<b>cartpole</b>")
    with Image.open(tmp_path / "a.gif") as film:
        assert 2 < film.n_frames <= len(images)
    page = (tmp_path / "a.html").read_text()
    assert "<b>" not in page and 'src="data:image/png;base64,' in page


@pytest.mark.slow
def test_frames_of_atari_are_drawn() -> None:
    pytest.importorskip("ale_py")
    run, environment, policy = untrained("ppo", "ale/pong")
    images = evaluate.filmer(run, "ale/pong?max_num_frames_per_episode=40", environment)(policy).images
    assert len(images) > 2 and images[0].size == (252, 252)
    assert np.ptp(np.asarray(images[0])) > 50


@pytest.mark.slow
def test_screens_of_hackmatrix_are_drawn() -> None:
    run, environment, policy = untrained("hackmatrix", "hackmatrix")
    images = evaluate.filmer(run, "hackmatrix", environment)(policy).images
    player = [int(pictures.TERMINAL["green"][i : i + 2], 16) for i in (1, 3, 5)]
    assert all((np.abs(np.asarray(image).astype(int) - player).max(-1) < 8).any() for image in images[:3])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what suites say of themselves
@pytest.mark.parametrize("name", ["gymnax/Breakout-MinAtar", "brax/inverted_pendulum?backend=spring"])
def test_suites_are_drawn(name: str) -> None:
    pytest.importorskip(name.partition("/")[0])
    with jax.numpy_rank_promotion("allow"):
        run, environment, policy = untrained("ppo", name)
        images = evaluate.filmer(run, name, environment)(policy).images
    assert len(images) > 2
    assert any(np.any(np.asarray(image) != np.asarray(images[0])) for image in images[1:])


def test_an_environment_without_pictures_is_named() -> None:
    with pytest.raises(ValueError, match="probe/one_step has no picture: its observations are no images"):
        pictures.painter("probe/one_step", environments.make("probe/" + sorted(environments.probes.PROBES)[0]))

"""Pictures of policies as they act, of which `longhaul render` and `longhaul.render` write a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from longhaul.config import recipes
from longhaul.config.resolve import named, resolve
from longhaul.config.run import Driving, Named, Run
from longhaul.driving.render import save as pictures
from longhaul.driving.render.recording import Recording
from longhaul.runtime.config_fields import replaced
from longhaul.runtime.errors import FieldError, RunError
from longhaul.telemetry import screen
from longhaul.training import evaluate as evaluation
from longhaul.training import evaluate_driving
from longhaul.training.checkpoint.resume import named_task, policy_of
from longhaul.training.run_dir import load_run
from longhaul.types import Params

SUFFIXES = (".gif", ".mp4", ".html", ".png")
"""Suffixes of pictures: animation, film, page with a player, film strip."""

FASTEST = 50
"""Most pictures a second: animations keep time in hundredths of a second, and players show no shorter ones."""


def check_file(out: str | Path) -> None:
    """FieldError where no picture can be written to `out`, before anything is driven."""
    path = Path(out)
    if path.suffix.lower() not in SUFFIXES:
        raise FieldError("out", repr(str(out)), f"its suffix must be one of {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise FieldError("out", repr(str(out)), "that is a folder; give a file in it")


Acting = Callable[[str], tuple[Run, Params | None]]
"""Policy's name -> (the run, the parameters that act in it, None for a driver)."""


def of_run(folder: Path | None, who: Sequence[str], member: int | None, step: int | None) -> tuple[Run, Acting]:
    """(run of `folder`, its policies by name); None: the recipe driving, in which drivers alone act."""
    if folder is not None:
        return load_run(folder), lambda each: policy_of(folder, each, member, step)
    if {"run", "untrained"} & {*who}:
        raise RunError("whose drive? give a RUN (pretrained is one), or --policy idm, log or constant")
    driving = resolve(recipes.recipe("driving"))
    return driving, lambda each: (driving, None)


def draw(
    run: Run, name: str, who: Sequence[str], acting: Acting, out: str | Path, *, data: Sequence[str] = (),
    scenarios: Sequence[str] = (), episodes: int = 1, traffic: str | None = None, safety: bool | None = None,
    skip_bad_logs: bool | None = None, past_violations: bool = False,
) -> None:  # fmt: skip
    """Picture of whole episodes of run `name`, written to `out`.

    `who` are the policies, side by side. The rest is driving's, as `longhaul render` has it: ids of `scenarios`, or
    else the first `episodes`. Raises FieldError and RunError, one line.
    """
    check_file(out)
    if not isinstance(run.environment, Driving):
        about = {"data": data, "scenario": scenarios, "traffic": traffic, "safety": safety,
                 "skip_bad_logs": skip_bad_logs, "past_violations": past_violations}  # fmt: skip
        return _other(run, name, who, acting, Path(out), about)
    loaded = [acting(each) for each in who]
    run, policies = loaded[0][0], [policy for _, policy in loaded]
    switches = {"safety": safety, "skip_bad_logs": skip_bad_logs}
    run = replaced(run, **{name: bool(value) for name, value in switches.items() if value is not None})
    drives = evaluate_driving.drives(run, data, None if scenarios else episodes, traffic).named(scenarios)
    changes = evaluate_driving.past_violations(run) if past_violations else {}
    shown = range(len(drives.scenarios))
    films = [
        [labelled(film, each) for film in drives.play(policy, driver_of(each), shown, **changes)[1]]
        for each, policy in zip(who, policies, strict=True)
    ]
    with screen.stage("drawing"):
        recordings = [film for of_scenario in zip(*films) for film in of_scenario]
        pictures.save(recordings, out, fps=rate(recordings[0]))


def _other(run: Run, name: str, who: Sequence[str], acting: Acting, out: Path, about: Mapping[str, Any]) -> None:
    """Picture of an episode in another environment than driving."""
    task = named_task(run)
    for field, value in about.items():
        if value not in (None, False) and value != () and value != []:
            shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else value
            raise FieldError(field, shown, f"it is for driving, and run {name} is {task}; leave it out")
    if not isinstance(run.environment, Named):
        raise RunError(f"run {name} is {task}, of which there is no picture")
    if len(who) > 1:
        raise FieldError("policy", " ".join(who), f"{task} is drawn for one policy at a time")
    run, policy = acting(who[0])
    assert isinstance(run.environment, Named)
    with screen.stage("drawing"):
        try:
            images = evaluation.filmer(run, run.environment.env, named(run.environment))(policy).images
        except ValueError as error:
            raise RunError(str(error)) from error
        pictures.film(images, out, f"{name}: {run.environment.env}")


def driver_of(who: str) -> str:
    """Driver of the simulator for a policy's name."""
    return "policy" if who in ("run", "untrained") else who


def labelled(recording: Recording, who: str) -> Recording:
    return recording._replace(label="trained" if who == "run" else who)


def rate(recording: Recording) -> int:
    """Pictures a second at which a recording is as fast as it was."""
    return max(1, min(FASTEST, round(1 / recording.dt)))

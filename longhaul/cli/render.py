"""The command `render`: one scenario as a policy drives it, as a picture, a film or a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhaul.cli import flags
from longhaul.cli.evaluate import DATA, MEMBER, RUN, TRAFFIC, driver_of, labelled, named_task, policy_of
from longhaul.cli.flags import DEBUG, PATH, TEXT, Flag, FlagError, choice
from longhaul.cli.run_flags import RUNS_DIR
from longhaul.config import recipes
from longhaul.config.resolve import resolve
from longhaul.config.run import Driving, Run
from longhaul.driving.render import save as pictures
from longhaul.driving.render.recording import Recording
from longhaul.runtime.errors import RunError
from longhaul.training import evaluate as evaluation
from longhaul.training import evaluate_driving
from longhaul.training.run_dir import find_folder, load_run

PICTURES = (".gif", ".mp4", ".html", ".png")


def render(words: Sequence[str]) -> int:
    """`longhaul render RUN|--policy ... [--data PATH...] [--scenario ID] [--traffic ...] --out FILE`."""
    policy = Flag("policy", choice(evaluation.POLICIES), "run", "driver; without RUN: idm, log or constant")
    scenario = Flag("scenario", TEXT, None, "the scenario's id", shown="the first")
    out = Flag("out", PATH, None, ".gif, .mp4, .html (a page with a player) or .png (a film strip)", shown="needed")
    groups = {"": [RUN, MEMBER, policy, DATA, scenario, TRAFFIC, out, RUNS_DIR, DEBUG]}
    parsed = flags.parse("render", "Draws one scenario as a policy drives it.", groups, words).values
    who = parsed["policy"]
    if parsed["out"] is None:
        raise FlagError("where to? give --out drive.gif (or .mp4, .html, .png)")
    if Path(parsed["out"]).suffix.lower() not in PICTURES:
        raise FlagError(f"--out is {parsed['out']!r}; its suffix must be one of {', '.join(PICTURES)}")
    if parsed["RUN"] is not None:
        folder = find_folder(Path(parsed["runs-dir"]), parsed["RUN"])
        stored = load_run(folder)
        if not isinstance(stored.environment, Driving):
            what = named_task(stored)
            raise FlagError(f"only driving can be drawn, and run {folder.name} is {what}; name another run")
        run, acting = policy_of(folder, who, parsed["member"])
    elif who in ("run", "untrained"):
        raise FlagError("whose drive? give a RUN, or --policy idm, log or constant")
    else:
        run, acting = resolve(recipes.recipe("driving")), None
    recording = _film(run, acting, parsed)
    pictures.save([recording], parsed["out"], fps=max(1, min(50, round(1 / recording.dt))))
    print(parsed["out"])
    return 0


def _film(run: Run, acting: Any, parsed: dict[str, Any]) -> Recording:
    """The recording of one scenario, by its id, else the first."""
    scenario, who = parsed["scenario"], parsed["policy"]
    drives = evaluate_driving.drives(run, parsed["data"], 1 if scenario is None else None, parsed["traffic"])
    ids = [each.id for each in drives.scenarios]
    if scenario is not None and scenario not in ids:
        hint = flags.suggestion(scenario, ids, f"there are {', '.join(ids[:3])}" + (" ..." if len(ids) > 3 else ""))
        raise RunError(f"no scenario is named {scenario!r}; {hint}")
    which = 0 if scenario is None else ids.index(scenario)
    return labelled(drives.some([which]).play(acting, driver_of(who), [0])[1][0], who)

"""Weights & Biases: where its records go, their names there, and the session that receives them.

Online, W&B reports its last record, and the rest of the file follows. Offline, nothing can be queried, and a killed
wandb loses its memory: so each session writes the whole history again, and removes the offline folder of the session
before. W&B's step is the number of updates.
"""

from __future__ import annotations

import configparser
import netrc
import os
import shutil
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from longhaul.runtime import bounded_json
from longhaul.runtime.errors import FAILED, STOPPED, first_line
from longhaul.telemetry.health import of_learning
from longhaul.telemetry.sinks import Record

if TYPE_CHECKING:
    from longhaul.telemetry.tracking import Row, Session, Tracker

MODES = ("online", "offline", "disabled")

MARK = "longhaul-run"
"""File in an offline folder that names the run's folder."""

NAMES = {
    "episode/return": "train/mean_episode_return",
    "episode/length": "train/mean_episode_length",
    "episode/move_frac": "actions/move_frac",
    "episode/siphon_frac": "actions/siphon_frac",
    "episode/program_frac": "actions/program_frac",
    "peak/stage": "stats/highest_stage",
    "update": "train/update_step",
    "sps": "train/steps_per_second",
}
"""Names of records -> those of HackMatrix's own trainer, for its dashboards and sweeps."""

LEARNING = {
    "policy_loss": "train/pg_loss",
    "value_loss": "train/vf_loss",
    "total_loss": "train/total_loss",
    "entropy": "train/entropy",
    "approx_kl": "train/approx_kl",
    "clip_fraction": "train/clip_frac",
}
"""Names of learning metrics, without the algorithm's name -> that trainer's."""

PARTS = "episode/reward_", "reward/"
"""Prefix of the parts of an episode's return -> prefix of the parts of a step's reward."""

KEYS = ("mean_reward", "mean_episode_return", "mean_episode_length")
"""Names under train/ that are copied under key/."""

SETTINGS = {
    "num_envs": "num_envs", "num_steps": "num_steps", "total_steps": "total_timesteps", "seed": "seed",
    "devices": "device_count",
}  # fmt: skip
ALGORITHM = {"lr": "learning_rate"} | {
    name: name
    for name in (
        "gamma", "gae_lambda", "num_minibatches", "update_epochs", "clip_eps", "vf_coef", "ent_coef", "max_grad_norm",
        "hidden_dim", "num_layers",
    )
}  # fmt: skip
"""Settings of a Run -> names in that trainer's config."""


def resolved(mode: str | None) -> str:
    """Mode of MODES: as requested, else by WANDB_MODE, else by credentials. Raises ValueError for no mode."""
    mode = mode or os.environ.get("WANDB_MODE") or ("online" if has_credentials() else "offline")
    mode = {"dryrun": "offline", "run": "online"}.get(mode, mode)
    if mode not in MODES:
        raise ValueError(f"WANDB_MODE is {mode!r}; it must be one of {', '.join(MODES)}")
    return mode


def has_credentials() -> bool:
    """True if wandb would find credentials in the environment, its settings or the netrc file; only the server can
    check them."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = configparser.ConfigParser(interpolation=None)
    config = os.environ.get("WANDB_CONFIG_DIR") or os.path.expanduser("~/.config/wandb")
    with suppress(configparser.Error, OSError, UnicodeDecodeError):
        settings.read([Path(config) / "settings"])
    if settings.get("default", "api_key", fallback=""):
        return True
    url = os.environ.get("WANDB_BASE_URL") or settings.get("default", "base_url", fallback="https://api.wandb.ai")
    host: str = urlsplit(str(url)).netloc
    places = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for place in places:
        with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if netrc.netrc(os.path.expanduser(place)).authenticators(host):
                return True
    return False


def renamed(record: Record, before: Record | None = None) -> dict[str, Any]:
    """Record with the names of HackMatrix's own trainer; unknown names stay, nulls are dropped.

    `before` is the previous record, None for the first. Means of a step are over the steps of ended episodes.
    """
    metrics = {name: value for name, value in record.items() if value is not None}
    length, returned = metrics.get("episode/length"), metrics.get("episode/return")
    own_prefix, their_prefix = PARTS
    fields: dict[str, Any] = {}
    for name, value in metrics.items():
        if name.startswith(own_prefix) and length:
            fields[their_prefix + name.removeprefix(own_prefix)] = value / length
        elif name != "episode/count":
            fields[NAMES.get(name) or LEARNING.get(of_learning(name) or "", name)] = value
    updates = record["update"] - (before["update"] if before else 0)
    steps = record["agent_steps"] - (before["agent_steps"] if before else 0)
    if "episode/count" in metrics:
        fields["train/num_episodes"] = metrics["episode/count"] / updates
    if "train/entropy" in fields:
        fields["train/ent_loss"] = -fields["train/entropy"]
    if "sps" in metrics and steps:
        fields["train/updates_per_second"] = metrics["sps"] * updates / steps
    if returned is not None and length:
        fields["train/mean_reward"] = returned / length
    return fields | {f"key/{name}": fields[f"train/{name}"] for name in KEYS if f"train/{name}" in fields}


def config(about: Mapping[str, Any]) -> dict[str, Any]:
    """Config of W&B: run.json, and the settings by the names of HackMatrix's own trainer."""
    run = about.get("run", {})
    algorithm = run.get("algorithm", {})
    algorithm = {**algorithm, **algorithm.get("network", {})}
    flat = {name: run[field] for field, name in SETTINGS.items() if field in run}
    return {**about, **flat, **{name: algorithm[field] for field, name in ALGORITHM.items() if field in algorithm}}


# ------------------------------------------------------------------------------------------------------------ session


def begin(session: Session) -> Tracker:
    """Session of W&B, offline if the server refuses."""
    import wandb

    from longhaul.telemetry.trackers.wandb_artifacts import sender
    from longhaul.telemetry.tracking import Tracker

    folder, tracked, say = session.folder, session.tracked, session.say
    mode = resolved(tracked.mode)
    if mode == "offline" and (tracked.mode or os.environ.get("WANDB_MODE")) is None:
        say("W&B: there are no credentials (wandb login, or WANDB_API_KEY), so the run is logged offline")
    for name in ("WANDB_MODE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_NAME"):
        os.environ.pop(name, None)
    where = Path(os.environ.get("WANDB_DIR") or folder)
    where.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"console": "off", "silent": True}
    if "x_stats_pid" in getattr(wandb.Settings, "model_fields", {}):
        options["x_stats_pid"] = session.pid  # machine metrics of the run's process
    common: dict[str, Any] = {
        "id": tracked.id, "name": folder.name, "project": tracked.project, "entity": tracked.entity,
        "config": config(bounded_json.read(folder / "run.json")), "dir": str(where),
        "settings": wandb.Settings(**options),
    }  # fmt: skip
    opened = _online(session, common) if mode == "online" else None
    run, sent = (_offline(session, where, common), 0) if opened is None else opened

    def log(rows: Sequence[Row]) -> None:
        for record, before in rows:
            run.log(renamed(record, before), step=record["update"])

    def finish(end: str) -> None:
        if end == "stopped":
            run.mark_preempting()
        run.finish(exit_code={"done": 0, "stopped": STOPPED}.get(end, FAILED))

    return Tracker(sent, log, finish, sender(session, run, online=opened is not None))


def _online(session: Session, common: Mapping[str, Any]) -> tuple[Any, int] | None:
    """Run on the server and the last update that it has; None where the server refuses, which is said."""
    import wandb

    from longhaul.telemetry.follower import public
    from longhaul.telemetry.tracking import save

    tracked, last = session.tracked, session.last if session.tracked.rewind else 0
    try:
        if last:
            run, sent = wandb.init(mode="online", resume_from=f"{tracked.id}?_step={last}", **common), last
        else:
            run = wandb.init(mode="online", resume="allow", **common)
            sent = run.starting_step - 1 if run.resumed else 0
        session.say(f"W&B: {run.url}{f', rewound to update {last}' if last else ''}")
        save(session.folder, {"wandb": tracked._replace(rewind=False)})  # a follower that is started again keeps all
    except Exception as error:
        print(public(traceback.format_exc()), flush=True)
        session.say(f"W&B does not take the run ({first_line(error)}), so it is logged offline")
        wandb.teardown()
        return None
    return run, sent


def _offline(session: Session, where: Path, common: Mapping[str, Any]) -> Any:
    """Run in files below `where`, from its first record on: what an earlier session of it wrote there is removed."""
    import wandb

    own = str(session.folder.resolve())
    for place in where.glob(f"wandb/offline-run-*-{session.tracked.id}"):
        mark = place / MARK
        if mark.is_file() and mark.read_text() == own:
            shutil.rmtree(place, ignore_errors=True)
    run = wandb.init(mode="offline", **common)
    place = Path(run.settings.sync_dir)
    (place / MARK).write_text(own)
    session.say(f"W&B: offline; wandb sync {place}")
    return run

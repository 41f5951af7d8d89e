"""MLflow: a run of the experiment, by the client alone, so that no state of the library counts.

The store is that of MLflow's own variables (MLFLOW_TRACKING_URI, and its credentials beside it). The run is found again
by a tag. Its metric `update` is the last of each batch, so a record that was sent in part is sent again whole; a
record's time is the same each time, so that the store recognises what it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from longhaul.runtime import bounded_json
from longhaul.telemetry.sinks import Record

if TYPE_CHECKING:
    from longhaul.telemetry.tracking import Row, Session, Tracker

TAG = "longhaul.id"
"""Tag of an MLflow run with the id in mlflow.json."""

MOST_METRICS, MOST_PARAMS, LONGEST = 1000, 100, 500
"""MLflow's bounds: metrics and parameters of one call, characters of a parameter in older stores."""

STATES = {"done": "FINISHED", "stopped": "KILLED", "killed": "KILLED"}


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Settings by dotted names: {"algorithm": {"lr": 0.1}} -> algorithm.lr."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, str(value)[:LONGEST]


def numbers(record: Record) -> dict[str, float]:
    """Metrics of a record by names that MLflow takes, `update` last; texts and nulls are left out."""
    values = {
        re.sub(r"[^\w\-. /]", "_", name): float(value)
        for name, value in record.items()
        if isinstance(value, int | float)
    }
    return values | {"update": values.pop("update")}


def begin(session: Session) -> Tracker:
    """Session of MLflow."""
    from mlflow import MlflowClient, set_tracking_uri
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.tracking import get_tracking_uri

    from longhaul.telemetry.tracking import Tracker

    set_tracking_uri(get_tracking_uri())
    client, folder, tracked = MlflowClient(), session.folder, session.tracked
    about = bounded_json.read(folder / "run.json")
    experiment = client.get_experiment_by_name(tracked.project)
    place = experiment.experiment_id if experiment else client.create_experiment(tracked.project)
    found = client.search_runs([place], f"tags.`{TAG}` = '{tracked.id}'", max_results=1)
    run = found[0] if found else client.create_run(place, run_name=folder.name, tags={TAG: tracked.id})
    key, start, known = run.info.run_id, run.info.start_time, run.data.params
    client.update_run(key, status="RUNNING")
    settings = [Param(name, value) for name, value in flat(about.get("run", {})) if name not in known]
    for first in range(0, len(settings), MOST_PARAMS):
        client.log_batch(key, params=settings[first : first + MOST_PARAMS])
    client.log_batch(key, tags=[RunTag("commit", str(about.get("commit")))])
    session.say(f"MLflow: run {key} of experiment {tracked.project} in {client.tracking_uri}")

    def log(rows: Sequence[Row]) -> None:
        batch: list[Metric] = []
        for record, _ in rows:
            moment = start + round(1000 * record["wall_seconds"])
            metrics = [Metric(name, value, moment, record["update"]) for name, value in numbers(record).items()]
            if len(batch) + len(metrics) > MOST_METRICS:
                client.log_batch(key, metrics=batch)
                batch = []
            batch += metrics
        client.log_batch(key, metrics=batch)

    return Tracker(
        int(run.data.metrics.get("update", 0)), log, lambda end: client.set_terminated(key, STATES.get(end, "FAILED"))
    )

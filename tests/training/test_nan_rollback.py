"""Updates that end in NaN: noticed, kept, gone around; and everything as before where there is none."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.algorithms.config import PPOConfig
from longhaul.config.run import Named, Run
from longhaul.networks.config import NetworkConfig
from longhaul.runtime.errors import RunError
from longhaul.topologies import fused
from longhaul.training import loop, nan_rollback
from longhaul.training.checkpoint.resume import restore_policy
from longhaul.training.nan_rollback import Poisoned
from longhaul.types import Progress
from tests.helpers import nan_environment
from tests.helpers.small_runs import after, begin, checkpoints, make_quick, records, result, resume, small

CHANCE = 1 / 3000
"""Of a step: about three NaNs in the 7,680 steps of a small run."""


@pytest.fixture(scope="module", autouse=True)
def _programs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        nan_environment.add(patch, "poisonous", CHANCE)
        yield


def poisonous(**changes: Any) -> Run:
    return small(environment=Named("poisonous"), seed=SEED, rollbacks=10, **changes)


SEED = 3


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that went around some NaNs."""
    folder = tmp_path_factory.mktemp("survived") / "run"
    assert begin(poisonous(), folder).code == 0
    return folder


def detours(folder: Path) -> list[dict[str, Any]]:
    entries = json.loads((folder / "run.json").read_text()).get("detours", [])
    return [{name: entry[name] for name in ("update", "checkpoint")} for entry in entries]


def told(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "poison.json").read_text())
    return found


# ------------------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("tree", "finite"),
    [
        ({"w": np.ones((2, 3), np.float32), "n": np.int32(4)}, True),
        ({"w": np.array([1.0, np.nan], np.float32)}, False),
        ({"w": np.array([1.0, -np.inf], np.float32), "v": np.ones(2, np.float32)}, False),
        ((jax.random.key(0), np.int32(2**31 - 1)), True),
        ((jnp.bfloat16(jnp.inf),), False),
    ],
)
def test_one_number_that_is_not_finite_is_seen(tree: Any, finite: bool) -> None:
    assert bool(jax.jit(fused.is_finite)(tree)) is finite


def test_the_first_bad_update_of_a_call_is_named_and_those_after_its_end_do_not_count() -> None:
    loss = np.array([1.0, 2.0, np.nan, np.nan, 9.0])
    rows = {"ppo/loss": loss, "peak/stage": np.full(5, -np.inf), fused.FINITE: np.isfinite(loss)}
    rows[fused.FINITE][4] = False
    progress = Progress((), (), jax.random.key(0), jnp.int32(0))
    with pytest.raises(Poisoned) as raised:
        nan_rollback.look(rows, 4, 40, progress)
    assert raised.value.update == 39
    assert list(raised.value.metrics) == ["ppo/loss"]
    assert math.isnan(raised.value.metrics["ppo/loss"])
    assert raised.value.names() == "ppo/loss"
    assert set(nan_rollback.look(rows, 2, 38, progress)) == {"ppo/loss", "peak/stage"}


# -------------------------------------------------------------------------------------------------------- whole runs


def test_a_run_goes_around_and_ends_with_finite_numbers(survived: Path) -> None:
    """Its records have neither gap nor repeat; each detour begins at the newest checkpoint before the update."""
    made = detours(survived)
    assert 1 <= len(made) <= 10
    for entry in made:
        assert 0 < entry["update"] - entry["checkpoint"] <= 6 + 2, "a save every 6 updates, in calls of 2"
    assert [r["update"] for r in records(survived)] == list(range(4, 61, 4))
    values = [value for record in records(survived) for value in record.values()]
    assert all(value is not None and math.isfinite(value) for value in values)
    _, policy, _ = restore_policy(survived)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(policy.params))


def test_poisoned_updates_are_kept_and_can_be_repeated(survived: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Bit for bit, in the folder that was kept, and as often as one likes."""
    made = detours(survived)
    kept = sorted((survived / "poison").iterdir(), key=lambda path: told(path)["detours"])
    assert [told(folder)["update"] for folder in kept] == [entry["update"] for entry in made]
    folder = kept[-1]
    about = told(folder)
    assert "nan" in about["metrics"].values()
    assert about["state"]["not_finite"]
    with pytest.raises(RunError, match=rf"update {about['update']} made numbers that are not finite .*--rollbacks"):
        resume(folder)
    (again,) = (folder / "poison").iterdir()
    assert told(again) == about
    assert result(survived)["status"] == "done"


def test_stopped_on_a_detour_it_goes_on_exactly(
    survived: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after the detour was noted, and at every few calls after: nothing but run.json knows of it at first."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(nan_rollback, "keep", after(1, lambda: signal.raise_signal(signal.SIGTERM), nan_rollback.keep))
        assert begin(poisonous(), folder).code == loop.STOPPED
    assert detours(folder) == detours(survived)[:1]
    assert checkpoints(folder)[-1:] == [detours(folder)[0]["checkpoint"]][: len(checkpoints(folder))]
    while not (folder / "result.json").exists():
        with monkeypatch.context() as patch:
            heard = after(10, lambda: signal.raise_signal(signal.SIGTERM), loop.Sums.add)
            patch.setattr(loop.Sums, "add", heard)
            assert resume(folder).code in (0, loop.STOPPED)
    assert result(folder) == result(survived)
    assert records(folder) == records(survived)
    assert [entry["update"] for entry in detours(folder)] == [entry["update"] for entry in detours(survived)]


@pytest.mark.slow
def test_where_it_comes_again_and_again_the_run_fails_with_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    config = PPOConfig(num_minibatches=2, update_epochs=1, lr=1e38, network=NetworkConfig(hidden_dim=8))
    with pytest.raises(RunError, match=r"update \d+ made numbers .*after 2 detours of 2; lower --lr") as raised:
        begin(small(algorithm=config, rollbacks=2), folder)
    assert "\n" not in str(raised.value)
    err = capfd.readouterr().err
    assert "goes on from update 0 with other random numbers (1 of 2)" in err
    assert "(2 of 2)" in err
    assert len(list((folder / "poison").iterdir())) == 3


def test_a_number_of_rollbacks_below_zero_is_refused() -> None:
    with pytest.raises(RunError, match="--rollbacks is -1; it must be at least 0"):
        small(rollbacks=-1)

"""Cases of `longhaul bench sync`."""

import json

import numpy as np
import pytest

from longhaul.bench.cases.sync import Trained
from longhaul.cli import main


def test_a_step_goes_as_far_as_the_rate_on_average():
    """A bfloat16 can't move by so little; of many as many move by a whole unit as make up for it."""
    array = np.zeros(400_000, np.uint16)
    trained = Trained({"w": array}, 1e-4)
    array[:] = 0x3F00  # 0.5, whose neighbours are 2^-9 below and 2^-8 above
    share = trained.step()
    value = (array.astype(np.uint32) << 16).view(np.float32)
    assert share == pytest.approx(1e-4 * (2**8 + 2**9) / 2, rel=0.05)
    moved = value - 0.5
    assert abs(moved.mean()) < 1e-5
    np.testing.assert_allclose([moved[moved > 0].sum(), -moved[moved < 0].sum()], 400_000 / 2 * 1e-4, rtol=0.05)


@pytest.mark.slow
def test_changes_alone_travel(tmp_path) -> None:
    out = tmp_path / "figures.json"
    assert main.main(["sync", "bench", "--model", "tiny", "--learning-rate", "1e-5", "--json", str(out)]) == 0
    (found,) = json.loads(out.read_text())
    assert found["config"]["lane"] == "tcp" and found["config"]["learning_rate"] == 1e-5
    assert 0.05 < found["changed"] < 0.6 and found["ratio"] > 3
    assert found["encode_seconds"] > 0 and 0 < found["peak_bytes"] <= found["budget_bytes"]


@pytest.mark.slow
def test_where_changes_are_not_worth_it_all_of_a_version_travels(tmp_path) -> None:
    out = tmp_path / "figures.json"
    assert main.main(["sync", "bench", "--model", "tiny", "--learning-rate", "0.02", "--json", str(out)]) == 0
    (found,) = json.loads(out.read_text())
    assert found["changed"] > 0.9 and found["ratio"] == 1.0


@pytest.mark.slow
def test_the_benchmark_keeps_its_budget_and_its_stages_make_up_its_time() -> None:
    from longhaul.bench import harness

    figures = list(harness.run("sync", model="tiny", lane=("shm", "tcp")))
    assert [(each["config"]["lane"], each["config"]["verify"]) for each in figures] == [
        ("shm", "once"),
        ("tcp", "always"),
    ]
    for each in figures:
        assert 0 < each["peak_bytes"] <= each["budget_bytes"]
        assert each["steps"] == 2 * each["config"]["image_bytes"]
        assert each["gather_seconds"] <= each["publish_seconds"] <= each["wall_seconds"]
        assert ("socket_seconds" in each) == (each["config"]["lane"] == "tcp")

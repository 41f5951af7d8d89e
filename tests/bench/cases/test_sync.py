"""Cases of `longhaul bench sync`: a step, versions, and plans by shapes alone."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from longhaul.bench import harness
from longhaul.bench.cases import sync
from longhaul.bench.cases.sync import Trained
from longhaul.cli import main
from longhaul.weight_sync import model_shapes
from longhaul.weight_sync.resharding import sharded


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


def test_this_machine_has_rates() -> None:
    sample = sync.Sample(1 << 20, 2)
    found = sample.rates()
    sample.close()
    assert all(math.isfinite(rate) and rate > 1e6 for rate in found)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "worth"), [("1e-5", True), ("0.02", False)])
def test_changes_alone_travel_where_they_are_worth_it(tmp_path: Path, rate: str, worth: bool) -> None:
    out = tmp_path / "figures.json"
    assert main.main(["sync", "bench", "--model", "tiny", "--learning-rate", rate, "--json", str(out)]) == 0
    (found,) = json.loads(out.read_text())
    assert found["config"]["lane"] == "tcp" and found["config"]["learning_rate"] == float(rate)
    assert found["encode_seconds"] > 0 and 0 < found["peak_bytes"] <= found["budget_bytes"]
    if worth:
        assert 0.05 < found["changed"] < 0.6 and found["ratio"] > 3
    else:
        assert found["changed"] > 0.9 and found["ratio"] == 1.0


@pytest.mark.slow
def test_the_benchmark_keeps_its_budget_and_its_stages_make_up_its_time() -> None:
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


def test_a_plan_moves_what_each_replica_needs_once_and_it_arrives():
    (found,) = sync.layouts("tiny", "fsdp:4", "tp:2x2")
    norms = 2 * sum(2 * np.prod(shape) for name, shape, _ in model_shapes.forms("tiny", layers=1) if len(shape) == 1)
    norms -= 2 * 2 * 64  # of the last one, which is in no layer
    assert found["verified"] is True
    assert found["moved_bytes"] == 2 * found["layer_bytes"] + norms, "norms are whole on both ranks of a replica"
    assert found["config"]["params"] == sum(np.prod(shape) for _, shape, _ in model_shapes.forms("tiny"))
    assert found["most_received_bytes"] <= found["layer_bytes"]
    assert set(found["model_seconds"]) == {"full", "delta, on accelerators", "delta, by host cores"}


def test_a_transfer_that_copies_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sync, "execute_numpy", lambda *given: None)
    with pytest.raises(RuntimeError, match="should"):
        next(sync.layouts("tiny", "fsdp:4", "replicated:2"))


def test_a_model_too_large_for_any_machine_is_planned_by_its_shapes():
    (found,) = sync.layouts("1t", "fsdp:32", "tp:2x16")
    assert found["config"]["params"] == pytest.approx(1e12, rel=0.02)
    assert found["verified"] is False and found["moves"] > 0
    assert found["layer_bytes"] * found["config"]["layers"] == pytest.approx(2e12, rel=0.02)


def test_tensor_parallel_kernels_are_split_where_serving_splits_them():
    shapes = {name: (shape, dtype) for name, shape, dtype in model_shapes.forms("tiny")}
    held = {tensor.name: tensor for tensor in sync.layout_of("tp:2", shapes).tensors}
    split = {part: held[f"model.layers.0.{part}.weight"].boxes[1][1] for part in ("mlp.up_proj", "mlp.down_proj")}
    assert split == {"mlp.up_proj": ((64, 128), (0, 64)), "mlp.down_proj": ((0, 64), (64, 128))}
    assert held["model.norm.weight"].boxes[1][1] == ((0, 64),)
    assert sync.layout_of("fsdp:2", shapes) == sharded(shapes, 2)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--layouts fsdp:8", "--layouts takes two"),
        ("--layouts fsdp:8 tp:2 --lane tcp", "without --lane"),
        ("--layouts fsdp:8 rows:3", "'rows:3' is no layout; write replicated:N"),
        ("--layouts fsdp:0 tp:2", "'fsdp:0' is no layout"),
        ("--layouts fsdp:2 tp:99999", "'tp:99999' is no layout"),
        ("--learning-rate 0", "it must lie above 0 and below 1"),
        ("--learning-rate 1e-6 --lane shm", "needs --lane tcp"),
        ("--model 1t", "choose a smaller one, or plan it by its shapes"),
    ],
)
def test_wrong_words_are_told_in_one_line(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["sync", "bench", *words.split()]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1

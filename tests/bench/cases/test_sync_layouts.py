"""`longhaul sync bench --layouts` and `--learning-rate`: plans by shapes alone, and versions that differ by a step."""

import numpy as np
import pytest

from longhaul.bench.cases import sync_layouts
from longhaul.cli import main
from longhaul.weight_sync import model_shapes
from longhaul.weight_sync.resharding.layout import sharded


def test_a_plan_moves_what_each_replica_needs_once_and_it_arrives():
    (found,) = sync_layouts.measure("tiny", "fsdp:4", "tp:2x2")
    norms = 2 * sum(2 * np.prod(shape) for name, shape, _ in model_shapes.forms("tiny", layers=1) if len(shape) == 1)
    norms -= 2 * 2 * 64  # of the last one, which is in no layer
    assert found["verified"] is True
    assert found["moved_bytes"] == 2 * found["layer_bytes"] + norms, "norms are whole on both ranks of a replica"
    assert found["config"]["params"] == sum(np.prod(shape) for _, shape, _ in model_shapes.forms("tiny"))
    assert found["most_received_bytes"] <= found["layer_bytes"]
    assert set(found["model_seconds"]) == {"full", "delta, on accelerators", "delta, by host cores"}


def test_what_did_not_arrive_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sync_layouts, "execute_numpy", lambda *given: None)
    with pytest.raises(RuntimeError, match="should"):
        next(sync_layouts.measure("tiny", "fsdp:4", "replicated:2"))


def test_a_model_too_large_for_any_machine_is_planned_by_its_shapes():
    (found,) = sync_layouts.measure("1t", "fsdp:32", "tp:2x16")
    assert found["config"]["params"] == pytest.approx(1e12, rel=0.02)
    assert found["verified"] is False and found["moves"] > 0
    assert found["layer_bytes"] * found["config"]["layers"] == pytest.approx(2e12, rel=0.02)


def test_tensor_parallel_kernels_are_split_where_serving_splits_them():
    shapes = {name: (shape, dtype) for name, shape, dtype in model_shapes.forms("tiny")}
    held = {tensor.name: tensor for tensor in sync_layouts.layout_of("tp:2", shapes).tensors}
    split = {part: held[f"model.layers.0.{part}.weight"].boxes[1][1] for part in ("mlp.up_proj", "mlp.down_proj")}
    assert split == {"mlp.up_proj": ((64, 128), (0, 64)), "mlp.down_proj": ((0, 64), (64, 128))}
    assert held["model.norm.weight"].boxes[1][1] == ((0, 64),)
    assert sync_layouts.layout_of("fsdp:2", shapes) == sharded(shapes, 2)


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

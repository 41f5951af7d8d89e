"""Memory that a language model's actors take, as it is announced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from longhaul.runtime import device_memory
from longhaul.topologies.actor_learner import config
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.training import actor_learner


def program(temporaries: int, outputs: int, donated: int = 0) -> Any:
    sizes = {"argument": 1, "output": outputs, "alias": donated, "temp": temporaries, "generated_code": 0}
    about = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
    return SimpleNamespace(memory_analysis=lambda: about)


MB = 1 << 20

WEIGHTS = 7 * MB


def beside(staleness: int, *, first: int = 300, later: Any = None, learning: int = 100) -> tuple[dict[str, int], int]:
    """(bytes beside the learner's program, places of the actors), by the MB of temporaries."""
    mesh = SimpleNamespace(local_devices=[SimpleNamespace(platform="cpu")])
    assembly: Any = SimpleNamespace(updates=4, origin=SimpleNamespace(updates=0), mesh=mesh)
    run: Any = SimpleNamespace(acting=ActorConfig(actors=1, actor_kind="thread", staleness=staleness))
    shapes = SimpleNamespace(weight_bytes=WEIGHTS)
    acting = SimpleNamespace(program=program(first * MB, 20 * MB), finishing=later, shapes=shapes)
    update = program(learning * MB, 20 * MB, donated=10 * MB)
    prepared: Any = SimpleNamespace(update=update, acting=acting)
    return actor_learner.beside(run, assembly, prepared, {}), config.rule(run.acting, 4, 0).places


@pytest.mark.parametrize(
    ("later", "most"), [(None, 320), (program(500 * MB, 30 * MB), 530), (program(200 * MB, 30 * MB), 320)]
)
def test_of_first_and_later_turns_the_one_that_needs_most_counts(later: Any, most: int) -> None:
    """A later turn has a longer prompt, and at times fewer rows."""
    for staleness, learns in ((0, 110), (1, 0)):  # in turn with learning, or beside it
        found, places = beside(staleness, later=later)
        assert found["sampling"] == places * (most * MB + WEIGHTS) - learns * MB


@pytest.mark.parametrize(("later", "kept"), [(32, 10 + 32), (33, 10)])
def test_small_blocks_of_sampling_stay_beside_learning(later: int, kept: int) -> None:
    """Learning, in turn with it, takes more; large blocks are given back."""
    found, places = beside(0, first=10, later=program(later * MB, 0), learning=500)
    assert found["sampling"] == places * kept * MB
    found, places = beside(1, first=10, later=program(later * MB, 0), learning=500)  # side by side
    assert found["sampling"] == places * (later * MB + WEIGHTS)


def test_no_less_is_announced_than_the_start_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler of a small model takes more than its updates."""
    monkeypatch.setattr(device_memory, "resident", lambda: 1000 * MB)
    update = program(100 * MB, 20 * MB, donated=10 * MB)
    need = device_memory.need(update)
    assert need is not None
    for staleness in (0, 1):
        monkeypatch.setattr(device_memory, "peak", lambda: 1000 * MB)
        without, _ = beside(staleness)
        assert "the start" not in without
        monkeypatch.setattr(device_memory, "peak", lambda: 1500 * MB)
        found, _ = beside(staleness)
        assert need.total + sum(found.values()) == 1500 * MB
        assert found.pop("the start") > 0 and found == without

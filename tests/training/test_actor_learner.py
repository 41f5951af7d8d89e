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


WEIGHTS = 7


def beside(staleness: int, later: Any = None) -> tuple[dict[str, int], int]:
    """(bytes beside the learner's program, places of the actors)."""
    mesh = SimpleNamespace(local_devices=[SimpleNamespace(platform="cpu")])
    assembly: Any = SimpleNamespace(updates=4, origin=SimpleNamespace(updates=0), mesh=mesh)
    run: Any = SimpleNamespace(acting=ActorConfig(actors=1, actor_kind="thread", staleness=staleness))
    acting = SimpleNamespace(program=program(300, 20), finishing=later, shapes=SimpleNamespace(weight_bytes=WEIGHTS))
    prepared: Any = SimpleNamespace(update=program(100, 20, donated=10), acting=acting)
    return actor_learner.beside(run, assembly, prepared, {}), config.rule(run.acting, 4, 0).places


@pytest.mark.parametrize(("later", "most"), [(None, 320), (program(500, 30), 530), (program(200, 30), 320)])
def test_of_first_and_later_turns_the_one_that_needs_most_counts(later: Any, most: int) -> None:
    """A later turn has a longer prompt, and at times fewer rows."""
    for staleness, learns in ((0, 110), (1, 0)):  # in turn with learning, or beside it
        found, places = beside(staleness, later)
        assert found["sampling"] == places * (most + WEIGHTS) - learns


def test_no_less_is_announced_than_the_start_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler of a small model takes more than its updates."""
    monkeypatch.setattr(device_memory, "resident", lambda: 10_000)
    program_alone = 111  # arguments, outputs that reuse nothing, and temporaries
    for staleness in (0, 1):
        monkeypatch.setattr(device_memory, "at_most", lambda: 10_000)
        without, _ = beside(staleness)
        assert "the start" not in without
        monkeypatch.setattr(device_memory, "at_most", lambda: 15_000)
        found, _ = beside(staleness)
        assert program_alone + sum(found.values()) == 15_000
        assert found.pop("the start") > 0 and found == without

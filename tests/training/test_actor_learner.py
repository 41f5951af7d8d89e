"""Memory that a language model's actors take, as it is announced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from longhaul.topologies.actor_learner import config
from longhaul.topologies.actor_learner.config import ActorConfig
from longhaul.training import actor_learner


def program(temporaries: int, outputs: int, donated: int = 0) -> Any:
    sizes = {"argument": 1, "output": outputs, "alias": donated, "temp": temporaries, "generated_code": 0}
    about = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
    return SimpleNamespace(memory_analysis=lambda: about)


@pytest.mark.parametrize(("later", "most"), [(None, 320), (program(500, 30), 530), (program(200, 30), 320)])
def test_of_first_and_later_turns_the_one_that_needs_most_counts(later: Any, most: int) -> None:
    """A later turn has a longer prompt, and at times fewer rows."""
    update, weights = program(100, 20, donated=10), 7
    shapes = SimpleNamespace(weight_bytes=weights)
    acting = SimpleNamespace(program=program(300, 20), finishing=later, shapes=shapes)
    mesh = SimpleNamespace(local_devices=[SimpleNamespace(platform="cpu")])
    assembly: Any = SimpleNamespace(updates=4, origin=SimpleNamespace(updates=0), mesh=mesh)
    for staleness, learns in ((0, 110), (1, 0)):  # in turn with learning, or beside it
        run: Any = SimpleNamespace(acting=ActorConfig(actors=1, actor_kind="thread", staleness=staleness))
        prepared: Any = SimpleNamespace(update=update, acting=acting)
        places = config.rule(run.acting, 4, 0).places
        found = actor_learner.beside(run, assembly, prepared, {})
        assert found["sampling"] == places * (most + weights) - learns

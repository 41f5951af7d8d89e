"""Environments of the user's own: kinds are told by their methods and keep the contract; a spec that lies is named."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from longhaul.envs import external, registry
from longhaul.runtime import user_modules
from longhaul.spaces import Box, Discrete
from tests.helpers import own_environments as own
from tests.helpers.environment_contract import check_environment

HERE = "tests.helpers.own_environments"


@pytest.mark.parametrize(
    ("name", "action", "agents", "limit"),
    [
        ("Corridor", Discrete(2), None, own.LIMIT),
        pytest.param("LikeGymnax", Discrete(2), None, own.LIMIT, marks=pytest.mark.slow),
        pytest.param("LikeBrax", Box((-1.0,), (1.0,)), None, 1000, marks=pytest.mark.slow),
        ("LikeJaxMARL", Discrete(2), 2, own.LIMIT),
    ],
)
def test_each_kind_on_the_device_is_made_by_its_name(name: str, action: object, agents: int | None, limit: int) -> None:
    environment = registry.make(f"{HERE}:{name}")
    assert (environment.spec.action, environment.spec.agents, environment.spec.max_steps) == (action, agents, limit)
    assert external.canonical(f"{HERE}:{name}") == f"{HERE}:{name}"
    check_environment(environment, steps=24)


def test_options_stand_behind_the_name_and_reach_the_class() -> None:
    environment = registry.make(f"{HERE}:Corridor?length=7")
    assert environment.spec.observation.shape == (7,)
    assert registry.make(f"{HERE}:Corridor?length=7") is environment
    with pytest.raises(ValueError, match=r"Corridor\?size=7: .*'size'; options are written behind the name"):
        registry.make(f"{HERE}:Corridor?size=7")


@pytest.mark.parametrize(
    ("name", "fused", "canonical"),
    [
        ("GymCorridor", False, f"single/{HERE}:GymCorridor"),
        ("GymCorridor", True, f"callback/{HERE}:GymCorridor"),
        ("PairCorridor", False, f"parallel/{HERE}:PairCorridor"),
        ("PairCorridor", True, f"parallel/{HERE}:PairCorridor"),
    ],
)
def test_those_on_the_host_get_the_name_of_their_kind(name: str, fused: bool, canonical: str) -> None:
    assert external.canonical(f"{HERE}:{name}", fused) == canonical
    assert external.canonical("cartpole", fused) == "cartpole"
    with pytest.raises(ValueError, match="stepped on the host; choose --topology actors"):
        registry.make(f"{HERE}:{name}")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere_at_all:Corridor", "nowhere_at_all can't be imported: ModuleNotFoundError.*; run from the folder"),
        (f"{HERE}:Corridr", "has no Corridr; did you mean Corridor"),
        (f"{HERE}:NOTHING", "NOTHING is a int, and no environment: it has neither spec, reset, step"),
        (f"{HERE}:broken", r"can't be made: RuntimeError: no map is loaded \(own_environments.py, line \d+\)"),
        (f"{HERE}:WordySpec", "WordySpec: its spec is a str; it must be a longhaul.types.Spec"),
        (f"{HERE}:TypoSpec", r"its spec can't be read: AttributeError: .* 'lenght' \(own_environments.py, line"),
        (f"{HERE}:FiveValues", r"step returns 5 values; it must be a pair \(state, longhaul.types.transition"),
        (f"{HERE}:Wide", r"the observation of reset is float32\[6\]; the spec says float32\[5\]"),
        (f"{HERE}:Drifting", r"the state after step\[0\] is float32\[\]; reset's is int32\[\]"),
        (f"{HERE}:Endless", "spec.max_steps is None, and episodes must end"),
        (f"{HERE}:LikeJaxMARL?sizes=(2, 3)", r"agent right sees .* agents must be alike: pad them"),
    ],
)
def test_bad_input_is_answered_in_a_line_that_names_the_part(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        registry.make(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "external_name"),
    [("my_env:Corridor", True), ("a.b:C.small?x=1", True), ("cartpole", False), ("vector/my_env:make", False),
     ("gymnax/CartPole-v1", False), ("driving/a:b", False), ("", False)],
)  # fmt: skip
def test_only_module_and_name_are_the_users_own(name: str, external_name: bool) -> None:
    assert external.is_external(name) == external_name


def test_a_module_that_changed_since_the_run_began_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "module_that_changes.py"
    module.write_text(
        "from tests.helpers.own_environments import GymCorridor\n\n\ndef make():\n    return GymCorridor()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    first = external.source("single/module_that_changes:make")
    assert first is not None and first.module == "module_that_changes"
    assert user_modules.change(first._asdict(), external.source("callback/module_that_changes:make?")) is None
    module.write_text(module.read_text() + "# another day\n")
    line = user_modules.change(first._asdict(), external.source("module_that_changes:make"))
    assert line is not None and line.startswith("module_that_changes has changed since this run began")
    assert external.source("gymnasium/module_that_changes:Late-v0") == external.source("module_that_changes:make")
    assert external.source("cartpole") is None and user_modules.change(None, first) is None
    sys.modules.pop("module_that_changes")


def test_agents_of_one_world_are_rows_and_end_alone() -> None:
    environment = registry.make(f"{HERE}:LikeJaxMARL")
    state, seen = environment.reset(jax.random.key(1))
    assert seen.shape == (2, own.LENGTH)
    step, actions = jax.jit(environment.step), np.array([0, 1], np.int32)
    for _ in range(own.LENGTH):  # the left agent stays at the wall, the right one walks to its goal
        state, _ = step(jax.random.key(0), state, actions)
    assert environment.active(state).tolist() == [True, False]

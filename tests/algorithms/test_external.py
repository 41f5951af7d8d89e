"""Algorithms of the user's own: one around ours gives our bits, stopped and resumed too; what is missing of one is a
line; its fields are flags, and run.json finds it again."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import longhaul
from longhaul.algorithms import external, ppo, registry
from longhaul.algorithms.config import LR, MINIBATCHES, IMPALAConfig, PPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.cli import flags, run_flags
from longhaul.cli.main import main
from longhaul.config import files, recipes, resolve
from longhaul.config.run import Run, from_dict, to_dict
from longhaul.networks.config import NetworkConfig
from longhaul.replay import Sizes
from longhaul.runtime import config_fields, mesh
from longhaul.runtime.config_fields import nested, setting
from longhaul.runtime.errors import FieldError, RunError
from longhaul.training import run_dir
from longhaul.types import Algorithm, Discrete, Rollout, Spec
from tests.helpers import own_environments
from tests.helpers.small_runs import make_quick

HERE = __name__
SPEC = Spec(jax.ShapeDtypeStruct((3,), jnp.float32), Discrete(2), max_steps=5)
ALONE = RunContext(updates=1, mean=mesh.identity)


@dataclass(frozen=True)
class Around:
    """PPO with fewer settings."""

    title: ClassVar[str] = "PPO of one's own"
    lr: float = LR.field(1e-3)
    num_minibatches: int | None = MINIBATCHES.field(None)
    update_epochs: int | None = setting(None, "epochs", least=1)
    network: NetworkConfig = nested(NetworkConfig(hidden_dim=8))

    def ours(self) -> PPOConfig:
        return PPOConfig(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    def make(self, spec: Spec, context: RunContext) -> Algorithm:
        return ppo.ppo(spec, self.ours(), context)

    def check(self, *, columns: int, steps: int) -> None:
        if steps > 100:
            raise FieldError("num_steps", steps, "it must be at most 100")


@dataclass(frozen=True)
class Constant:
    """Action that nothing changes; its policy is a bare array."""

    action: int = setting(1, "the action")

    def make(self, spec: Spec, context: RunContext) -> Algorithm:
        def act(policy: jax.Array, memory: Any, observation: Any, key: Any) -> Any:
            return jnp.full(observation.shape[:1], 1, jnp.int32) * policy, memory, ()

        def learn(state: jax.Array, data: Rollout, key: Any) -> Any:
            return state, {"constant/reward": context.mean(jnp.mean(data.reward))}

        return Algorithm(lambda key: jnp.int32(self.action), lambda state: state, lambda columns: (), act, learn)


@dataclass(frozen=True)
class NoMake:
    lr: float = 1e-3


@dataclass(frozen=True)
class NoDefault:
    lr: float

    def make(self, spec: Spec, context: RunContext) -> None:
        return None


@dataclass(frozen=True)
class NoPlainField(NoMake):
    table: dict[str, int] = setting(None, "a table")  # noqa: RUF009  a field, as everywhere

    def make(self, spec: Spec, context: RunContext) -> None:
        return None


@dataclass(frozen=True)
class TakenField(NoPlainField):
    table: None = None  # type: ignore[assignment]
    seed: int = setting(0, "of the run already")


@dataclass(frozen=True)
class Wrong(Constant):
    """Actions of another type, or none."""

    part: str = setting("action", "part that is wrong")

    def make(self, spec: Spec, context: RunContext) -> Any:
        right = Constant(self.action).make(spec, context)
        return {
            "all": (right.act, right.learn),
            "init": right._replace(init=lambda key: key["params"]),
            "pair": right._replace(act=lambda *given: right.act(*given)[:2]),
            "action": right._replace(act=lambda *given: (right.act(*given)[0].astype(float), (), ())),
        }[self.part]


SMALL: dict[str, Any] = {
    "num_envs": 4, "num_steps": 8, "total_steps": 8 * 32, "evaluation_episodes": 6, "block": 1, "log_interval": 1,
    "env": "tests.helpers.own_environments:Corridor",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


@pytest.mark.slow
def test_one_around_ours_has_our_bits_and_so_has_its_run_that_is_stopped_and_resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two whole runs: 6 seconds, of which most is the compiler's."""
    make_quick(monkeypatch)
    ours = longhaul.train("ppo", lr=1e-3, hidden_dim=8, runs_dir=folder, run_name="ours", **SMALL)
    stopped = longhaul.train(
        "ppo", algorithm=Around, runs_dir=folder, run_name="stopped", callback=lambda metrics: metrics["update"] > 2,
        **SMALL,
    )  # fmt: skip
    assert stopped.stopped and stopped.metrics["update"][-1] < 8
    assert main(["train", "ppo", "--runs-dir", str(folder), "--resume", "stopped"]) == 0
    found = json.loads((folder / "stopped" / "result.json").read_text())
    assert found["params_sha256"] == ours.summary["params_sha256"]
    seen = np.eye(own_environments.LENGTH, dtype=np.float32)
    np.testing.assert_array_equal(longhaul.load(folder / "stopped")(seen), ours.policy(seen))


@pytest.mark.slow
def test_the_run_keeps_module_and_digest_a_change_is_told_and_other_fields_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "algorithm_that_changes.py"
    body = f"from {HERE} import Constant as Base, dataclass, setting\n__version__ = '1'\n\n@dataclass(frozen=True)\n"
    module.write_text(body + "class Mine(Base):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "algorithm_that_changes:Mine"
    done = longhaul.train(
        "ppo", algorithm=name, action=0, runs_dir=tmp_path, run_name="run", callback=lambda metrics: True, **SMALL
    )
    stored = json.loads((done.folder / "run.json").read_text())
    assert stored["run"]["algorithm"] == {"kind": name, "action": 0}
    assert stored["modules"]["algorithm"]["module"] == "algorithm_that_changes"
    assert stored["modules"]["algorithm"]["version"] == "1" and len(stored["modules"]["algorithm"]["sha256"]) == 64
    assert longhaul.load(done)([0.0] * own_environments.LENGTH) == 0
    module.write_text(module.read_text().replace("'1'", "'2'"))
    sys.modules.pop("algorithm_that_changes")
    capfd.readouterr()
    longhaul.resume(done)
    assert "warning: algorithm_that_changes 1 -> 2 has changed since this run began" in capfd.readouterr().err
    module.write_text(body + "class Mine(Base):\n    more: int = setting(0, 'more')\n")
    sys.modules.pop("algorithm_that_changes")
    with pytest.raises(RunError, match=f"run run: --algorithm {name}: fields more do not fit; its module is not the"):
        longhaul.resume(done)
    module.unlink()
    sys.modules.pop("algorithm_that_changes")
    with pytest.raises(RunError, match=f"run run: --algorithm {name}: algorithm_that_changes can't be imported: .*run"):
        longhaul.load(done)
    assert main(["train", "ppo", "--runs-dir", str(tmp_path), "--resume", "run"]) == 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("imala", "no algorithm is named 'imala'; did you mean impala"),
        ("nothing-like-it", "no algorithm is named 'nothing-like-it'; there are ppo, impala, .* or module:name"),
        (f"{HERE}:Arounds", "has no Arounds; did you mean Around"),
        ("no_such_module:Mine", "no_such_module can't be imported"),
        (f"{HERE}:test_one", "has no test_one"),
        (f"{HERE}:SPEC", r"it has no make\(self, spec, context\)"),
        (f"{HERE}:SMALL", "it is dict, which is no dataclass; an algorithm is the class of its config"),
        ("longhaul.algorithms.ppo:ppo", "it is a function; an algorithm is the class of its config"),
        (f"{HERE}:NoMake", r"it has no make\(self, spec, context\), which returns its longhaul.types.Algorithm"),
        (f"{HERE}:NoDefault", "lr has no default; every field of an algorithm needs one"),
        (f"{HERE}:NoPlainField", r"table is dict\[str, int\]; a field with a setting is an int, float, str or bool"),
        (f"{HERE}:TakenField", "TakenField: seed is a setting of the run already; rename the field"),
    ],
)
def test_a_name_that_is_no_algorithm_is_one_line(name: str, says: str) -> None:
    with pytest.raises(RunError, match=says) as caught:
        recipes.with_algorithm(recipes.recipe("ppo"), name)
    assert "\n" not in str(caught.value)


def test_a_class_within_a_function_is_no_name_that_a_resume_finds() -> None:
    @dataclass(frozen=True)
    class Inner(Constant):
        pass

    with pytest.raises(RunError, match=r"algorithm .*Inner: it stands within a function"):
        recipes.with_algorithm(recipes.recipe("ppo"), Inner)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("all", "make returns tuple; it must return a longhaul.types.Algorithm of init, policy, memory, act, learn"),
        ("init", "init can't be traced by JAX: "),
        ("pair", r"act returns tuple; it must return \(action, memory, extras\)"),
        ("action", r"of 2 observations act returns actions float32\[2\]; the environment takes int32\[2\]"),
    ],
)
def test_functions_that_do_not_fit_are_named_before_the_run_has_a_folder(part: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{HERE}:Wrong: {says}") as caught:
        longhaul.train("ppo", algorithm=Wrong, part=part, runs_dir=tmp_path, **SMALL)
    assert "\n" not in str(caught.value) and not list(tmp_path.glob("*/*"))


def test_its_policy_may_be_anything_and_its_learning_is_its_own() -> None:
    made = registry.make(SPEC, Constant(), ALONE)
    state = made.init(jax.random.key(0))
    assert made.policy(state).params == 1
    action, _, _ = made.act(made.policy(state), (), jnp.zeros((4, 3)), None)
    assert action.tolist() == [1] * 4
    with pytest.raises(ValueError, match="Constant is an algorithm of your own, whose network is not known here"):
        registry.network(SPEC, Constant())
    with pytest.raises(ValueError, match="Constant is of your own, and this is for PPO, IMPALA"):
        registry.on_policy(Constant())  # type: ignore[arg-type]


def test_its_checks_count_and_its_minibatches_follow_from_the_batch() -> None:
    own, sizes = Around(), Sizes(1, 4, 8)
    registry.check(own, sizes)  # type: ignore[arg-type]
    with pytest.raises(FieldError, match="num_steps is 128; it must be at most 100"):
        registry.check(own, sizes._replace(steps=128))  # type: ignore[arg-type]
    with pytest.raises(FieldError, match="lr is -1"):
        registry.check(config_fields.replaced(own, lr=-1.0), sizes)  # type: ignore[arg-type]
    run = recipes.with_algorithm(recipes.recipe("ppo"), Around)
    resolved = resolve.resolve(resolve.changed(run, {"num_steps": 64}))
    assert resolved.algorithm.num_minibatches == resolved.algorithm.update_epochs == 4
    with pytest.raises(RunError, match="--lr-rule is linear; Constant has no lr; leave it out"):
        resolve.resolve(resolve.changed(recipes.with_algorithm(run, Constant), {"lr_rule": "linear"}))


def test_its_fields_are_flags_and_files_and_run_json_name_it(tmp_path: Path, capsys: Any) -> None:
    assert main(["train", "ppo", "--algorithm", f"{HERE}:Around", "--help-all"]) == 0
    shown = capsys.readouterr().out
    assert "PPO of one's own" in shown and "--hidden-dim" in shown and "--clip-eps" not in shown
    words = ["--algorithm", f"{HERE}:Around", "--lr", "0.5", "--hidden-dim", "16"]
    recipe = run_flags.with_algorithm(recipes.recipe("ppo"), words)
    run = run_flags.chosen(recipe, flags.parse("train ppo", "", run_flags.table(recipe), words))
    assert run.algorithm == Around(lr=0.5, network=NetworkConfig(hidden_dim=16))  # type: ignore[comparison-overlap]
    assert from_dict(Run, json.loads(json.dumps(to_dict(run)))) == run
    path = tmp_path / "run.yaml"
    path.write_text(files.render(run))
    again = run_flags.with_algorithm(recipes.recipe("ppo"), [f"--config={path}"])
    assert resolve.changed(again, files.read(files.load(path), again, path)) == run
    assert run_dir.sources(run)["algorithm"].module == HERE


def test_ours_are_chosen_by_their_names_and_the_recipes_own_keeps_its_values() -> None:
    cartpole = recipes.recipe("cartpole")
    assert recipes.with_algorithm(cartpole, "ppo") == cartpole
    assert recipes.with_algorithm(cartpole, "impala").algorithm == IMPALAConfig()
    assert external.name_of(cartpole.algorithm) == "ppo" and external.load("ppo") == PPOConfig()
    assert not external.is_own(PPOConfig) and external.is_own(Around)

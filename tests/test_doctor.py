"""The doctor: what it reads from real compiled programs, and what it says of sick and healthy runs and recipes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from longhaul import cli, feed, footprint, health, learners, recipes, telemetry, training, verdicts, watch
from longhaul import mesh as meshes
from longhaul import run as runs
from longhaul.algorithms import ppo
from longhaul.folders import save_run
from longhaul.run import Named, Run, resolve
from longhaul.scaling import agreement, checks, compiled, doctor
from longhaul.scaling.compiled import Crossing
from longhaul.scaling.subject import Subject, fresh_cache, smaller, subject
from longhaul.verdicts import Check
from tests.small_runs import small

EVERYWHERE, SPLIT = PartitionSpec(), PartitionSpec(meshes.DATA)


def text_of(function: Callable[..., Any], *arguments: Any) -> str:
    return jax.jit(function).lower(*arguments).compile().as_text()


def on_two(function: Callable[..., Any], *, out: PartitionSpec = EVERYWHERE) -> Callable[..., Any]:
    """`function` of an array that is split over two devices."""
    return meshes.per_shard(function, meshes.make_mesh(2), (SPLIT,), out)


# ------------------------------------------------------------------------------------------------- compiled programs


def test_a_mean_is_one_all_reduce_of_its_bytes() -> None:
    text = text_of(on_two(lambda x: meshes.mean_over_data(jnp.sum(x, axis=0))), jnp.ones((4, 7)))
    assert compiled.crossings(text) == [Crossing("all-reduce", 7 * 4, (), (0, 1))]
    assert compiled.host_calls(text) == []


def test_what_stands_in_loops_counts_with_their_trips() -> None:
    """Two loops of known lengths in one of unknown length; XLA unrolls none of these."""

    def steps(x: jax.Array, n: jax.Array) -> jax.Array:
        def inner(y: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(meshes.mean_over_data(jnp.sin(y) @ y)), None

        def outer(y: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.scan(inner, y, None, length=5)[0], None

        return jax.lax.fori_loop(0, n, lambda i, y: jax.lax.scan(outer, y, None, length=7)[0], x)

    program = meshes.per_shard(steps, meshes.make_mesh(2), (EVERYWHERE, EVERYWHERE), EVERYWHERE)
    (found,) = compiled.crossings(text_of(program, jnp.eye(6), jnp.int32(3)))
    assert found == Crossing("all-reduce", 6 * 6 * 4, (None, 7, 5), (0, 1))
    assert found.times() == 35


def test_each_kind_of_collective_is_found_with_the_bytes_of_its_result() -> None:
    x = jnp.ones((4, 2, 3))
    gathered = text_of(on_two(lambda x: jax.lax.all_gather(x[0], meshes.DATA)), x)
    assert [(each.operation, each.bytes) for each in compiled.crossings(gathered)] == [("all-gather", 2 * 6 * 4)]
    swapped = text_of(on_two(lambda x: jax.lax.ppermute(x, meshes.DATA, [(0, 1), (1, 0)]), out=SPLIT), x)
    assert [(each.operation, each.bytes) for each in compiled.crossings(swapped)] == [("collective-permute", 48)]
    dealt = text_of(on_two(lambda x: jax.lax.all_to_all(x[0], meshes.DATA, 0, 0, tiled=True), out=SPLIT), x)
    assert "all-to-all" in {each.operation for each in compiled.crossings(dealt)}


def test_a_call_of_the_host_is_found_wherever_it_stands() -> None:
    def told(x: jax.Array) -> jax.Array:
        def step(i: jax.Array, y: jax.Array) -> jax.Array:
            jax.debug.callback(lambda v: None, y[0])
            return jnp.sin(y)

        return jax.lax.fori_loop(0, 9, step, x)

    def asked(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.lax.cond(x[0] > 0, lambda v: jax.pure_callback(np.sin, shape, v), lambda v: v, x)

    for function in (told, asked):
        (name,) = compiled.host_calls(text_of(function, jnp.ones(3)))
        assert "callback" in name
    assert compiled.host_calls(text_of(lambda x: jnp.sort(x) @ x, jnp.ones(30))) == []


GPU = """\
HloModule jit_f, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %y = f32[] add(%x, %x)
}

%inside (p: f32[8]) -> f32[16] {
  %p = f32[8]{0} parameter(0)
  ROOT %g = f32[16]{0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}
}

%body (t: (s32[], bf16[1024,4])) -> (s32[], bf16[1024,4]) {
  %t = (s32[], bf16[1024,4]{1,0:T(8,128)}) parameter(0)
  %v = bf16[1024,4]{1,0} get-tuple-element(%t), index=1
  %ar = bf16[1024,4]{1,0} all-reduce-start(%v), to_apply=%add
  %done = bf16[1024,4]{1,0} all-reduce-done(%ar)
  %home = bf16[1024,4]{1,0:S(5)} copy-start(%done)
  ROOT %out = (s32[], bf16[1024,4]) tuple(%t, %done)
}

%condition (t: (s32[], bf16[1024,4])) -> pred[] {
  %t = (s32[], bf16[1024,4]) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: f32[8], b: (s32[], bf16[1024,4])) -> f32[16] {
  %a = f32[8]{0} parameter(0)
  %b = (s32[], bf16[1024,4]) parameter(1)
  %w = (s32[], bf16[1024,4]) while(%b), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"},"other":1}
  %ags = ((f32[8]{0}), f32[16]{0}) async-start(%a), calls=%inside
  %agd = f32[16]{0} async-done(%ags), calls=%inside
  %pair = (f32[8]{0}, f32[16]{0}) all-gather-start(%a), dimensions={0}
  %s = (f32[8]{0}, u32[], token[]) send(%a, %tok), channel_id=3, is_host_transfer=true
  ROOT %r = f32[16]{0} all-gather-done(%pair)
}
"""
"""As XLA writes programs for GPUs: operations are started and awaited apart, and may stand in a computation apart."""


def test_operations_that_are_started_apart_count_once() -> None:
    assert compiled.crossings(GPU) == [
        Crossing("all-reduce", 1024 * 4 * 2, (12,)),
        Crossing("all-gather", 64, (), (0, 1)),
        Crossing("all-gather", 64, ()),
    ]
    assert compiled.host_calls(GPU) == ["copy-start to the host's memory", "send of the host"]


@pytest.mark.parametrize(
    ("groups", "first", "over"),
    [
        ("{{0,2},{1,3}}", (0, 2), True),
        ("{{0,1},{2,3}}", (0, 1), False),
        ("[2,2]<=[4]", (0, 1), False),
        ("[2,2]<=[2,2]T(1,0)", (0, 2), True),
        ("[1,4]<=[4]", (0, 1, 2, 3), True),
        ("mesh['a'=2,'b'=2] {'a'}", (0, 2), True),
        ("mesh['a'=2,'b'=2] {'b'}", (0, 1), False),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", (0, 1), False),
        ("mesh['a'=1,'b'=2,'c'=2], device_ids=([2,2]T(1,0)) {'b','c'}", (0, 2, 1, 3), True),
        ("{}", (), True),  # all
    ],
)
def test_who_meets_in_a_collective_is_read(groups: str, first: tuple[int, ...], over: bool) -> None:
    """And whether they are of different shards, where two devices side by side make one."""
    line = f"%r = f32[2]{{0}} all-reduce(%a), channel_id=1, replica_groups={groups}, to_apply=%add"
    (found,) = compiled.crossings(f"ENTRY %main (a: f32[2]) -> f32[2] {{\n  ROOT {line}\n}}\n")
    assert found == Crossing("all-reduce", 8, (), first)
    assert found.over_shards(2) is over
    assert found.over_shards(1)


def test_sizes_of_types() -> None:
    assert compiled.size("(f32[4]{0}, pred[], /*index=2*/bf16[2,3]{1,0:T(8,128)(2,1)})") == 16 + 1 + 12
    assert compiled.size("f8e4m3fn[10]") == 10
    assert compiled.size("(s4[3], token[], u32[])") == 2 + 4


# ------------------------------------------------------------------------------------------------- programs of recipes


def tiny(**changes: Any) -> Run:
    """CartPole at a size that compiles and trains in seconds."""
    config = ppo.Config(hidden_dim=8, num_layers=1, num_minibatches=2, update_epochs=3, lr=3e-3)
    settings: dict[str, Any] = {
        "num_envs": 8, "num_steps": 32, "total_steps": 256 * 400, "devices": 2, "block": 4, "log_interval": 4,
        "algorithm": config,
    }  # fmt: skip
    return Run("tiny", Named("cartpole"), **(settings | changes))


@pytest.fixture(scope="module")
def pair() -> Subject:
    """On two devices."""
    return subject(resolve(tiny()))


@pytest.fixture(scope="module")
def alone() -> Subject:
    return subject(resolve(tiny(devices=1)))


def test_an_update_sends_its_gradients_once_a_step_of_the_optimiser(pair: Subject) -> None:
    found = checks.crossings(pair)
    assert found.verdict == verdicts.PASS
    assert found.figures["gradients"] == 2 * 3
    assert found.figures["gradient_bytes"] == 2 * 3 * 4 * pair.parameters
    assert found.figures["operations"] == ["all-reduce"]


def test_what_else_crosses_devices_fails(pair: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    real = compiled.crossings(pair.text())
    for extra in (Crossing("all-gather", 64, (None,)), Crossing("all-reduce", 10**6, (None, 3))):
        monkeypatch.setattr(compiled, "crossings", lambda text, extra=extra: [*real, extra])
        assert checks.crossings(pair).verdict == verdicts.FAIL
    monkeypatch.setattr(compiled, "crossings", lambda text: real[:1])
    assert checks.crossings(pair).verdict == verdicts.FAIL


def test_a_program_stays_on_its_devices_and_fits(pair: Subject) -> None:
    home = checks.host(pair)
    assert home.verdict == verdicts.PASS
    rows = pair.executable.out_info[1]
    assert home.figures["metrics_bytes"] == 4 * (4 * (len(rows) - 1) + 1), "of each update: float32, and one bool"
    need = checks.memory(pair)
    assert need.verdict == verdicts.PASS
    assert need.figures["needed"] > 4 * 3 * pair.parameters, "parameters and two moments"


def test_memory_that_is_not_there_fails(pair: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = checks.memory(pair).figures["needed"]
    for total, verdict in ((needed // 2, verdicts.FAIL), (int(needed * 1.1), verdicts.WARN)):
        monkeypatch.setattr(footprint, "memory_of", lambda device, total=total: 2 * total)
        assert checks.memory(pair).verdict == verdict


def test_the_same_seed_gives_the_same_parameters_and_another_others(pair: Subject) -> None:
    found, seconds = checks.determinism(pair)
    assert found.verdict == verdicts.PASS and seconds > 0.0
    assert found.figures["digests"][0] == pair.digest(pair.updates(pair.start(pair.run.seed), checks.SHORT)[0])
    assert found.figures["digests"][0] != pair.digest(pair.updates(pair.start(pair.run.seed + 1), checks.SHORT)[0])


def test_a_sum_that_differs_from_run_to_run_fails(pair: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = iter((0, 1, 0))
    monkeypatch.setattr(Subject, "start", lambda self, seed: self.begin(jax.random.key(next(seeds))))
    assert checks.determinism(pair)[0].verdict == verdicts.FAIL


def test_times_are_shares(pair: Subject, alone: Subject) -> None:
    reduced = checks.all_reduce(pair, 1.0)
    assert 0.0 < reduced.figures["share"] == pytest.approx(reduced.figures["seconds"] * 6)
    assert checks.all_reduce(pair, 1e-9).verdict == verdicts.FAIL
    assert checks.all_reduce(alone, 1.0).verdict == verdicts.SKIP
    stalled = checks.stalls(pair, 1.0, calls=3)
    assert 0.0 <= stalled.figures["between_calls"] <= 1.0


def test_a_device_that_waits_for_the_host_is_seen(alone: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that sleeps far longer than a call takes leaves the device idle for most of the time."""
    import time

    take = checks.Sums.take

    def slow(self: Any) -> Any:
        time.sleep(0.4)
        return take(self)

    monkeypatch.setattr(checks.Sums, "take", slow)
    assert checks.stalls(alone, 1.0, calls=5).verdict == verdicts.FAIL


def test_one_device_and_two_learn_the_same(alone: Subject, pair: Subject) -> None:
    found = checks.convergence(alone, pair, seeds=5, updates=24)
    assert found.verdict == verdicts.PASS
    assert found.figures["gained"] > 0.0
    assert np.shape(found.figures["curves"]) == (2, 5, 24)


def test_devices_that_learn_something_else_fail(alone: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second side is given a curve that stays where it began."""
    real = agreement.curve

    def curve(made: Subject, seed: int, updates: int) -> np.ndarray:
        found = real(made, seed, updates)
        return found if made is alone else np.full_like(found, 10.0 + 0.1 * seed)

    monkeypatch.setattr(agreement, "curve", curve)
    found = checks.convergence(alone, alone._replace(parameters=1), seeds=5, updates=24)
    assert found.verdict == verdicts.FAIL
    assert found.figures["chance"] == pytest.approx(2 / math.comb(10, 5))


def test_the_chance_of_a_permutation_is_exact() -> None:
    """Of 20 ways to deal 3 and 3, two are as extreme as 1 2 3 against 4 5 6."""
    assert agreement.permutation_chance([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]) == pytest.approx(2 / 20)
    assert agreement.permutation_chance([1.0, 2.0], [2.0, 1.0]) == 1.0
    rng = np.random.default_rng(0)
    chances = [agreement.permutation_chance(*rng.normal(size=(2, 5)).tolist()) for _ in range(400)]
    assert np.mean(np.array(chances) <= 0.05) < 0.09, "no more often than it says"


@pytest.mark.slow
def test_a_learning_rate_of_zero_leaves_the_policy_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a rollout that keeps another observation than the policy saw is found: HackMatrix's own trainer did that."""
    run = resolve(tiny(devices=1))
    assert checks.still(run) == Check(
        "lr 0", verdicts.PASS, "approx_kl 0.0e+00", "< 1e-06", "", {"approx_kl": 0.0}
    )  # fmt: skip
    made = runs.collector

    def mixed_up(*arguments: Any, **keywords: Any) -> Any:
        inner = made(*arguments, **keywords)

        def collect(*given: Any) -> Any:
            carry, data, scores = inner.collect(*given)
            return carry, data._replace(observation=jnp.roll(data.observation, -1, axis=0)), scores

        return inner._replace(collect=collect)

    monkeypatch.setattr(runs, "collector", mixed_up)
    found = checks.still(run)
    assert found.verdict == verdicts.FAIL
    assert found.figures["approx_kl"] > checks.COARSE * checks.STILL


def test_the_doctors_cache_is_its_own_and_empty() -> None:
    before = jax.config.jax_compilation_cache_dir
    with fresh_cache() as folder:
        assert list(folder.iterdir()) == []
        assert jax.config.jax_compilation_cache_dir == str(folder) != before
    assert not folder.exists()
    assert jax.config.jax_compilation_cache_dir == before


def test_sizes_and_the_learning_rate_are_said() -> None:
    found, resolved = checks.sizes(tiny(num_envs=12, devices=None))
    assert found.verdict == verdicts.PASS and resolved is not None
    assert found.figures == {"steps": 12 * 32, "devices": [1, 2, 4]}
    found, resolved = checks.sizes(tiny(num_envs=7))
    assert (found.verdict, resolved) == (verdicts.FAIL, None)
    assert "multiple of 2" in found.remedy
    grown = dataclasses.replace(recipes.recipe("cartpole"), num_envs=256, devices=2)
    assert checks.rate(resolve(grown)).verdict == verdicts.WARN
    ruled = dataclasses.replace(grown, lr_rule="sqrt", base_batch=2048)
    said = checks.rate(resolve(ruled))
    assert said.verdict == verdicts.PASS
    assert said.figures["lr"] == pytest.approx(2.5e-3 * math.sqrt(8))
    assert said.figures["batch"] == 8 * 2048


ON_POLICY = [
    n for n in recipes.RECIPES if isinstance(recipes.recipe(n).algorithm, learners.OnPolicy) and n != "brax-ant"
]
"""Without the one whose environment is of a suite that need not be installed."""


@pytest.mark.parametrize("name", ON_POLICY)
def test_every_recipe_has_a_smaller_self(name: str) -> None:
    for devices in (1, 2):
        run = resolve(smaller(recipes.recipe(name), devices=devices))
        assert (run.devices, run.block) == (devices, 2)
        assert run.num_envs * run.num_steps <= 4096


@pytest.mark.slow
def test_collectives_are_counted_in_another_process_where_one_device_is_all() -> None:
    found = doctor.of_two_shards(tiny(devices=1))
    assert (found.verdict, found.figures["gradients"]) == (verdicts.PASS, 6)
    assert found.figures["devices"] == 2


# ------------------------------------------------------------------------------------------------------- the command


def test_who_learns_from_a_replay_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "pendulum-sac"]) == 2
    assert (
        "doctor pendulum-sac: SAC learns from a replay, and this is for algorithms without" in capsys.readouterr().err
    )


@pytest.fixture
def longhaul(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(words) -> (exit code, stdout, stderr) of the command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(list(words))
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_a_learning_rate_of_ten_is_a_run_that_fails(longhaul: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A policy that no longer looks: found while it trains, by the doctor afterwards, and on the report's page."""
    ill = ppo.Config(hidden_dim=8, num_minibatches=2, update_epochs=1, lr=10.0)
    folder = Path("runs/ill")
    folder.mkdir(parents=True)
    training.train(small(algorithm=ill), folder, resumed=False)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert any("entropy is" in line for line in said)
    assert {finding.check for finding in watch.read(folder)} >= {"entropy"}
    assert "hardly explores" in (folder / "report.html").read_text()
    code, out, _ = longhaul("doctor", "ill", "--json", "found.json")
    assert code == cli.FAILED
    found = json.loads(Path("found.json").read_text())
    by_name = {check["check"]: check for check in found["checks"]}
    assert found["verdict"] == "fail"
    assert by_name["entropy"]["verdict"] == "fail" and by_name["entropy"]["remedy"]
    assert by_name["records"]["verdict"] == "pass"
    assert any(line.startswith("entropy") and "fail" in line for line in out.splitlines())


def _finished(folder: Path, records: list[dict[str, Any]]) -> None:
    """A run's files without a run."""
    folder.mkdir(parents=True)
    save_run(folder, small(), {})
    sink = telemetry.jsonl(folder / "metrics.jsonl")
    for record in records:
        sink.write(record)
    sink.close()


def _record(update: int, **changes: float) -> dict[str, float]:
    steps = 128 * update
    healthy = {
        "ppo/lr": 3e-3, "ppo/entropy": 0.5, "ppo/approx_kl": 0.01, "ppo/clip_fraction": 0.1, "ppo/value_loss": 1.0,
        "episode/count": 5.0, "episode/return": float(update), "episode/length": 20.0, "sps": 1e4,
    }  # fmt: skip
    return {"update": update, "env_steps": steps, "agent_steps": steps, "wall_seconds": 1.0} | healthy | changes


def test_exit_codes_of_runs(longhaul: Any) -> None:
    _finished(Path("runs/well"), [_record(update) for update in range(1, 61)])
    code, out, _ = longhaul("doctor", "well")
    assert code == 0 and " fail" not in out and " warn" not in out
    _finished(Path("runs/was"), [_record(u, **{"ppo/approx_kl": 0.3 * (u < 40)}) for u in range(1, 61)])
    code, out, _ = longhaul("doctor", "was")
    assert code == 0 and "1 warn" in out, "what is over warns"
    _finished(Path("runs/is"), [_record(u, **{"ppo/approx_kl": 0.3 * (u > 40)}) for u in range(1, 61)])
    code, out, _ = longhaul("doctor", "is", "--json", "-")
    plain = json.loads(out)
    assert code == 1 and [c["check"] for c in plain["checks"] if c["verdict"] == "fail"] == ["kl"]
    _finished(Path("runs/twice"), [_record(u) for u in (1, 2, 2, 3)])
    assert longhaul("doctor", "twice")[0] == 1
    _finished(Path("runs/new"), [])
    code, out, _ = longhaul("doctor", "new")
    assert code == 0 and " skip" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "name a run or a recipe"),
        (("cartpol",), "did you mean the recipe cartpole"),
        (("cartpole", "--seeds", "2"), "--seeds is 2"),
        (("cartpole", "--updates", "0"), "--updates is 0"),
        (("cartpole", "--json", "nowhere/x.json"), "--json"),
    ],
)
def test_bad_words_are_one_line_and_exit_code_2(longhaul: Any, words: tuple[str, ...], said: str) -> None:
    code, out, err = longhaul("doctor", *words)
    assert (code, out, err.count("\n")) == (cli.BAD_INPUT, "", 1)
    assert said in err


def test_a_recipe_that_passes(longhaul: Any) -> None:
    sizes = ("--num-envs", "4", "--num-steps", "32", "--hidden-dim", "4", "--mesh", "data=2")
    code, out, _ = longhaul("doctor", "cartpole", "--quick", *sizes, "--json", "found.json")
    found = json.loads(Path("found.json").read_text())
    assert code == 0, out
    assert [check["check"] for check in found["checks"]] == [
        "sizes", "learning rate", "compilation", "memory", "host copies", "collectives",
    ]  # fmt: skip
    by_name = {check["check"]: check for check in found["checks"]}
    assert {check["verdict"] for check in found["checks"]} <= {"pass", "warn"}
    assert by_name["compilation"]["figures"]["cached"], "the second time it came from the cache"
    assert found["run"]["num_envs"] == 4


def test_sizes_that_can_not_work_fail(longhaul: Any) -> None:
    code, out, _ = longhaul("doctor", "cartpole", "--quick", "--num-envs", "7", "--mesh", "data=2")
    assert code == cli.FAILED
    assert "multiple of 2" in out


def test_every_health_check_has_words_and_a_verdict() -> None:
    assert set(doctor.WORDS) == set(health.CHECKS)
    found = doctor.examine(small(), [_record(update) for update in range(1, 61)])
    assert [check.name for check in found] == list(health.CHECKS)
    spec = feed.spec(small())
    assert watch.least_entropy(spec.action) == pytest.approx(0.02 * math.log(2))

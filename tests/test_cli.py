"""The command line: what each word means, what each end says, and that nothing is left behind by bad input."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import pytest

from longhaul import cli, commands, flags, meanings, printing, recipes, settings, training
from longhaul.envs import suites
from longhaul.folders import save_run
from longhaul.run import Driving, Named, Run, resolve, to_dict
from tests import fixtures_logs

ROOT = Path(__file__).resolve().parent.parent

Result = tuple[int, str, str]


@pytest.fixture(autouse=True)
def _started() -> None:
    """JAX with conftest's devices, before a command may ask for others."""
    jax.devices()


@pytest.fixture
def longhaul(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(words) -> (exit code, stdout, stderr) of the command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Result:
        code = cli.main(list(words))
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The Runs that `longhaul train` would train, of which nothing is trained."""
    runs: list[Run] = []

    def train(run: Run, folder: Path, *, resumed: bool, source: Any = None) -> training.Outcome:
        runs.append(run)
        return training.Outcome(training.STOPPED, None)

    monkeypatch.setattr(training, "train", train)
    return runs


def in_process(folder: Path, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "longhaul", *words], cwd=folder, env=environment(), capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def assert_refused(result: Result, *phrases: str) -> None:
    code, out, err = result
    assert code == 2, (out, err)
    assert err.startswith("longhaul: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err
    for phrase in phrases:
        assert phrase in err


# ------------------------------------------------------------------------------------------------------- bad input

FULL = "the disk is full; make room, then try again or --resume the run"

BAD = [
    ("frobnicate", ["no command 'frobnicate'"]),
    ("trian cartpole", ["did you mean train?"]),
    ("--verson", ["no flag '--verson'; did you mean --version?"]),
    ("data", ["name what to do with the data; there are longhaul data inspect"]),
    ("data inspekt x", ["no command 'inspekt'", "longhaul data inspect PATH"]),
    ("data inspect", ["which logs?"]),
    ("train", ["name a recipe first", "cartpole, impala-cartpole"]),
    ("train --seed 1 cartpole", ["name a recipe first"]),
    ("train cartpol", ["no recipe is named 'cartpol'", "did you mean cartpole or"]),
    ("train cartpole --total-step 4", ["no flag --total-step; did you mean --total-steps?"]),
    ("train cartpole --sede=4", ["no flag --sede; did you mean --seed"]),
    ("train cartpole --data x", ["longhaul train cartpole has no flag --data"]),
    ("train driving --env cartpole", ["longhaul train driving has no flag --env"]),
    ("train cartpole 7", ["'7' is one word too many"]),
    ("train cartpole --num-envs abc", ["--num-envs is 'abc'; it must be a whole number"]),
    ("train cartpole --num-envs 1.5", ["--num-envs is '1.5'; it must be a whole number"]),
    ("train cartpole --num-envs inf", ["--num-envs is 'inf'; it must be a whole number"]),
    ("train cartpole --lr nan", ["--lr is 'nan'; it must be a finite number"]),
    ("train cartpole --lr", ["--lr has no value; it must be a finite number"]),
    ("train cartpole --lr --seed 1", ["--lr has no value"]),
    ("train cartpole --lr=", ["--lr has no value"]),
    ("train cartpole --anneal=yes", ["--anneal takes no value; write --anneal or --no-anneal"]),
    ("train cartpole --torso mpl", ["--torso is 'mpl'; it must be one of mlp, deepset,"]),
    ("train cartpole --topology sebulba", ["--topology is 'sebulba'; it must be one of fused, actors, central"]),
    ("train cartpole --num-envs 0", ["--num-envs is 0; it must be at least 1"]),
    ("train cartpole --num-envs -4", ["--num-envs is -4; it must be at least 1"]),
    ("train cartpole --num-steps 0", ["--num-steps is 0"]),
    ("train cartpole --keep 0", ["--keep is 0"]),
    ("train cartpole --seed -1", ["--seed is -1"]),
    ("train cartpole --num-minibatches 7", ["--num-minibatches is 7, which does not divide", "choose a divisor"]),
    ("train cartpole --total-steps 100", ["--total-steps is 100", "2048 (num_envs x agents x num_steps)"]),
    ("train cartpole --gamma 1.5", ["--gamma is 1.5; it must lie in 0 to 1"]),
    ("train cartpole --save-interval 0", ["--save-interval is 0"]),
    ("train cartpole --save-interval-minutes 0", ["--save-interval-minutes is 0"]),
    ("train cartpole --mesh data", ["--mesh is 'data'; it must be data=N"]),
    ("train cartpole --mesh data=0", ["--mesh is 'data=0'; it must be data=N"]),
    ("train cartpole --mesh data=2,model=0", ["--mesh is 'data=2,model=0'", "N and M at least 1"]),
    ("train cartpole --mesh model=2 --hidden-dim 9", ["--mesh is data=1,model=2", "can be split into 2 parts"]),
    ("train cartpole --mesh dta=2", ["--mesh is 'dta=2'"]),
    ("train cartpole --mesh data=5", ["5 devices can't share evenly"]),
    ("train cartpole --mesh data=32", ["32 devices"]),
    ("train ppo --env cartpol", ["no environment is named 'cartpol'", "did you mean cartpole?"]),
    ("train cartpole --run-name ../x", ["--run-name is '../x'"]),
    ("train cartpole --runs-dir file.txt", ["file.txt", "File exists"]),
    ("train cartpole --runs-dir file.txt/runs", ["file.txt/runs", "Not a directory"]),
    ("train cartpole --resume nobody", ["no run 'nobody' in runs"]),
    ("train driving --agents 0", ["--agents is 0; it must be at least 1"]),
    ("train driving --scenarios 0", ["--scenarios is 0"]),
    ("train driving --horizon 1", ["--horizon is 1"]),
    ("train driving --waypoints 50", ["--waypoints is 50; it must be at most 20"]),
    ("train driving --data", ["--data has no value"]),
    ("train driving --data a --data b", ["--data is given twice"]),
    ("train driving --data missing.json", ["missing.json: no such file or folder"]),
    ("train driving --data empty", ["empty: no driving logs in this folder"]),
    ("train driving --data *.xyz", ["*.xyz: no driving logs match"]),
    ("train driving --terminations crash", ["--terminations is 'crash'; it must be one of collision, offroad"]),
    ("evaluate", ["which run?", "longhaul evaluate RUN"]),
    ("evaluate nobody", ["no run 'nobody' in runs"]),
    ("evaluate nobody --policy best", ["--policy is 'best'; it must be one of run, untrained, idm, log, constant"]),
    ("evaluate damaged", ["damaged/run.json can't be read"]),
    ("evaluate future", ["future/run.json has format 99, and this"]),
    ("train cartpole --resume future", ["has format 99"]),
    ("train cartpole --run-name damaged", ["run 'damaged' exists in runs", "--resume damaged"]),
    ("evaluate cartpole --policy idm", ["--policy is 'idm', a driver, and run cartpole is cartpole"]),
    ("evaluate cartpole --episodes 0", ["--episodes is 0"]),
    ("evaluate cartpole", ["runs/cartpole has no checkpoint yet"]),
    ("evaluate cartpole --json nowhere/x.json", ["--json is 'nowhere/x.json'"]),
    ("render --out x.gif", ["whose drive?"]),
    ("render cartpole", ["where to? give --out"]),
    ("render cartpole --out x.bmp", ["--out is 'x.bmp'; its suffix must be one of .gif, .mp4, .html, .png"]),
    ("render cartpole --out x.gif", ["only driving can be drawn, and run cartpole is cartpole"]),
    ("data inspect missing.json", ["missing.json: no such file or folder"]),
    ("data inspect empty", ["empty: no driving logs in this folder"]),
    ("status", ["which run? longhaul status RUN"]),
    ("status nobody", ["no run 'nobody' in runs"]),
    ("recipes now", ["'now' is one word too many"]),
    ("train cartpole --resume cartpole --seed 9", ["--seed is 9, and run cartpole has 0; leave --seed out"]),
    ("train pendulum --resume cartpole", ["run cartpole is of recipe cartpole, and pendulum is asked for"]),
    ("train cartpole --resume cartpole --run-name b", ["--run-name and --resume cartpole are both given"]),
]


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with what bad input may name: an empty folder, a file, runs that are damaged, of another format, new."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("not a log\n")
    for name, text in (("damaged", '{"format": 1, "ru'), ("future", '{"format": 99}')):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text(text)
    (tmp_path / "runs" / "cartpole").mkdir()
    save_run(tmp_path / "runs" / "cartpole", resolve(recipes.recipe("cartpole")), {})
    return tmp_path


@pytest.mark.parametrize(("words", "phrases"), BAD, ids=[words or "nothing" for words, _ in BAD])
def test_bad_input_is_one_line_and_changes_nothing(
    longhaul: Any, workplace: Path, words: str, phrases: Sequence[str]
) -> None:
    before = tree(workplace)
    result = longhaul(*words.split())
    assert_refused(result, *phrases)
    assert result[1] == ""
    assert tree(workplace) == before


@pytest.mark.parametrize("words", ["train driving --data {}", "render --policy log --out x.gif --data {}"])
@pytest.mark.parametrize("damage", ["foreign", "truncated", "flipped"])
def test_a_log_that_cannot_be_read_leaves_no_run(longhaul: Any, tmp_path: Path, words: str, damage: str) -> None:
    file = fixtures_logs.write_all(fixtures_logs.make_log(), tmp_path)["womd-example"]
    data = file.read_bytes()
    flipped = data[:999] + bytes([data[999] ^ 4]) + data[1000:]
    file.write_bytes({"foreign": b"GIF89a" + data, "truncated": data[:-9], "flipped": flipped}[damage])
    result = longhaul(*words.format(file.name).split())
    assert_refused(result, file.name)
    assert result[1] == "", "no run's name was printed"
    assert not (tmp_path / "runs").exists()


def test_debug_shows_the_traceback_and_the_line(longhaul: Any) -> None:
    code, _, err = longhaul("train", "cartpole", "--num-envs", "0", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert err.splitlines()[-1] == "longhaul: error: --num-envs is 0; it must be at least 1"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RuntimeError("the device\n  is gone"), 1, "RuntimeError: the device is gone"),
        (OSError(2, "No such file or directory", "runs/x"), 2, "runs/x: No such file or directory"),
        (OSError(2, "No such file or directory"), 2, "No such file or directory"),
        (OSError(28, "No space left on device", "runs/x"), 2, f"runs/x: {FULL}"),
        (OSError(28, "No space left on device"), 2, FULL),
        (ValueError("bad \x1b[31mword"), 2, "bad ?[31mword"),
        (ValueError("x" * 2000), 2, "x" * cli.LONGEST + " ..."),
        (KeyboardInterrupt(), 1, "interrupted; nothing was saved"),
        (KeyError("k"), 1, "KeyError: 'k'"),
        (AssertionError(), 1, "AssertionError"),
    ],
)
def test_what_goes_wrong_decides_the_exit_code(
    longhaul: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    def fail(words: Sequence[str]) -> int:
        raise error

    monkeypatch.setattr(commands, "show_envs", fail)
    assert longhaul("envs") == (code, "", f"longhaul: error: {line}\n")


# ------------------------------------------------------------------------------------------------------------ flags


def test_every_field_of_a_run_is_a_flag_with_a_help() -> None:
    names = {s.flag.name for make in recipes.RECIPES.values() for s in settings.settings(make())}
    assert names == set(meanings.HELP)

    def leaves(value: Any, name: str = "") -> list[str]:
        if isinstance(value, dict):
            return [leaf for key, inner in value.items() for leaf in leaves(inner, key)]
        return [name]

    for make in recipes.RECIPES.values():
        fields = [name for name in leaves(to_dict(make())) if name not in ("kind", *settings.HIDDEN)]
        assert len(fields) == len(settings.settings(make())) == len({s.flag.name for s in settings.settings(make())})


@pytest.mark.parametrize("recipe", recipes.RECIPES)
def test_without_flags_a_recipe_is_what_it_says(longhaul: Any, trained: list[Run], recipe: str) -> None:
    task = recipes.recipe(recipe).environment
    kind = task.env.partition("/")[0] if isinstance(task, Named) else ""
    if kind in suites.SUITES and importlib.util.find_spec(suites.SUITES[kind].module) is None:
        pytest.skip(f"{kind} is not installed")
    code, out, _ = longhaul("train", recipe, "--run-name", "a")
    assert (code, out, trained) == (75, "runs/a\n", [resolve(recipes.recipe(recipe))])


def test_flags_change_their_fields_and_no_other(longhaul: Any, trained: list[Run]) -> None:
    words = (
        "--total-steps 1e6 --num_envs=16 --num-steps 16 --seed 3 --mesh data=2,model=1 --save-interval 7 --keep 2 "
        "--lr 1e-3 --no-anneal --ent-coef -0.1 --kl-stop 0.02 --memory 16 --evaluation-episodes 5 --topology fused "
        "--log-interval 3 --save-interval-minutes 0.5 --clip-value"
    )
    assert longhaul("train", "pendulum", *words.split())[0] == 75
    base = recipes.recipe("pendulum")
    algorithm = dataclasses.replace(
        base.algorithm, lr=1e-3, anneal=False, ent_coef=-0.1, kl_stop=0.02, memory=16, clip_value=True
    )
    expected = dataclasses.replace(
        base, total_steps=1_000_000, num_envs=16, num_steps=16, seed=3, devices=2, save_interval=7, keep=2,
        evaluation_episodes=5, log_interval=3, save_interval_minutes=0.5, algorithm=algorithm,
        base_batch=base.num_envs * base.num_steps,
    )  # fmt: skip
    assert trained == [resolve(expected)]


def test_flags_of_driving(longhaul: Any, trained: list[Run], tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        fixtures_logs.write_all(fixtures_logs.make_log(), tmp_path / name)
    words = (
        "--data one two/*.json --agents 2 --traffic idm --actions continuous --reward-collision -9 "
        "--reward-red-light -2 --terminations collision goal --horizon 40 --ent-coef-final none"
    )
    assert longhaul("train", "driving", *words.split())[0] == 75
    (run,) = trained
    task = run.environment
    assert isinstance(task, Driving)
    assert task.data == (str(tmp_path / "one"), str(tmp_path / "two/*.json"))
    simulator = task.simulator
    assert (simulator.agents, simulator.traffic, simulator.actions, task.horizon) == (2, "idm", "continuous", 40)
    assert (simulator.weights.collision, simulator.weights.red_light, simulator.weights.goal) == (-9, -2, 2)
    assert simulator.terminations == ("collision", "goal")
    assert run.algorithm.ent_coef_final is None


def test_the_general_recipe_takes_any_environment(longhaul: Any, trained: list[Run]) -> None:
    assert longhaul("train", "ppo", "--env", "probe/two_step")[0] == 75
    assert trained[0].environment == Named("probe/two_step")


def test_a_folder_is_named_after_recipe_and_time_and_kept(longhaul: Any, trained: list[Run], tmp_path: Path) -> None:
    _, out, _ = longhaul("train", "cartpole", "--runs-dir", "my/runs")
    folder = Path(out.strip())
    assert folder.parent == Path("my/runs")
    assert folder.name.startswith("cartpole-")
    assert json.loads((tmp_path / folder / "run.json").read_text())["run"] == to_dict(trained[0])


def test_resuming_takes_the_run_of_the_folder(longhaul: Any, trained: list[Run], workplace: Path) -> None:
    stored = resolve(recipes.recipe("cartpole"))
    words = "--resume cartpole --total-steps 500000 --lr 2.5e-3 --anneal --keep 9 --save-interval 4"
    code, out, _ = longhaul("train", "cartpole", *words.split())
    assert (code, out) == (75, "runs/cartpole\n")
    assert trained == [resolve(dataclasses.replace(stored, keep=9, save_interval=4))]
    assert longhaul("train", "cartpole", "--resume", str(workplace / "runs" / "cartpole"))[0] == 75
    assert trained[1] == stored


def test_a_finished_run_tells_its_result_again(longhaul: Any, workplace: Path) -> None:
    result = {"status": "done", "evaluation": {"trained": {"return": 500.0, "length": 500.0, "episodes": 100}}}
    (workplace / "runs" / "cartpole" / "result.json").write_text(json.dumps(result))
    before = tree(workplace)
    code, out, err = longhaul("train", "cartpole", "--resume", "cartpole")
    assert code == 0
    assert "done already" in err
    header, row, report = out.splitlines()[1:]
    assert header.split() == ["policy", "return", "length", "episodes"]
    assert row.split() == ["trained", "500.000", "500.000", "100"]
    assert report == "report: runs/cartpole/report.html"
    assert tree(workplace) == before


KINDS = {
    "one": flags.Flag("one", flags.INT, 1, "a number"),
    "maybe": flags.Flag("maybe", flags.optional(flags.FLOAT), None, "a number or none"),
    "many": flags.Flag("many", flags.choice(["red", "blue"]), ("red",), "colours", many=True),
    "on": flags.Flag("on", flags.SWITCH, True, "a pair"),
    "FILE": flags.Flag("FILE", flags.PATH, None, "where"),
}


@pytest.mark.parametrize(
    ("words", "values", "given"),
    [
        ("", {}, ""),
        ("x", {"FILE": "x"}, ""),
        ("--one 5 x", {"one": 5, "FILE": "x"}, "one"),
        ("x --one=-5", {"one": -5, "FILE": "x"}, "one"),
        ("--one 1e3", {"one": 1000}, "one"),
        ("--one 1 --one 2", {"one": 2}, "one"),
        ("--maybe .5", {"maybe": 0.5}, "maybe"),
        ("--maybe none", {}, "maybe"),
        ("--many blue red --no-on", {"many": ("blue", "red"), "on": False}, "many on"),
        ("--on", {}, "on"),
        ("-", {"FILE": "-"}, ""),
    ],
)
def test_words_become_values(words: str, values: dict[str, Any], given: str) -> None:
    parsed = flags.parse("try", "Tries.", {"": list(KINDS.values())}, words.split())
    assert parsed.values == {name: flag.default for name, flag in KINDS.items()} | values
    assert parsed.given == set(given.split())


def test_the_nearest_names_come_first_by_their_beginning() -> None:
    names = ["--total-steps", "--num-steps", "--kl-stop"]
    assert flags.nearest("--total", names) == ["--total-steps"]
    assert flags.nearest("--num-stpes", names)[0] == "--num-steps"
    assert flags.nearest("--wandering", names) == []


# ------------------------------------------------------------------------------------------------------------- helps


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        ("--help", ["usage: longhaul COMMAND", *cli.COMMANDS, "Exit codes"]),
        ("train --help", ["usage: longhaul train RECIPE", *recipes.RECIPES]),
        ("evaluate --help", ["RUN", "--policy {run,untrained,idm,log,constant}", "--episodes INT", "--json PATH"]),
        ("render -h", ["--scenario TEXT", "--out PATH", ".gif"]),
        ("data inspect --help", ["PATH...", "--json PATH"]),
        ("data --help", ["longhaul data inspect"]),
        ("status --help", ["RUN", "--runs-dir PATH"]),
        ("bench --help", ["NAME"]),
        ("--version", ["longhaul 0."]),
        ("recipes", [*recipes.RECIPES, "balance a pole"]),
        ("envs", ["cartpole ", "mountaincar-continuous", "probe/memory", "driving "]),
    ],
)
def test_helps_and_lists_are_plain_text_on_stdout(longhaul: Any, words: str, phrases: Sequence[str]) -> None:
    code, out, err = longhaul(*words.split())
    assert (code, err) == (0, "")
    assert all(phrase in out for phrase in phrases)
    assert "\x1b" not in out


def test_nothing_at_all_is_bad_input_with_the_help(longhaul: Any) -> None:
    code, out, _ = longhaul()
    assert code == 2
    assert "usage: longhaul COMMAND" in out


@pytest.mark.parametrize("recipe", ["driving", "cartpole"])
def test_the_help_of_a_recipe_has_each_flag_with_its_default(longhaul: Any, recipe: str) -> None:
    code, out, _ = longhaul("train", recipe, "--help")
    assert code == 0
    words = " ".join(out.replace("│", " ").split())
    for heading in settings.GROUPS:
        assert f"{heading} options" in words
    for setting in settings.settings(recipes.recipe(recipe)):
        assert f"--{setting.flag.name}" in words
        assert "".join(meanings.HELP[setting.flag.name].split()) in "".join(words.split())
    assert f"agent steps to train for (default: {recipes.recipe(recipe).total_steps})" in words
    assert ("--data PATH..." in words) == (recipe == "driving")
    assert ("--env TEXT" in words) == (recipe == "cartpole")


def test_the_help_and_the_reading_of_logs_start_without_jax() -> None:
    program = (
        "import sys; from longhaul import cli; cli.main(['--help']); cli.main(['data', 'inspect', 'no.json']);"
        "sys.exit(any(name in sys.modules for name in ('jax', 'flax', 'orbax')))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------ tables and numbers


def test_a_plain_table_is_aligned_and_keeps_control_characters_out(capsys: pytest.CaptureFixture[str]) -> None:
    printing.table(["name", "value"], [["a\x1b[31m", "1.000"], ["longer", "-"]], footer=["mean", "12.500"])
    out = capsys.readouterr().out
    assert out == "name     value\na?[31m   1.000\nlonger       -\nmean    12.500\n"


def test_a_terminal_gets_a_table_in_colours_unless_they_are_unwanted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def shown() -> str:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream := Terminal())
            printing.table(["name", "value"], [["a", "1.000"], ["b[red]", "-"]], footer=["mean", "12.500"])
        return stream.getvalue()

    monkeypatch.setenv("TERM", "dumb")
    assert shown() == "name     value\na        1.000\nb[red]       -\nmean    12.500\n"
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1m" in shown()
    assert "b[red]" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "b[red]" in shown()
    assert "\x1b" not in shown()


def test_what_is_not_finite_is_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": [float("nan"), 1.5], "b": {"c": float("inf")}}
    printing.write_json(str(tmp_path / "x.json"), value)
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [None, 1.5], "b": {"c": None}}
    printing.write_json("-", value)
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": {"c": None}}
    assert tree(tmp_path) == ["x.json"]


def test_columns_have_an_order_of_meaning() -> None:
    assert printing.columns(["zeal", "return", "accuracy", "age", "length"]) == [
        "accuracy", "return", "length", "age", "zeal",
    ]  # fmt: skip
    few = ["zeal", "return", "accuracy"]
    assert printing.columns(few, most=3) == ["accuracy", "return", "zeal"]
    assert printing.columns(few, most=2) == ["accuracy", "return"]


# ------------------------------------------------------------------------------------------------------------- data


def test_inspect_counts_and_names_errors(longhaul: Any, tmp_path: Path) -> None:
    log = fixtures_logs.make_log()
    paths = fixtures_logs.write_all(log, tmp_path)
    code, out, err = longhaul("data", "inspect", paths["gpudrive"].name, paths["womd-example"].name, "--json", "r.json")
    assert (code, err) == (0, "")
    report = json.loads((tmp_path / "r.json").read_text())
    assert [file["format"] for file in report["files"]] == ["gpudrive", "womd-example"]
    assert [s["tracks"] for file in report["files"] for s in file["scenarios"]] == [6, 6]
    head, header, row = out.splitlines()[:3]
    assert head == f"{paths['gpudrive'].name}: gpudrive, 1 scenario"
    assert dict(zip(header.split(), row.split()))["vehicles"] == "3"

    paths["gpudrive"].write_bytes(paths["gpudrive"].read_bytes()[:-50])
    code, out, err = longhaul("data", "inspect", str(tmp_path), "--json", "-")
    assert code == 1
    files = {Path(file["path"]).name: file["error"] for file in json.loads(out)["files"]}
    assert [name for name, error in files.items() if error] == ["gpudrive.json", "r.json"]
    assert err.count("\n") == 2
    assert str(paths["gpudrive"]) in err.splitlines()[0]


# ------------------------------------------------------------------------------------------------------------ bench


def test_bench_prints_an_object_a_line(longhaul: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Bench:
        NAMES: ClassVar = {"ppo-cartpole": "speed of PPO"}

        @staticmethod
        def sizes(name: str) -> frozenset[str]:
            return frozenset()

        @staticmethod
        def run(name: str) -> Any:
            yield {"name": name, "per_second": 1.5}
            yield {"name": name, "per_second": float("nan")}

    import longhaul as package

    monkeypatch.setitem(sys.modules, "longhaul.bench", Bench)
    monkeypatch.setattr(package, "bench", Bench, raising=False)
    code, out, _ = longhaul("bench", "ppo-cartpole", "--json", "b.json")
    assert code == 0
    figures = [{"name": "ppo-cartpole", "per_second": 1.5}, {"name": "ppo-cartpole", "per_second": None}]
    assert [json.loads(line) for line in out.splitlines()] == figures
    assert json.loads((tmp_path / "b.json").read_text()) == figures
    assert longhaul("bench")[:2] == (0, "ppo-cartpole  speed of PPO\n")
    assert_refused(longhaul("bench", "ppo-cartpol"), "no benchmark is named 'ppo-cartpol'; did you mean ppo-cartpole?")


# ------------------------------------------------------------------------------------------------- real processes


def test_train_evaluate_and_status_from_end_to_end(longhaul: Any, tmp_path: Path) -> None:
    words = "train cartpole --total-steps 4096 --num-envs 16 --num-steps 32 --evaluation-episodes 4 --run-name a"
    done = in_process(tmp_path, *words.split())
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "runs/a"
    assert [line.split()[0] for line in lines[1:]] == ["policy", "trained", "untrained", "report:"]
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stderr
    result = json.loads((tmp_path / "runs/a/result.json").read_text())
    for policy, scored in (("run", "trained"), ("untrained", "untrained")):
        code, out, _ = longhaul("evaluate", "a", "--policy", policy, "--json", "-")
        assert code == 0
        report = json.loads(out)
        assert (report["run"], report["policy"], report["episodes"]) == ("a", policy, 4)
        assert report["mean"] | {"episodes": 4} == result["evaluation"][scored]
    code, out, _ = longhaul("evaluate", "a", "--episodes", "2")
    assert code == 0
    assert out.splitlines()[0].split() == ["2", "episodes", "mean", "std", "min", "max"]
    code, out, _ = longhaul("status", "a")
    assert code == 0
    told = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (told["state"], told["checkpoints"], told["updates"]) == ("done", "8", "8, in 1 records")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells from /proc that JAX is being imported")
def test_ctrl_c_while_jax_is_imported_ends_the_command(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "longhaul", "train", "cartpole", "--run-name", "a"], cwd=tmp_path, env=environment(),
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while "jaxlib" not in Path(f"/proc/{process.pid}/maps").read_text() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (1, "", "longhaul: error: interrupted; nothing was saved\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_signal_saves_and_the_last_line_says_how_to_go_on(tmp_path: Path) -> None:
    words = "train cartpole --total-steps 400000000 --num-envs 16 --num-steps 32 --evaluation-episodes 4 --run-name a"
    process = subprocess.Popen(
        [sys.executable, "-m", "longhaul", *words.split()], cwd=tmp_path, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "runs/a\n"
    assert (tmp_path / "runs/a/run.json").is_file()
    metrics = tmp_path / "runs/a/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (75, ""), err
    assert "go on with --resume a" in err.splitlines()[-1]


def test_convert_packs_what_can_be_read_and_names_what_can_not(longhaul: Any, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    paths = fixtures_logs.write_all(fixtures_logs.make_log(), tmp_path / "logs")
    (tmp_path / "logs" / "broken.json").write_text("{")
    code, out, err = longhaul("data", "convert", str(tmp_path / "logs"), "packed", "--workers", "1")
    assert code == 1 and f"{len(paths)} scenarios in 1 shards" in out
    assert "broken.json" in err.splitlines()[-1]
    code, out, err = longhaul("data", "inspect", "packed", "--json", "-")
    assert code == 0 and json.loads(out)["scenarios"] == len(paths)
    assert_refused(longhaul("data", "convert", "logs", "--control", "nobody"), "one of vehicles, all")
    assert_refused(longhaul("data", "convert", "logs", "packed", "--control", "all"), "made with control = vehicles")
    assert_refused(longhaul("data", "convert", "logs"), "from where to where?")
    assert_refused(longhaul("data", "convert", "nowhere", "out"), "nowhere: no such file or folder")


@pytest.mark.slow
def test_a_generated_scenario_is_drawn_and_inspected_logs_too(longhaul: Any, tmp_path: Path) -> None:
    done = in_process(tmp_path, "render", "--policy", "constant", "--out", "a.png")
    assert (done.returncode, done.stdout) == (0, "a.png\n"), done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    paths = fixtures_logs.write_all(fixtures_logs.make_log(steps=31), tmp_path)
    words = f"render --policy log --data {paths['womd-example']} --scenario straight --out b.html"
    assert longhaul(*words.split())[:2] == (0, "b.html\n")
    assert "straight" in (tmp_path / "b.html").read_text()
    words = words.replace("--scenario straight", "--scenario strait")
    assert_refused(longhaul(*words.split()), "no scenario is named 'strait'; did you mean straight?")


@pytest.mark.slow
def test_driving_is_scored_by_scenario(longhaul: Any, tmp_path: Path) -> None:
    recipe = recipes.recipe("driving")
    (tmp_path / "runs" / "d").mkdir(parents=True)
    save_run(tmp_path / "runs" / "d", resolve(dataclasses.replace(recipe, evaluation_episodes=2)), {})
    code, out, err = longhaul("evaluate", "d", "--policy", "log", "--json", "log.json")
    assert code == 0, err
    report = json.loads((tmp_path / "log.json").read_text())
    assert (report["run"], report["policy"], report["episodes"]) == ("d", "log", 2)
    assert len({scenario["id"] for scenario in report["scenarios"]}) == 2
    assert report["mean"]["accuracy"] == report["mean"]["progress"] == 1.0  # the logs are clean
    by_scenario, by_metric = out.split("\n\n")
    assert by_metric.splitlines()[1].split()[:2] == ["accuracy", "1.000"]
    header, *rows, mean = by_scenario.splitlines()
    assert header.split()[:4] == ["scenario", "accuracy", "progress", "collision"]
    assert [row.split()[0] for row in rows] == [scenario["id"] for scenario in report["scenarios"]]
    assert mean.split()[:5] == ["mean", "of", "2", "1.000", "1.000"]

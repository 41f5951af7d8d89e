"""Requests that the command refuses: one line that says why, an exit code, and nothing left behind."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from longhaul.cli import main
from longhaul.config import recipes
from longhaul.config.resolve import resolve
from longhaul.training.run_dir import save_run
from tests.helpers import log_files
from tests.helpers.command_line import assert_refused, tree

FULL = "the disk is full; make room, then try again or --resume the run"

BAD = [
    ("frobnicate", ["no command 'frobnicate'"]),
    ("trian cartpole", ["did you mean train?"]),
    ("resume cartpole", ["no command 'resume'; longhaul train --resume RUN continues a run"]),
    ("viz cartpole", ["no command 'viz'; longhaul render RUN --out drive.gif draws"]),
    ("ls", ["no command 'ls'; longhaul runs lists your runs; recipes, envs and algorithms list what there is"]),
    ("cartpole", ["no command 'cartpole'; longhaul train cartpole trains by this recipe"]),
    ("convert x", ["no command 'convert'; did you mean data convert?"]),
    ("--verson", ["no flag '--verson'; did you mean --version?"]),
    ("data", ["a command is missing; there are longhaul data inspect"]),
    ("data inspekt x", ["no command 'inspekt'", "longhaul data inspect PATH"]),
    ("data inspect", ["which logs?"]),
    ("data convert file.txt file.txt", ["file.txt: a file is there: name the folder to write to last"]),
    ("train", ["name a recipe first", "cartpole, impala-cartpole", "ppo, driving-scaling"]),
    ("train --resume nobody", ["no run 'nobody' in runs"]),
    ("train --resume cartpole --seed 9", ["--seed is 9, and run cartpole has 0; leave --seed out"]),
    ("train --seed 1 cartpole", ["name a recipe first"]),
    ("train cartpol", ["no recipe is named 'cartpol'", "did you mean cartpole or"]),
    ("train a2c", ["a2c is not among the algorithms (ppo,", "your own is --algorithm my_module:MyClass"]),
    ("train HalfCheetah-v5", ["is an environment: longhaul train ppo --env gymnasium/HalfCheetah-v5"]),
    ("train acrobot", ["acrobot is an environment: longhaul train ppo --env acrobot"]),
    ("train CartPole-v1", ["did you mean cartpole or"]),
    (
        "train sac",
        ["of the recipes pendulum-sac, driving-sac", "longhaul train pendulum-sac --env NAME"],
    ),
    ("train GRPO", ["no recipe is named 'GRPO'; grpo is an algorithm, of the recipes reasoning-arithmetic"]),
    ("train gspo", ["gspo is a loss of GRPO: longhaul train reasoning-questions --loss gspo"]),
    (
        "train reasoning-arithmetic --algorithm gspo",
        ["named 'gspo'; it is a loss of grpo: --loss gspo"],
    ),
    ("train reasoning-questions --questions file.txt", ["file.txt:1: ", "each line is {"]),
    ("train reasoning-questions --questions none.jsonl", ["none.jsonl: No such file or directory; give a JSONL file"]),
    (
        "train reasoning-smollm --dry-run --model-folder mamba",
        ["--model-folder: mamba/config.json: model_type is 'mamba'; it must be one of llama, qwen2, qwen3"],
    ),
    ("train sft", ["longhaul train reasoning-questions --taught UPDATES"]),
    ("export cartpole --format onnx", ["export has no flag --format; the form is --to jax, onnx, "]),
    ("train cartpole lr=0.01", ["'lr=0.01' is one word too many; write --lr 0.01"]),
    ("train cartpole --num-generations 8", ["no flag --num-generations; completions of a question are --group N"]),
    ("train cartpole --total-step 4", ["no flag --total-step; did you mean --total-steps?"]),
    ("train cartpole --sede=4", ["no flag --sede; did you mean --seed"]),
    ("train cartpole --data x", ["longhaul train cartpole has no flag --data"]),
    ("train driving --scenarios 4 --torso nature", ["torso nature or impala or minatar takes one image"]),
    ("train driving --scenarios 4 --gae-lambda 2", ["--gae-lambda is 2.0; it must lie in 0 to 1"]),
    ("train driving --scenarios 4 --model-size 1001", ["--model-size is 1001.0; it must lie in 0.01 to 1000"]),
    ("train driving --env cartpole", ["longhaul train driving has no flag --env"]),
    ("train cartpole --num-envs abc", ["--num-envs is 'abc'; it must be a whole number"]),
    ("train cartpole --num-envs 1.5", ["--num-envs is '1.5'; it must be a whole number"]),
    ("train cartpole --num-envs inf", ["--num-envs is 'inf'; it must be a whole number"]),
    ("train cartpole --lr nan", ["--lr is 'nan'; it must be a finite number"]),
    ("train cartpole --lr --seed 1", ["--lr has no value"]),
    ("train cartpole --anneal=yes", ["--anneal takes no value; write --anneal or --no-anneal"]),
    ("train cartpole --torso mpl", ["--torso is 'mpl'; it must be one of mlp, deepset,"]),
    ("train cartpole --topology sebulba", ["--topology is 'sebulba'; it must be one of fused, actors, central"]),
    (
        "train cartpole --staleness 2",
        ["--staleness is 2, and --topology fused has none", "actors or central, or leave"],
    ),
    ("train cartpole --staleness none", ["--staleness is none, and --topology fused has none"]),
    ("train cartpole --dry-run --actors 2", ["--actors is 2, and --topology fused has none; choose --topology actors"]),
    ("train cartpole --lane grpc", ["--lane is grpc, and --topology fused", "choose --topology central, or leave"]),
    ("train cartpole --topology actors --slots 4", ["--slots is 4, and --topology actors has none", "central"]),
    ("train cartpole --pin", ["--pin is on, and --topology fused has none; choose --topology actors, or leave --pin"]),
    ("train cartpole --actor-devices 1 2", ["--actor-devices is 1 2, and --topology fused has none"]),
    ("train cartpole --topology actors --tls-key k", ["--tls-key is k, and --topology actors has none"]),
    ("train cartpole --topology actors --ray-address local", ["--actor-kind is process; choose --actor-kind ray"]),
    ("train cartpole --num-envs 0", ["--num-envs is 0; it must be at least 1"]),
    ("train cartpole --seeds 10000000", ["--sweep is of 10000000 runs, with --seeds; at most 4096"]),
    ("train cartpole --sweep seed=1,2", ["--sweep is of 'seed'", "runs with several seeds are --seeds N"]),
    ("train cartpole --sweep lr=1e-4..1e-3:1000000000", ["a COUNT of 2 to 4096"]),
    ("train cartpole --num-layers 100000000", ["--num-layers is 100000000; it must lie in 1 to 4096"]),
    ("train reasoning-arithmetic --model-layers 100000000", ["--model-layers is 100000000; it must lie in 1 to 4096"]),
    ("train cartpole --num-minibatches 7", ["--num-minibatches is 7, which does not divide", "choose a divisor"]),
    ("train cartpole --total-steps 100", ["--total-steps is 100", "2048 (--num-envs x agents x --num-steps)"]),
    ("train cartpole --mesh model=2 --hidden-dim 9", ["--mesh is data=1,model=2", "can be split into 2 parts"]),
    ("train cartpole --mesh data=5", ["5 devices can't share evenly"]),
    ("train cartpole --mesh data=32", ["32 devices"]),
    ("train ppo --env cartpol", ["no environment is named 'cartpol'", "did you mean cartpole?"]),
    ("train cartpole --run-name ../x", ["--run-name is '../x'"]),
    ("train cartpole --runs-dir file.txt", ["file.txt", "File exists"]),
    ("train cartpole --runs-dir file.txt/runs", ["file.txt/runs", "Not a directory"]),
    ("train cartpole --resume nobody", ["no run 'nobody' in runs"]),
    ("train driving --data", ["--data has no value"]),
    ("train driving --data a --data b", ["--data is given twice"]),
    ("train driving --data missing.json", ["missing.json: no such file or folder"]),
    ("train driving --data empty", ["empty: no driving logs in this folder"]),
    ("train driving --data *.xyz", ["*.xyz: no driving logs match"]),
    ("train driving --terminations crash", ["--terminations is 'crash'; it must be one of collision, offroad"]),
    ("evaluate", ["which run?", "longhaul evaluate RUN"]),
    ("evaluate nobody", ["no run 'nobody' in runs"]),
    ("evaluate file.txt", ["file.txt is a file, not a run; driving logs are given with --data file.txt"]),
    ("evaluate runs/cartpole/run.json", ["runs/cartpole/run.json lies in a run; give runs/cartpole"]),
    ("evaluate nobody --policy best", ["--policy is 'best'; it must be one of run, untrained, idm, log, constant"]),
    ("evaluate damaged", ["can't read", "damaged/run.json: it is no"]),
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
    ("render cartpole --out x.gif --data y", ["--data is y; it is for driving, and run cartpole is cartpole"]),
    ("evaluate cartpole --member 1", ["--member is 1, and cartpole is one run; leave --member out"]),
    ("reason cartpole", ["run cartpole is no language model's"]),
    ("reason sums --step-mark x", ["--step-mark and --answer-mark are for --steps of a model in words"]),
    ("reason sums --steps -1", ["--steps is -1; it must be at least 0"]),
    ("reason sums --top-p 2", ["--top-p is 2.0; it must"]),
    ("data inspect missing.json", ["missing.json: no such file or folder"]),
    ("data inspect empty", ["empty: no driving logs in this folder"]),
    ("status nobody", ["no run 'nobody' in runs"]),
    ("recipes now", ["'now' is one word too many"]),
    ("train cartpole --resume cartpole --seed 9", ["--seed is 9, and run cartpole has 0; leave --seed out"]),
    ("train pendulum --resume cartpole", ["run cartpole is of recipe cartpole, and pendulum is asked for"]),
    ("train cartpole --resume cartpole --run-name b", ["--run-name and --resume cartpole are both given"]),
]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what bad input may name: an empty folder, a file, runs that are damaged, of another format, new."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "empty").mkdir()
    (folder / "file.txt").write_text("not a log\n")
    (folder / "mamba").mkdir()
    (folder / "mamba/config.json").write_text('{"model_type": "mamba"}')
    for name, text in (("damaged", '{"format": 1, "ru'), ("future", '{"format": 99}'), ("cartpole", "")):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "run.json").write_text(text)
    (folder / "runs" / "sums").mkdir()
    for name, recipe in (("cartpole", "cartpole"), ("sums", "reasoning-arithmetic")):
        save_run(folder / "runs" / name, resolve(recipes.recipe(recipe)), {})
    return folder


@pytest.fixture
def workplace(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize(("words", "phrases"), BAD, ids=[words or "nothing" for words, _ in BAD])
def test_bad_input_is_one_line_and_changes_nothing(
    longhaul: Any, workplace: Path, words: str, phrases: Sequence[str]
) -> None:
    before = tree(workplace)
    result = longhaul(*words.split())
    assert_refused(result, *phrases)
    assert result[1] == ""
    assert tree(workplace) == before


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A log that can be read."""
    return log_files.write_all(log_files.make_log(), tmp_path_factory.mktemp("logs"))["womd-example"].read_bytes()


@pytest.mark.parametrize("words", ["train driving --data {}", "render --policy log --out x.gif --data {}"])
@pytest.mark.parametrize("damage", ["foreign", "truncated", "flipped"])
def test_a_log_that_cannot_be_read_leaves_no_run(
    longhaul: Any, example: bytes, tmp_path: Path, words: str, damage: str
) -> None:
    flipped = example[:999] + bytes([example[999] ^ 4]) + example[1000:]
    file = tmp_path / "example.tfrecord"
    file.write_bytes({"foreign": b"GIF89a" + example, "truncated": example[:-9], "flipped": flipped}[damage])
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
        (OSError(24, "Too many open files"), 1, "Too many open files"),  # later it may succeed
        (ValueError("bad \x1b[31mword"), 2, "bad ?[31mword"),
        (ValueError("x" * 2000), 2, "x" * main.LONGEST + " ..."),
        (KeyboardInterrupt(), 1, "interrupted; nothing was saved"),
        (KeyError("k"), 1, "KeyError: 'k'"),
        (AssertionError(), 1, "AssertionError"),
    ],
)
def test_the_kind_of_error_decides_the_exit_code(
    longhaul: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    def fail(words: Sequence[str]) -> int:
        raise error

    monkeypatch.setattr(main, "show_envs", fail)
    assert longhaul("envs") == (code, "", f"longhaul: error: {line}\n")

"""Every command of the documentation runs, at short sizes and in the order of its page; the others are named here."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from longhaul.cli import main
from longhaul.runtime import files
from tests.end_to_end.test_docs import BLOCK, PAGES
from tests.helpers import own_environments
from tests.helpers.log_files import make_log, scenario, write_records

pytestmark = pytest.mark.slow

INDENTED = re.compile(r"^    longhaul (.+)$", re.MULTILINE)

EXCUSED = {
    r"ray|AT_HOME|/shared/": "several hosts",
    r"hf:": "the hub of Hugging Face: tests/training/test_hub.py",
    r"s3://": "a store: tests/end_to_end/test_stores.py",
    r"--peer-python|^bench|^sync bench": "minutes, or another program: tests/bench/",
    r"^play hackmatrix( --latest)?$": "a terminal: tests/cli/play/",
    r"params_4|checkpoint_40|final_params": "files of the game's own trainer: tests/training/test_init_from.py",
    r"my_algo|my_env:recipe": "a module of the reader's: tests/training/test_api.py",
    r"brax|minatar|pong|swingup|envs jumanji": "a library that the tests don't install",
    r"data=8|data=4": "8 devices: tests/end_to_end/test_model_axis.py",
    r"--num-envs 4096": "a machine with more memory",
    r"^launch|--restarts": "several processes for each: tests/end_to_end/test_launch_faults.py",
    r"--wandb": "a service: tests/telemetry/",
    r"reasoning-questions|reason RUN \"A house": "a model of some GB",
    r"poison": "a run with numbers that are not finite: tests/training/test_nan_rollback.py",
    r"--publish|sync pull|gymnasium/CartPole-v1 --topology central": "a server beside it: tests/weight_sync/",
    r"--rollout-servers": "servers beside it: tests/reasoning/test_rollout_servers.py",
    r"^(serve|board) ": "a server, which goes on: tests/cli/test_serve.py, tests/cli/test_board.py",
    r"^plan ": "minutes of measurement: tests/diagnostics/test_compute_plan.py",
    r"--cross-play": "other runs, minutes of driving: tests/training/test_cross_play.py",
    r"\bLOGS\b|--data L\b|RECIPE|PATH\.\.\.$|--config runs/first": "a form, not a command",
    r"--bank|--recorded|--scenario ID": "data that the page's other commands do not make: tests/training/test_data.py",
}
"""Commands that are not run -> why, and what tests them."""

TRAINING = ("--num-envs", "8", "--num-steps", "8", "--total-steps", "256", "--evaluation-episodes", "2")
SHORT = {
    "driving": (*TRAINING, "--scenarios", "8"),
    "driving-best": (*TRAINING, "--scenarios", "8", "--agents", "2", "--least", "2"),
    "reasoning": ("--taught", "1", "--total-steps", "8192", "--problems", "64", "--evaluation-episodes", "2"),
}
"""Sizes by a recipe's name, or by its first word; `TRAINING` for the others."""

BASES = {"hackmatrix": "hackmatrix", "reasoning": "reasoning-arithmetic", "seeds": "cartpole", "python": "cartpole"}
"""Recipe of the run that a page calls RUN, ID or first; "driving" for the others."""

MODULES = {"my_net.py": "def network(", "my_reward.py": "def careful("}
"""Modules that a page's block of Python is -> what tells the block."""

NAMES = re.compile(r"\b(RUN|ID|first)\b")


def short(recipe: str) -> tuple[str, ...]:
    return SHORT.get(recipe, SHORT.get(recipe.split("-")[0], TRAINING))


def done(line: str) -> None:
    code = main.main(shlex.split(line, comments=True))
    assert code == 0, f"longhaul {line}: exit code {code}"


@pytest.mark.parametrize("page", [page for page in PAGES if INDENTED.search(page.read_text())], ids=lambda p: p.stem)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copy(own_environments.__file__, "my_env.py")
    text = page.read_text()
    for found in BLOCK.finditer(text):
        for name, begin in MODULES.items():
            if begin in found[1]:
                Path(name).write_text(found[1])
    for written in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        Path("my.yaml").write_text(written)
    Path("logs").mkdir()
    write_records(Path("logs/one.tfrecord"), [scenario(make_log())])
    base = BASES.get(page.stem, "driving")
    begun = False
    for found in INDENTED.finditer(text):
        line = re.split(r" {2,}#", found[1])[0].strip()
        if any(re.search(pattern, line) for pattern in EXCUSED):
            continue
        if "--run-name first" in line:
            begun = True
        elif NAMES.search(line) and not begun:
            many = ("--seeds", "4") if page.stem == "seeds" else ()
            done(shlex.join(("train", base, *short(base), *many, "--save-interval", "1", "--run-name", "first")))
            begun = True
        line = line.replace("--num-envs 2048 --num-steps 256", "--num-envs 4 --num-steps 16")
        line = re.sub(r"\bPATH\b|logs/\*\.tfrecord", "logs/one.tfrecord", NAMES.sub("first", line))
        saved = max(files.checkpoint_steps(Path("runs/first")), default=0)
        words = shlex.split(
            line.replace("6000000", "1024").replace("@120", f"@{saved}").replace("--step 120", f"--step {saved}")
        )
        if "--resume" in words[2:]:
            words[1] = base
        if words[0] == "train" and "--resume" not in words:
            words += short(words[1])
        done(shlex.join(words))

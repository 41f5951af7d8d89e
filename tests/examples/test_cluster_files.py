"""Files for clusters: the SLURM script begins, resumes and queues again; the Dockerfile has its parts, and builds."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from longhaul.cli import flags, run_flags
from longhaul.config import recipes
from longhaul.runtime.devices import MeshShape

REPOSITORY = Path(__file__).resolve().parents[2]
SBATCH = REPOSITORY / "examples" / "slurm" / "train.sbatch"
DOCKERFILE = REPOSITORY / "examples" / "docker" / "Dockerfile"


def parsed(words: list[str]) -> dict[str, Any]:
    """Values of a command `longhaul train RECIPE ...`, by the real parser; FlagError where there is no such flag."""
    assert words[0] == "train"
    recipe = recipes.recipe(words[1])
    return flags.parse(f"train {words[1]}", "", run_flags.table(recipe), words[2:]).values


def submit(folder: Path, code: int, *words: str) -> tuple[int, list[str], str]:
    """(exit code of the script, words of its srun, what scontrol was asked for), with tasks that end with `code`."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, body in (("srun", f'printf "%s\\n" "$@" > srun.words\nexit {code}'), ("scontrol", 'echo "$@" > asked')):
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "asked").write_text("")
    variables = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    variables["SLURM_SUBMIT_DIR"] = str(folder)
    done = subprocess.run(["bash", SBATCH, *words], cwd=folder, env=variables, capture_output=True, check=False)
    return done.returncode, (folder / "srun.words").read_text().splitlines(), (folder / "asked").read_text().strip()


def test_a_job_begins_is_queued_again_after_75_alone_and_resumes_its_run(tmp_path: Path) -> None:
    code, words, asked = submit(tmp_path, 75)
    assert (code, asked) == (75, "requeue 17")
    assert words[:2] == ["--kill-on-bad-exit=1", "longhaul"]
    values = parsed(words[2:])
    assert (values["run-name"], values["resume"], values["runs-dir"]) == ("job-17", None, str(tmp_path / "runs"))
    (tmp_path / "runs" / "job-17").mkdir(parents=True)
    (tmp_path / "runs" / "job-17" / "run.json").write_text("{}")
    code, words, asked = submit(tmp_path, 0, "driving", "--num-envs", "4096", "--mesh", "data=32")
    assert (code, asked, words[3]) == (0, "", "driving")
    values = parsed(words[2:])
    assert (values["run-name"], values["resume"], values["num-envs"]) == (None, "job-17", 4096)
    assert values["mesh"] == MeshShape(32)
    assert submit(tmp_path, 2)[::2] == (2, "")


def test_the_script_is_bash_and_asks_for_one_task_a_host_a_signal_and_a_queue() -> None:
    subprocess.run(["bash", "-n", SBATCH], check=True)
    lines = SBATCH.read_text().splitlines()
    asked = [shlex.split(line)[1:] for line in lines if line.startswith("#SBATCH")]
    assert all(len(words) == 1 for words in asked)
    options = dict(words[0].removeprefix("--").partition("=")[::2] for words in asked)
    assert options["ntasks-per-node"] == "1" and options["signal"] == "TERM@180" and "requeue" in options
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))  # SLURM reads no further
    assert not any(line.startswith("#SBATCH") for line in lines[first:])


INSTRUCTIONS = ("ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "VOLUME", "STOPSIGNAL", "ENTRYPOINT", "CMD")


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", "", DOCKERFILE.read_text())
    found = [line.partition(" ")[::2] for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, rest.strip()) for name, rest in found]


def test_the_dockerfiles_instructions_are_dockers_and_its_commands_longhauls() -> None:
    found = instructions()
    assert {name for name, _ in found} <= set(INSTRUCTIONS)
    assert next(name for name, _ in found if name != "ARG") == "FROM"
    declared = {rest.partition("=")[0] for name, rest in found if name == "ARG"}
    assert set(re.findall(r"\$\{(\w+)\}", DOCKERFILE.read_text())) == declared
    by_name = dict(found)
    assert json.loads(by_name["ENTRYPOINT"]) == ["longhaul"] and json.loads(by_name["CMD"]) == ["--help"]
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE.read_text())
    assert {name for words in asked for name in words.split(",")} <= extras.keys() and len(asked) == 3
    commands = re.findall(r"^# +docker run .*? longhaul(?::cuda)? (.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert len(commands) == 2 and all(parsed(shlex.split(words)) for words in commands)


@pytest.mark.slow
def test_the_dockerfile_copies_enough_to_build_the_package(tmp_path: Path) -> None:
    for _, rest in (each for each in instructions() if each[0] == "COPY"):
        *sources, target = rest.split()
        for source in sources:
            kept = shutil.ignore_patterns("__pycache__")
            path = REPOSITORY / source
            if path.is_dir():
                shutil.copytree(path, tmp_path / target, ignore=kept)
            else:
                shutil.copy(path, tmp_path / target)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    subprocess.run(pip, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "out").glob("longhaul_rl-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "longhaul/cli/main.py" in names and any(name.endswith("page.css") for name in names)


@pytest.mark.slow
def test_the_image_is_built_where_a_docker_daemon_answers() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, timeout=30, check=False).returncode:
        pytest.skip("no docker daemon answers")
    build = [docker, "build", "-f", str(DOCKERFILE), "-t", "longhaul-test", str(REPOSITORY)]
    subprocess.run(build, check=True, capture_output=True, timeout=900)
    said = subprocess.run(
        [docker, "run", "--rm", "longhaul-test", "recipes"], capture_output=True, text=True, check=True
    )
    assert "cartpole" in said.stdout

"""The documentation, held to the code: examples run and reach the values they claim, links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from longhaul.cli import main
from longhaul.config import aliases, recipes
from longhaul.reasoning.tasks import Problem
from longhaul.runtime import config_fields
from longhaul.runtime.errors import answer

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^    longhaul (.*)$|`longhaul ([^`]+)`", re.MULTILINE)
FLAG = re.compile(r"`(--[a-z-]+)")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def run_blocks(text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Runs a page's blocks of Python one after the other as one module, and returns what they defined."""
    module = ModuleType(f"page_{name.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for found in BLOCK.finditer(text):
        start = text.count("\n", 0, found.start(1))  # so that a traceback names the page's own lines
        exec(compile("\n" * start + found.group(1), f"{name}.md", "exec"), module.__dict__)
    return module.__dict__


@pytest.mark.parametrize(
    ("name", "result"),
    [
        pytest.param("add-an-environment", "mean_length", marks=pytest.mark.slow),
        pytest.param("add-an-algorithm", "probe", marks=pytest.mark.slow),
        ("environments", "mean_return"),
        pytest.param("python", "corridor", marks=pytest.mark.slow),
    ],
)
def test_the_examples_of_a_page_reach_what_they_claim(
    name: str, result: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # for the folders of runs
    assert result in run_blocks((ROOT / f"docs/{name}.md").read_text(), name, monkeypatch)


@pytest.mark.slow
def test_the_example_of_the_first_page_trains_and_acts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = run_blocks((ROOT / "README.md").read_text(), "README", monkeypatch)
    assert found["result"].evaluation["trained"]["return"] > 450 > found["result"].evaluation["untrained"]["return"]
    assert found["action"] == 1  # to the right, where the pole leans
    assert "<svg" in Path("return.html").read_text()


@pytest.mark.slow
def test_the_examples_of_the_page_on_weights_move_them() -> None:
    """A publisher, and a receiver beside it; then a delta. The third block needs a server of vLLM."""
    publisher, receiver, _, delta = BLOCK.findall((ROOT / "docs/sync.md").read_text())
    params = {"w": np.arange(6, dtype=np.float32)}
    names: dict[str, Any] = {"version": 1, "params": params, "flush_the_prefix_cache": lambda *_: None}
    exec(publisher + textwrap.indent(receiver, "    "), names)
    assert names["version"] == 1 and names["params"] is not params
    np.testing.assert_array_equal(names["params"]["w"], params["w"])
    base = np.arange(1000, dtype=np.uint16)
    names = {"base": base, "new": np.where(base % 9, base, base + 1), "staging": np.zeros_like(base)}
    exec(delta, names)
    np.testing.assert_array_equal(names["staging"], names["new"])


def test_the_verifier_of_the_page_on_reasoning_rewards_the_answer() -> None:
    (block,) = BLOCK.findall((ROOT / "docs/reasoning.md").read_text())
    names: dict[str, Any] = {}
    exec(block, names)
    problem = Problem("3 + 4 =", "7")
    assert [names["verify"](problem, text) for text in ("3 and 4 are 7", " 7 ", "8", "")] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.slow
def test_the_site_keeps_a_version_beside_the_next(tmp_path: Path) -> None:
    tools = Path(sys.executable).parent  # mike calls mkdocs

    def ran(*words: str) -> str:
        variables = os.environ | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "NO_MKDOCS_2_WARNING": "1",
            "GIT_AUTHOR_NAME": "x",
            "GIT_AUTHOR_EMAIL": "x@x",
        }
        variables |= {"GIT_COMMITTER_NAME": "x", "GIT_COMMITTER_EMAIL": "x@x"}
        return subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True).stdout

    ran("git", "clone", "-q", str(ROOT), ".")
    for version in ("0.1", "0.2"):
        ran(str(tools / "mike"), "deploy", "--update-aliases", version, "latest")
    found = {each["version"]: each["aliases"] for each in json.loads(ran("git", "show", "gh-pages:versions.json"))}
    assert found == {"0.2": ["latest"], "0.1": []}
    assert ran("git", "show", "gh-pages:latest") == "0.2"  # a link
    for folder in ("0.1", "0.2"):
        assert "first-run.html" in ran("git", "ls-tree", "--name-only", f"gh-pages:{folder}").splitlines()
    assert '"provider":"mike"' in ran("git", "show", "gh-pages:0.1/index.html").replace(" ", "")


@pytest.mark.slow
def test_the_algorithm_of_the_page_fails_its_probe_if_truncation_is_taken_for_termination(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (ROOT / "docs/add-an-algorithm.md").read_text()
    right = "following, data.terminated, data.truncated)"
    assert text.count(right) == 1
    wrong = text.replace(right, "following, data.terminated | data.truncated, data.truncated)")
    with pytest.raises(AssertionError):
        run_blocks(wrong, "add-an-algorithm", monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


def broken_rows(text: str) -> list[str]:
    """Lines outside code that hold a bar in running text, and rows with other cells than the row above them."""
    prose = re.sub(r"^( *)```[\s\S]*?^\1```$|^    .*$", "", text, flags=re.MULTILINE)
    prose = re.sub(r"`(?:(?!\n\n)[^`])*`", "`code`", prose)
    broken, above = [], 0
    for line in map(str.strip, prose.splitlines()):
        bars = len(re.findall(r"(?<!\\)\|", line))
        row = line.startswith("|") and line.endswith("|")
        if bars and (not row or above not in (0, bars) or ("|--" in line[1:] and not set(line) <= set("|-: "))):
            broken.append(line)
        above = bars if row else 0
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_row_of_a_table_is_a_line_of_its_own(page: Path) -> None:
    assert broken_rows(page.read_text()) == []


def test_a_table_that_was_wrapped_as_running_text_is_found() -> None:
    table = "| a | b |\n|---|---|\n| `x|y` | 1 |\n| | 2 |"
    assert broken_rows(f"text\n\n{table}\n\n```\na | b\n```\n\n    ls | wc\n") == []
    assert broken_rows(table.replace("\n", " ")) == [table.replace("\n", " ").replace("`x|y`", "`code`")]
    assert broken_rows("| a | b | |---|---| | x |\n1 | | y | 2 |") == ["| a | b | |---|---| | x |", "1 | | y | 2 |"]
    assert broken_rows("| a | b |\n|---|---|\n| x |") == ["| x |"]


def test_the_page_on_installing_lists_every_extra() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)}
    assert set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]) <= listed


def test_the_index_lists_every_page() -> None:
    listed = set(LINK.findall((ROOT / "docs/index.md").read_text()))
    assert {page.name for page in ROOT.glob("docs/*.md")} - {"index.md"} <= listed


def test_words_of_other_libraries_on_the_pages_are_settings_or_answered() -> None:
    runs = [recipes.recipe(name) for name in ("ppo", "pendulum-sac", "reasoning-questions")]
    known = {leaf.name for run in runs for leaf in config_fields.walk(run)} | {
        word for run in runs for word in aliases.aliases_of(run)
    }
    for name, fewest in (("configuration", 20), ("reasoning", 10)):
        table = (ROOT / f"docs/{name}.md").read_text().split("## Words of other libraries")[1].split("\n#")[0]
        firsts = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
        words = [word for first in firsts for word in re.findall(r"`([A-Za-z_]+)`", first)]
        assert len(words) >= fewest
        assert [word for word in words if word.lower() not in known and answer(word, aliases.ANSWERS) is None] == []


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_asks_no_other_host(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(tmp_path)]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
    built = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {f"{page.stem}.html" for page in ROOT.glob("docs/*.md")} <= pages.keys()
    for name, text in pages.items():
        assert re.findall(r"""(?:src|<link[^>]*href)=["']?https?://""", text) == [], name
    assert 'id="longhaul.training.api.train"' in pages["api/longhaul.html"]
    assert 'id="longhaul.algorithms.ppo' in pages["api/algorithms.html"]
    assert (tmp_path / "source/examples/own_environment.py").is_file()


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Text that `longhaul COMMAND --help-all` prints, or `--help` where a command has no other."""
    words = "plan driving" if command == "plan" else command  # a run's flags are shown with its recipe
    assert main.main([*words.split(), "--help-all" if words.startswith(("train ", "plan ")) else "--help"]) == 0
    return capsys.readouterr().out


def test_commands_and_flags_of_the_pages_exist(capsys: pytest.CaptureFixture[str]) -> None:
    named = [name for name in main.COMMANDS if name != "train"]
    named += [f"train {recipe}" for recipe in (*recipes.RECIPES, *recipes.GRIDS)]
    helps = {name: help_of(name, capsys) for name in named}
    for page in PAGES:
        text = page.read_text()
        for found in COMMAND.finditer(text):
            words = shlex.split(found.group(1) or found.group(2), comments=True)
            if words[0] == "launch" and "--" in words:  # what is launched is a command of its own
                cut = words.index("--")
                assert all(flag in helps["launch"] for flag in words[1:cut] if flag.startswith("--")), page.name
                words = words[cut + 1 :]
            command = " ".join(words[:2]) if words[0] in ("data", "sync", "train") and len(words) > 1 else words[0]
            if command in ("train", "train RECIPE", "train ...") or command.startswith(("train my_", "train --")):
                command = "train driving"
            assert command in helps or command.startswith("--"), f"{page.name}: longhaul {command}"
            asked = ("--help", "--help-all", command)
            for flag in (word for word in words if word.startswith("--") and word not in asked):
                assert flag in helps[command], f"{page.name}: longhaul {command} {flag}"
        for flag in FLAG.findall(text):
            assert flag == "--help-all" or any(flag in shown for shown in helps.values()), f"{page.name}: {flag}"

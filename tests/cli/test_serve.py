"""The command `serve`: refusals, and a run that is asked while its weights change."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

from longhaul.cli.serve import serve
from longhaul.reasoning import huggingface
from longhaul.runtime import credentials
from longhaul.weight_sync import transports
from longhaul.weight_sync.publisher import Publisher
from tests.helpers import small_chat
from tests.helpers.command_line import in_process

TOKEN = "a-token-of-sixteen-or-more"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "which run? longhaul serve RUN"),
        (["nope"], "nope"),
        (["x", "--host", "0.0.0.0"], "give --tls-cert and --tls-key and --token-file or --tls-ca, or listen at"),
        (["x", "--tls-ca", "a.pem"], "--tls-ca a.pem: No such file"),
        (["x", "--tls-cert", "a.pem"], "--tls-cert and --tls-key belong together"),
        (["x", "--rows", "0"], "--rows"),
        (["model", "--prompt-tokens", "4000", "--max-tokens", "200"], "more than the model's context of 4096"),
        (["model", "--follow", "tcp:127.0.0.1:1"], "--follow tcp:127.0.0.1:1: nobody answers"),
        (["model", "--follow", "udp:x"], "--follow udp:x: neither a run, a folder nor an address"),
    ],
)
def test_runs_and_flags_that_cannot_be_served_are_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small_chat.write(tmp_path / "model")
    with pytest.raises(ValueError, match=r".") as refused:
        serve([*words, "--port", "0"])
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_token_of_the_environment_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(credentials.TOKEN_VARIABLE, "short")
    with pytest.raises(ValueError, match="LONGHAUL_TOKEN has 5 characters"):
        serve(["x"])
    monkeypatch.setenv(credentials.TOKEN_VARIABLE, TOKEN)
    assert credentials.load(environment=True).token == TOKEN and credentials.load().token is None


def ask(address: str, path: str, body: Any = None) -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
    request = urllib.request.Request(address + path, None if body is None else json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as found:
        return json.load(found)


@contextmanager
def served(folder: Path, *words: str) -> Iterator[str]:
    """Address of `longhaul serve` in a process of its own, which must end well on SIGTERM."""
    (folder / "token").write_text(TOKEN)
    command = [sys.executable, "-m", "longhaul", "serve", *words, "--port", "0", "--token-file", "token"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, process.communicate()
        yield address
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def until_version(address: str, version: int) -> None:
    until = time.monotonic() + 120.0
    while ask(address, "/health")["weight_version"] != str(version):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_a_model_is_served_while_versions_are_published(tmp_path: Path) -> None:
    config = small_chat.write(tmp_path / "model")
    _, params = huggingface.load(tmp_path / "model")
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8}
    sender = transports.serve("tcp:127.0.0.1:0")
    with (
        Publisher("a", transports=[sender]) as publisher,
        served(tmp_path, "model", "--follow", sender.address) as address,
    ):
        first = ask(address, "/v1/chat/completions", body)
        assert first["weight_version"] == "0" and first["usage"]["completion_tokens"] == 8
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(address + "/metrics")
        publisher.publish(7, huggingface.exported(config, jax.tree.map(lambda x: -x, params)))
        until_version(address, 7)
        second = ask(address, "/v1/chat/completions", body)
        assert second["weight_version"] == "7"
        assert second["choices"][0]["token_ids"] != first["choices"][0]["token_ids"]


@pytest.mark.slow
def test_a_run_is_served_while_it_trains_on(tmp_path: Path) -> None:
    words = ["cartpole", "--num-envs", "8", "--num-steps", "16", "--evaluation-episodes", "4"]
    trained = in_process(tmp_path, "train", *words, "--total-steps", "512", "--run-name", "a")
    assert trained.returncode == 0, trained.stderr
    with served(tmp_path, "a", "--follow", "run") as address:
        found = ask(address, "/act", {"observation": [0, 0, 0, 0]})
        assert found["action"] in (0, 1) and found["weight_version"] == "4"
        trained = in_process(tmp_path, "train", "cartpole", "--resume", "a", "--total-steps", "1024")
        assert trained.returncode == 0, trained.stderr
        until_version(address, 8)

"""`longhaul sync`: what is served comes out as files that others read, and wrong words are told in one line."""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from longhaul.cli import main, sync
from longhaul.weight_sync import cost_model
from longhaul.weight_sync.cost_model import Setting
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.transports import safetensors_files, sockets
from longhaul.weight_sync.transports.folder import FolderTransport
from tests.helpers.command_line import assert_refused
from tests.helpers.weight_sync_transports import free_address, is_whole, tensors, until

ROOT = Path(__file__).resolve().parents[2]

PLAN = "sync plan --params 1e12 --trainers 256 --receivers 16x16 --nic 400Gb/s"


def read_with_the_library(folder: Path) -> dict[str, np.ndarray]:
    """A version's tensors as the safetensors library, which had no part in writing, reads them."""
    library = pytest.importorskip("safetensors.numpy", reason="safetensors, of the extra llm, is not installed")
    found: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= library.load_file(path)
    return found


def test_a_folder_is_served_pulled_and_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Publisher("run", epoch=3, transports=[FolderTransport(tmp_path / "from", shard=3000)]) as sender:
        sender.publish(7, tensors(7))
        assert sender.wait(7, 20)
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    command = [sys.executable, "-m", "longhaul", "sync", "serve", str(tmp_path / "from"), "--port", "0"]
    command += ["--token-file", str(token)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None and server.stderr is not None
        guard = threading.Timer(60, server.kill)  # so that a server that says nothing fails the test
        guard.start()
        address = server.stdout.readline().strip()
        where = f"folder:{tmp_path / 'from'}"
        assert server.stderr.readline() == f"waits for a version from {where}; addresses are printed once it listens\n"
        assert server.stderr.readline() == "version 7 is served\n"
        words = ["sync", "pull", address, "--out", str(tmp_path / "to"), "--token-file", str(token)]
        for _ in range(2):  # what is there already is not fetched again
            assert main.main(words) == 0
            out = Path(capsys.readouterr().out.strip())
            assert out == tmp_path / "to" / "version-3-7"
        assert main.main(["sync", "status", address, "--json", "-", "--token-file", str(token)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["run"], found["epoch"], found["version"]) == ("run", 3, 7)
        assert main.main(["sync", "status", str(out.parent)]) == 0
        assert "version 7 of epoch 3" in capsys.readouterr().out
        assert main.main(["sync", "status", address]) == 2  # without the token
        assert "token" in capsys.readouterr().err
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
        guard.cancel()
    read = read_with_the_library(out)
    assert is_whole(7, {name: read[name] for name in tensors(7)})
    assert safetensors_files.read_manifest(out).root.hex() == found["root"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("sync", "a command is missing"),
        ("sync sevre", "no command 'sevre'"),
        ("sync serve", "a source is missing"),
        ("sync serve nowhere", "nowhere: neither a folder, a run in runs, nor an address; write tcp:HOST:PORT"),
        ("sync serve tcp:127.0.0.1:1 --host 0.0.0.0", "which other machines can reach: give --token-file FILE"),
        ("sync serve . --port 99999", "--port is 99999; it must lie in 0 to 65535"),
        ("sync pull tcp:127.0.0.1:1", "ADDRESS or --out is missing"),
        ("sync pull tcp:127.0.0.1:x --out y", "is no address"),
        ("sync pull udp:1:2 --out y", "'udp:1:2' is no address; write shm:NAME, tcp:HOST:PORT, tls:HOST:PORT or"),
        ("sync pull tcp:udp:1:2 --out y", "'udp:1:2' is no address: 'udp:1' is no host"),
        ("sync status ssh:@weights", "'ssh:@weights' is no address; write shm:NAME"),
        ("sync pull tcp:127.0.0.1:1 --out y --keep 0", "--keep is 0; it must be at least 1"),
        ("sync pull tcp:127.0.0.1:1 --out y --timeout 0", "--timeout is 0; it must be seconds, above 0"),
        ("sync bench --repeats 1", "--repeats is 1; it must be at least 5"),
        ("sync pull tcp:127.0.0.1:1 --out /dev/null", "--out is /dev/null; it must be a writable folder"),
        ("sync status", "ADDRESS is missing"),
        ("sync bench --receivers 0", "at least 1"),
        ("sync bench --model gpt-9", "no model is known"),
        ("sync", "there are longhaul sync"),
        ("sync push first", "no command 'push'; receivers pull: longhaul train RECIPE --publish ADDRESS"),
        ("sync plane", "longhaul sync has no command 'plane'"),
        ("sync plan", "--params is missing: longhaul sync plan --params 1e12"),
        (f"{PLAN} --nic fast", "a rate with its unit, as 400Gb/s"),
        (f"{PLAN} --nic 400", "--nic is '400'; it must be a rate with its unit, as 400Gb/s or 50GB/s"),
        (f"{PLAN} --hbm 3.35e12", "--hbm is '3.35e12'; it must be a rate with its unit"),
        (f"{PLAN} --receivers 16y16", "16x16"),
        ("sync pull tcp:127.0.0.1:9 --out . --budget 0", "--budget is 0; it must be gigabytes, above 0"),
        (f"{PLAN} --cores 0", "error: --cores is 0; it must be at least 1"),
        (f"{PLAN} --params 0", "error: --params is 0; it must be above 0"),
        (f"{PLAN} --receivers 0x4", "error: --receivers is 0; it must be at least 1"),
        (f"{PLAN} --bucket-mb 0", "error: --bucket-mb is 0; it must be above 0"),
        (f"{PLAN} --delta-ratio 0", "error: --delta-ratio is 0; it must be at least 1"),
        (
            f"{PLAN} --receivers 100",
            "error: --receivers is 100x1; each would hold 2,000 GB of parameters in 180 GB; give more",
        ),
    ],
)
def test_wrong_words_are_told_in_one_line(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(words.split()) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_a_run_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by every other command, and by its folder too."""
    monkeypatch.chdir(tmp_path)
    with Publisher("mine", epoch=3, transports=[FolderTransport("all/mine/weights")]) as sender:
        sender.publish(7, tensors(7))
        assert sender.wait(7, 20)
    Path("all/mine/run.json").write_text("{}")
    for words in (["mine", "--runs-dir", "all"], ["all/mine"]):
        assert main.main(["sync", "status", *words]) == 0
        assert "run mine: version 7 of epoch 3" in capsys.readouterr().out
    assert main.main(["sync", "pull", "mine", "--runs-dir=all", "--out", "here"]) == 0
    assert capsys.readouterr().out.strip() == "here/version-3-7"
    assert main.main(["sync", "status", "mien", "--runs-dir", "all"]) == 2
    assert "mien: neither a folder, a run in all, nor an address; did you mean mine?" in capsys.readouterr().err


def test_nobody_there_is_a_failure_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sync", "pull", "tcp:127.0.0.1:9", "--out", str(tmp_path), "--timeout", "0.2"]
    assert main.main(words) == 1
    assert "no version came from tcp:127.0.0.1:9 in 0.2 s" in capsys.readouterr().err


def test_a_sender_that_says_nothing_is_left_when_the_time_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "PATIENCE", 3600.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        spoke = threading.Event()
        guard = threading.Timer(60, lambda: (spoke.set(), mute.shutdown(socket.SHUT_RDWR)))
        guard.start()
        words = ["sync", "pull", f"tcp:127.0.0.1:{mute.getsockname()[1]}", "--out", str(tmp_path), "--timeout", "0.5"]
        assert main.main(words) == 1
        assert not spoke.is_set()
        guard.cancel()
    assert "in 0.5 s" in capsys.readouterr().err


def test_who_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["sync", "status", "shm:@longhaul-nobody"]) == 1
    assert "nobody answers at shm:@longhaul-nobody: Connection refused" in capsys.readouterr().err


def test_a_folder_that_is_not_there_has_no_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["sync", "status", f"folder:{tmp_path / 'nowhere'}"]) == 1
    out, err = capsys.readouterr()
    assert not out and f"there is no folder {tmp_path / 'nowhere'}" in err
    assert main.main(["sync", "status", f"folder:{tmp_path}"]) == 0
    assert "no version yet" in capsys.readouterr().out
    assert sync._address("[::1]:7171") == "tcp:[::1]:7171"  # HOST:PORT, as before
    assert sync._address("node-3.example:7171") == "tcp:node-3.example:7171"


def test_a_folder_of_another_run_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("mine", "theirs"):
        with Publisher(name, epoch=3, transports=[FolderTransport(tmp_path / name)]) as sender:
            sender.publish(7, tensors(7))
            assert sender.wait(7, 20)
    words = ["sync", "pull", str(tmp_path / "mine"), "--out", str(tmp_path / "theirs"), "--timeout", "600"]
    assert main.main(words) == 1
    assert f"{tmp_path / 'theirs'} can't take what folder:{tmp_path / 'mine'} serves: " in capsys.readouterr().err


def test_an_address_is_printed_when_it_listens_and_of_two_servers_at_one_port_one_ends(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()  # while there is no version, nobody listens, and both can be bound
    port = int(free_address().rpartition(":")[2])
    command = [sys.executable, "-m", "longhaul", "sync", "serve", str(tmp_path / "from"), "--port", str(port)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen(command, **pipes) as first, subprocess.Popen(command, **pipes) as second:
        servers: tuple[Any, ...] = (first, second)
        try:
            for server in servers:
                assert server.stderr.readline().startswith("waits for a version from folder:")
            time.sleep(3 * sync.LOOK)
            assert not select.select([server.stdout for server in servers], [], [], 0.0)[0]
            with Publisher("run", epoch=3, transports=[FolderTransport(tmp_path / "from")]) as sender:
                sender.publish(7, tensors(7))
                assert sender.wait(7, 20)
            until(lambda: any(server.poll() is not None for server in servers))
            (ended,) = (server for server in servers if server.poll() is not None)
            (serving,) = (server for server in servers if server is not ended)
            address = f"tcp:127.0.0.1:{port}"
            assert serving.stdout.readline().strip() == address
            socket.create_connection(("127.0.0.1", port), 10).close()
        finally:
            for server in servers:
                server.terminate()
        assert ended.returncode == 1 and not ended.stdout.read()
        assert f"{address} can't be served: Address already in use; give another one" in ended.stderr.read()


def test_other_libraries_are_measured_by_a_program_of_the_clone(
    monkeypatch: pytest.MonkeyPatch, longhaul: Any, tmp_path: Path
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(
        sync.subprocess, "run", lambda words, **_: (asked.append(words[1:]), SimpleNamespace(returncode=0))[1]
    )
    assert longhaul("sync", "bench", "--peers", "--repeats", "7", "--json", "p.json")[0] == 0
    file = str(tmp_path / "p.json")
    assert asked == [["-m", "benchmarks.peers.sync", "--model", "qwen3-0.6b", "--repeats", "7", "--json", file]]
    assert_refused(longhaul("sync", "bench", "--peers", "--lane", "tcp"), "--peers has transports of its own")
    monkeypatch.setattr(sync, "__file__", str(tmp_path / "a/b/c.py"))
    assert_refused(longhaul("sync", "bench", "--peers"), "run it in a clone of the project")


# ----------------------------------------------------------------------------------------------------------------- plan


def test_the_command_prints_every_term(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert main.main([*PLAN.split(), "--delta-ratio", "40", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["setting"]["nic"] == 50e9
    assert found["setting"]["delta_ratio"] == 40.0
    expected = cost_model.costs(Setting(params=1e12, delta_ratio=40.0))
    assert [each["seconds"] for each in found["updates"]] == [each.pipelined for each in expected]
    for each in expected:
        assert each.name in printed
        assert all(term.name in printed and term.formula in printed for term in each.terms)
    assert all(line in printed for _, line in cost_model.assumptions(Setting(params=1e12, delta_ratio=40.0)))


@pytest.mark.parametrize(("word", "rate"), [("400Gb/s", 5e10), ("50GB/s", 5e10), ("1.5TB/s", 1.5e12), ("1e9B/s", 1e9)])
def test_rates_are_read_in_bits_and_in_bytes(word: str, rate: float) -> None:
    assert sync.RATE.read(word) == pytest.approx(rate)

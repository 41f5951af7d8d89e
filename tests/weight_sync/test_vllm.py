"""vLLM's four phases, against a fake engine."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import threading
import types
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longhaul.weight_sync import vllm
from longhaul.weight_sync.engine_http import EngineError
from longhaul.weight_sync.producer import named
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.vllm import Announced, Http, Phase, PhaseError, Rollout, Worker
from tests.helpers import reference_logits as reference
from tests.helpers.weight_sync_transports import until, way

TINY = dataclasses.replace(reference.CONFIGS["qwen3"], layers=2)


class Dictionary:
    """Model that is a dictionary; what is staged stands beside it."""

    def __init__(self) -> None:
        self.now: dict[str, np.ndarray] = {}
        self.next: dict[str, np.ndarray] = {}
        self.drops = 0

    def stage(self, pairs: Iterable[tuple[str, Any]]) -> None:
        self.next.update((name, tensor.clone()) for name, tensor in pairs)

    def apply(self) -> None:
        self.now = self.next

    def drop(self) -> None:
        self.next, self.drops = {}, self.drops + 1


class Fake:
    """vLLM as its trainers see it: a server whose workers each load into a dictionary of their own."""

    def __init__(self, count: int = 2) -> None:
        self.models = [Dictionary() for _ in range(count)]
        self.flushed: list[int] = []
        self.label: str | None = None
        self.calls: list[str] = []
        self.fail = 0  # calls of update_weights from now until one fails in the last worker
        self.workers = [Worker(model, self.flushed.append) for model in self.models]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        for worker in self.workers:
            worker.init_transfer_engine(**init_info)

    def start_weight_update(self) -> None:
        for worker in self.workers:
            worker.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.fail -= 1
        for worker in self.workers:
            if self.fail == 0 and worker is self.workers[-1]:
                raise RuntimeError("a worker has died")
            worker.receive_weights(Announced(**update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        for worker in self.workers:
            worker.finish_weight_update()
        self.label = weight_version

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()


@pytest.fixture
def plain_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no torch, its tensors are NumPy's: the phases are tested all the same."""
    try:
        import torch  # noqa: F401
    except ImportError:

        class Array(np.ndarray):
            def clone(self) -> np.ndarray:
                return np.array(self)

        monkeypatch.setattr(vllm, "torch_tensor", lambda array: array.view(Array))


@pytest.fixture
def fake() -> Iterator[Fake]:
    engine = Fake()
    yield engine
    engine.close()


def filled(version: int) -> dict[str, np.ndarray]:
    return {f"layer.{i}": np.full((4, 8), 100 * version + i, np.float32) for i in range(5)}


def loaded(fake: Fake, version: int) -> bool:
    return all(
        list(model.now) == list(filled(version))
        and all(np.array_equal(model.now[name], x) for name, x in filled(version).items())
        for model in fake.models
    )


@pytest.mark.usefixtures("plain_tensors")
def test_vllm_is_brought_to_a_version_in_its_four_phases(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "CHUNK", 300)  # two tensors of 128 bytes a call
    lane = way("shared", tmp_path).serve()
    with Publisher("run", transports=[lane]) as sender:
        rollout = Rollout(sender, fake, [lane.address])
        for version in (1, 2):
            rollout.update(version, filled(version), 20)
            assert fake.label == str(version)
            assert loaded(fake, version) and fake.flushed == sorted(2 * list(range(1, version + 1)))
        fake.fail = 2
        with pytest.raises(RuntimeError, match="died"):
            rollout.update(3, filled(3), 20)
        assert [worker.version for worker in fake.workers] == [2, 2] and len(fake.flushed) == 4
        assert loaded(fake, 2)  # and it was not paused yet
        with pytest.raises(PhaseError, match="start it again"):
            fake.finish_weight_update()
        rollout.update(4, filled(4), 20)  # all of it is loaded anew
        assert loaded(fake, 4) and [worker.version for worker in fake.workers] == [4, 4]
        fake.fail = 4  # in the call that applies, after three that stage
        with pytest.raises(RuntimeError, match="died"):
            rollout.update(5, filled(5), 20)
        assert [model.now["layer.0"][0, 0] for model in fake.models] == [500, 400]
        rollout.update(6, filled(6), 20)
        assert loaded(fake, 6)
        assert fake.calls == [*3 * ["pause", "resume"], "pause", "pause", "resume"]  # paused after the second failure
        assert rollout.paused > 0 and rollout.held > 0


@pytest.mark.usefixtures("plain_tensors")
def test_phases_out_of_order_and_other_versions_are_refused(tmp_path: Path) -> None:
    model = Dictionary()
    worker = Worker(model)
    lane = way("shared", tmp_path).serve()
    for call in (worker.start_weight_update, worker.finish_weight_update):
        with pytest.raises(PhaseError, match="not initialised"):
            call()
    with Publisher("run", transports=[lane]) as sender:
        worker.init_transfer_engine([lane.address])
        with pytest.raises(PhaseError, match="shut it down"):
            worker.init_transfer_engine([lane.address])
        until(lambda: sender.status()["receivers"])
        sender.publish(1, filled(1))
        assert sender.wait(1, 20)
        root = sender.status()["root"]
        with pytest.raises(PhaseError, match="start_weight_update before"):
            worker.receive_weights(Announced(1, root, 0, 5, True))
        for told, error in (
            (Announced(1, root, 0, 6, True), "missing, or already loaded"),
            (Announced(2, "00", 0, 5, True, 0.05), "version 2 did not come"),
        ):
            worker.start_weight_update()
            with pytest.raises((PhaseError, TimeoutError), match=error):
                worker.receive_weights(told)
            assert worker.phase is Phase.BROKEN
            with pytest.raises(PhaseError):
                worker.receive_weights(Announced(1, root, 0, 5, True))
        worker.start_weight_update()
        with pytest.raises(PhaseError, match="lacks 1 tensors at its end"):  # before vLLM is asked to finish
            worker.receive_weights(Announced(1, root, 0, 4, True))
        worker.start_weight_update()
        worker.receive_weights(Announced(1, root, 0, 4, False))
        with pytest.raises(PhaseError, match="1 tensors are missing"):
            worker.finish_weight_update()
        worker.receive_weights(Announced(1, root, 4, 5, False))
        with pytest.raises(PhaseError, match="nothing was applied"):
            worker.finish_weight_update()
        worker.start_weight_update()
        worker.receive_weights(Announced(1, root, 0, 4, False))
        with pytest.raises(PhaseError, match="already loaded"):
            worker.receive_weights(Announced(1, root, 3, 5, True))
        worker.start_weight_update()
        worker.receive_weights(Announced(1, root, 0, 4, False))
        assert len(model.next) == 4 and not model.now  # no refused update has changed the model
        worker.shutdown()  # the next trainer, after one that was killed
        assert not model.next and not model.now
    assert worker.phase is Phase.CLOSED and worker.version == -1


def test_the_routes_are_those_of_vllm() -> None:
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        http = Http(f"http://127.0.0.1:{server.server_port}/")
        http.init_weight_transfer_engine({"addresses": ["shm:@w"], "token": None})
        http.start_weight_update()
        http.pause()
        http.update_weights(Announced(1, "ab", 0, 5, True)._asdict())
        http.finish_weight_update("1")
        http.resume()
        server.shutdown()
        thread.join()
    assert [route for route, _ in asked] == [
        *("/init_weight_transfer_engine", "/start_weight_update", "/pause?mode=keep", "/update_weights"),
        *("/finish_weight_update", "/reset_prefix_cache?reset_running_requests=true", "/resume"),
    ]
    told = {"version": 1, "root": "ab", "begin": 0, "end": 5, "last": True, "seconds": 60.0}
    assert asked[3][1] == {"update_info": told} and asked[4][1] == {"weight_version": "1"}
    with pytest.raises(ValueError, match="no address of a server"):
        Http("127.0.0.1:8000")


def test_the_backend_has_all_that_the_installed_vllm_asks_for() -> None:
    """The real base class, where there is one: 0.25, 0.32 and 0.33 were tried."""
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(ValueError, match=r"needs vLLM 0\.25 or later"):
            vllm.register()
        return
    import torch
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    vllm.register()
    configs = types.SimpleNamespace(backend=vllm.BACKEND, parallel_config=None, model_config=None)
    made = WeightTransferEngineFactory._registry[vllm.BACKEND]()
    engine = made(config=configs, vllm_config=configs, device=torch.device("cpu"), model=torch.nn.Linear(2, 2))
    assert isinstance(engine, WeightTransferEngine) and not engine.supports_draft_weight_update
    told = Announced(1, "ab", 0, 5, True)._asdict()
    assert vars(engine.parse_update_info(told)) == told
    assert engine.parse_init_info({"addresses": ["shm:@w"], "token": None}).addresses == ["shm:@w"]
    with pytest.raises(PhaseError, match="not initialised"):
        engine.start_weight_update()
    engine.shutdown()


def test_a_vllm_in_process_is_asked_by_its_own_methods() -> None:
    asked: list[tuple[str, tuple[Any, ...]]] = []

    class Llm:
        def __getattr__(self, name: str) -> Any:
            return lambda *told, **named: (asked.append((name, (*told, *named.values()))), name != full)[1]

    full = ""
    engine = vllm.InProcess(Llm())
    engine.init_weight_transfer_engine({"addresses": ["shm:@w"], "token": None})
    engine.start_weight_update()
    engine.update_weights({"version": 1})
    engine.pause()
    engine.finish_weight_update("1")
    engine.resume()
    assert asked == [
        ("init_weight_transfer_engine", ({"init_info": {"addresses": ["shm:@w"], "token": None}},)),
        ("start_weight_update", ()),
        ("update_weights", ({"update_info": {"version": 1}},)),
        ("finish_weight_update", ("1",)),
        ("reset_prefix_cache", (True,)),
    ]
    full = "reset_prefix_cache"
    with pytest.raises(EngineError, match="keeps the cached values"):
        engine.finish_weight_update("2")


def test_an_update_that_a_killed_trainer_left_open_is_given_up_first() -> None:
    """As vLLM 0.32 answers: it forgets an open update when update_weights fails, and only then."""
    asked: list[str] = []
    active = [True]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            wrong = active[0]
            kept = b'{"success": false}'  # as vLLM answers while requests hold cached values
            if self.path == "/update_weights":
                assert body["update_info"]["root"] == ""
                active[0] = False
            said = b"start_weight_update called while a weight update is already active." if wrong else kept
            self.send_response(500 if wrong else 200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        Http(f"http://127.0.0.1:{server.server_port}").start_weight_update()
        with pytest.raises(EngineError, match="keeps the cached values of the version before"):
            Http(f"http://127.0.0.1:{server.server_port}").finish_weight_update("1")
        del asked[3:]
        active[0] = True
        with pytest.raises(EngineError, match=r"pause\?mode=keep failed with 500: start_weight_update called"):
            Http(f"http://127.0.0.1:{server.server_port}").pause()
        server.shutdown()
        thread.join()
    assert asked == ["/start_weight_update", "/update_weights", "/start_weight_update", "/pause?mode=keep"]


def test_chunks_cut_a_row_by_bytes() -> None:
    assert list(vllm.chunks([5, 5, 5, 20, 1], 10)) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert list(vllm.chunks([], 10)) == []
    assert named({"a": 1})["a"] == 1

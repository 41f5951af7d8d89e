"""vLLM's weight-transfer interface, both ends: control by its four phases, bytes by the transports of this package.

vLLM (0.25 and later) asks of a backend: init_transfer_engine, start_weight_update, receive_weights (once or more),
finish_weight_update, shutdown; its clients call init_weight_transfer_engine, start_weight_update, update_weights,
finish_weight_update. Here every worker follows a sender by itself, so that a host's workers map one verified image. A
call of update_weights names tensors by version and root, so that no worker loads another version than the rest. Checks
that vLLM's own backends leave out: the order of phases, each tensor loaded exactly once, all of them before the end.

vLLM finds the backend by itself where this package is installed (an entry point in `vllm.general_plugins`): `vllm serve
MODEL --weight-transfer-config '{"backend": "longhaul"}'`. The trainer has a `Rollout`.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from longhaul.weight_sync.consumers import torch_tensor
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver, follow

CHUNK = 1 << 30
"""Bytes of tensors that one call of update_weights names, at most, unless one tensor is larger."""

PATIENCE = 60.0
"""Seconds that a worker waits for the announced version."""

BACKEND = "longhaul"


class Phase(StrEnum):
    """Phase of a worker, as error messages name it."""

    CLOSED = "not initialised"
    OPEN = "between updates"
    STARTED = "in an update"
    BROKEN = "in an update that failed"


class PhaseError(RuntimeError):
    """Phase out of order, or a version other than the announced one. The message names the remedy."""


class Announced(NamedTuple):
    """Arguments of update_weights: tensors `begin` to `end` of the version with this root; `last` ends the update."""

    version: int
    root: str
    begin: int
    end: int
    last: bool
    seconds: float = PATIENCE


class Worker:
    """End of an inference worker.

    `load` takes (name, torch tensor) pairs over the received image, which it must copy and not keep; `begin` and
    `finish` enclose an update, also one that fails (vLLM's layerwise reload, which puts back what was not loaded);
    `on_commit(version)` is called at an update's end, when a prefix cache is stale.
    """

    def __init__(
        self,
        load: Callable[[Iterable[tuple[str, Any]]], object],
        begin: Callable[[], object] = lambda: None,
        finish: Callable[[], object] = lambda: None,
        on_commit: Callable[[int], object] = lambda version: None,
    ) -> None:
        self._load, self._begin, self._finish, self._on_commit = load, begin, finish, on_commit
        self._receiver: Receiver | None = None
        self._version, self._root = -1, ""
        self._left: set[int] = set()
        self.phase, self.version = Phase.CLOSED, -1

    def init_transfer_engine(self, addresses: Sequence[str], token: str | None = None) -> None:
        """Follows a sender by the first of its addresses that answers."""
        if self.phase is not Phase.CLOSED:
            raise PhaseError(f"the worker is {self.phase}; shut it down before it is initialised again")
        self._receiver = follow(addresses, token=token, name="vllm")
        self.phase = Phase.OPEN

    def start_weight_update(self) -> None:
        """Starts an update; one that was started before, here or in another worker, is given up."""
        if self.phase is Phase.CLOSED:
            raise PhaseError(f"the worker is {self.phase}; call init_weight_transfer_engine first")
        if self.phase is Phase.STARTED:
            self._finish()
        self._version, self._root, self._left = -1, "", set()
        self._begin()
        self.phase = Phase.STARTED

    def receive_weights(self, announced: Announced) -> None:
        """Loads the named tensors. TimeoutError where their version does not come in time."""
        if self.phase is not Phase.STARTED:
            raise PhaseError(f"the worker is {self.phase}; call start_weight_update before update_weights")
        try:
            self._loaded(announced)
        except BaseException:  # the server is ready for the next update
            self.phase = Phase.BROKEN
            self._finish()
            raise

    def _loaded(self, announced: Announced) -> None:
        names, tensors = self._awaited(announced)
        if not self._root:
            self._version, self._root, self._left = announced.version, announced.root, set(range(len(names)))
        elif announced.root != self._root:
            raise PhaseError(f"version {announced.version} came within an update to {self._version}; start it again")
        named = set(range(announced.begin, announced.end))
        if not named <= self._left:
            these = f"tensors {announced.begin} to {announced.end} of version {announced.version}"
            raise PhaseError(f"{these}: missing, or already loaded")
        self._load((names[i], torch_tensor(tensors[names[i]])) for i in range(announced.begin, announced.end))
        self._left -= named
        if announced.last and self._left:  # vLLM forgets an update that fails here, and not one that can't end
            raise PhaseError(f"version {announced.version} lacks {len(self._left)} tensors at its end; start it again")

    def finish_weight_update(self) -> None:
        """Finishes the update. PhaseError where tensors are missing."""
        if self.phase is not Phase.STARTED or self._left or not self._root:
            why = f"{len(self._left)} tensors are missing" if self._left else "nothing was loaded"
            raise PhaseError(f"an update can't end: the worker is {self.phase}, {why}; start it again")
        self._finish()
        self.phase, self.version = Phase.OPEN, self._version
        self._on_commit(self.version)

    def shutdown(self) -> None:
        """Gives up an update that was started, and leaves the sender. Idempotent."""
        if self.phase is Phase.STARTED:
            self._finish()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
        self.phase = Phase.CLOSED

    def _awaited(self, announced: Announced) -> tuple[list[str], Mapping[str, Any]]:
        """(names in the manifest's order, arrays) of the announced version."""
        assert self._receiver is not None
        until = time.monotonic() + announced.seconds
        while True:
            served = self._receiver.served
            if served is not None and served.manifest.root.hex() == announced.root:
                return [tensor.name for tensor in served.manifest.tensors], served.tensors
            if time.monotonic() > until:
                there = "none" if served is None else f"version {served.version}"
                why = self._receiver.errors[-1:] or ["it was published again meanwhile, or never"]
                raise TimeoutError(
                    f"version {announced.version} did not come in {announced.seconds:g} s; {there} is there: {why[0]}"
                )
            time.sleep(0.002)


class Engine(Protocol):
    """vLLM as its trainers see it: `Http`, vLLM's own clients, or an object with the four methods."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Reloading(Protocol):
    """Server that loads a version's folder by its own loader: `Http`, or `sglang.Http`."""

    def pause(self) -> None: ...

    def reload(self, folder: str, weight_version: str) -> None: ...

    def resume(self) -> None: ...


class EngineError(RuntimeError):
    """Call that an engine refused, or that failed there; one line."""


class Rollout:
    """Trainer's end: `update(version, tensors)` publishes, and updates the engine by the four phases.

    The engine serves until all workers hold the verified version, and is paused while they load it: requests keep their
    places. After an error in these phases it stays paused, since layers of two versions may be loaded, until a later
    update succeeds. `paused` is how many seconds the last pause took.

    `publisher` has quorum "all", or the number of workers; `addresses` are its transports as workers reach them.
    Several engines have one publisher and a `Rollout` each: `offer` once, then each `load`.
    """

    def __init__(
        self, publisher: Publisher, engine: Engine, addresses: Sequence[str], token: str | None = None
    ) -> None:
        self._publisher, self._engine, self.paused = publisher, engine, 0.0
        engine.init_weight_transfer_engine({"addresses": list(addresses), "token": token})

    def update(
        self, version: int, tensors: Mapping[str, Any], seconds: float = PATIENCE, label: str | None = None
    ) -> None:
        """Updates the engine to a version, which its answers call `label`. TimeoutError where the version does not
        count in time.

        An engine's error is passed on; then a later version may be sent, which a failed engine loads whole.
        """
        offer(self._publisher, version, tensors, seconds)
        self.load(version, sizes_of(tensors), seconds, label)

    def load(self, version: int, sizes: Sequence[int], seconds: float = PATIENCE, label: str | None = None) -> None:
        """Loads the version that was offered last, whose tensors have these bytes."""
        root = self._publisher.status()["root"]
        began = time.monotonic()
        self._engine.pause()
        self._engine.start_weight_update()
        for begin, end in chunks(sizes, CHUNK):
            told = Announced(version, root, begin, end, end == len(sizes), seconds)
            self._engine.update_weights(told._asdict())
        self._engine.finish_weight_update(label or str(version))
        self._engine.resume()
        self.paused = time.monotonic() - began


def sizes_of(tensors: Mapping[str, Any]) -> list[int]:
    """Bytes of each tensor."""
    return [int(each.size) * int(each.dtype.itemsize) for each in tensors.values()]


def offer(publisher: Publisher, version: int, tensors: Mapping[str, Any], seconds: float = PATIENCE) -> None:
    """Publishes a version, and waits until all workers hold it. TimeoutError where that takes longer."""
    if not publisher.publish(version, tensors, patience=seconds):
        raise TimeoutError(f"no memory came free for version {version}; raise the publisher's budget")
    if not publisher.wait(version, seconds):
        raise TimeoutError(f"version {version} was not taken in {seconds:g} s: {publisher.status()['dropped']}")


def chunks(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges (begin, end) of a row of sizes with sums of at most `most`, or of one size that is larger."""
    begin, taken = 0, 0
    for i, size in enumerate(sizes):
        if i > begin and taken + size > most:
            yield begin, i
            begin, taken = i, 0
        taken += size
    if sizes:
        yield begin, len(sizes)


class Http:
    """vLLM's routes of the same names, which its server has in development mode (VLLM_SERVER_DEV_MODE=1).

    `token` is that of `vllm serve --api-key`. A failure is an EngineError.
    """

    def __init__(self, url: str, seconds: float = 300.0, token: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no address of a server; write http://HOST:PORT")
        self._url, self._seconds = url.rstrip("/"), seconds
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Starts an update; one that a trainer left open, which was killed, is given up first."""
        try:
            self._post("start_weight_update", {})
        except EngineError as error:
            if "already active" not in str(error):
                raise
            with suppress(EngineError):  # vLLM forgets an update when this fails, and by nothing else
                self.update_weights(Announced(-1, "", 0, 0, True, 0.0)._asdict())
            self._post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", {"weight_version": weight_version})
        self._forget()

    def reload(self, folder: str, weight_version: str) -> None:
        """Loads a version's folder by vLLM's own loader, without this package at the server."""
        self._post("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        self._post("update_weight_version", {"new_version": weight_version})
        self._forget()

    def _forget(self) -> None:
        """Drops all keys and values, which are of the version before. Requests under way are computed again with the
        new weights, and their tokens stay; vLLM 0.32 does so at a pause, too."""
        told = self._post("reset_prefix_cache?reset_running_requests=true", {})
        if isinstance(told, dict) and told.get("success") is False:
            raise EngineError(f"{self._url} keeps the cached values of the version before: {told!r:.200}")

    def pause(self) -> None:
        self._post("pause?mode=keep", {})

    def resume(self) -> None:
        self._post("resume", {})

    def _post(self, route: str, body: dict[str, Any]) -> Any:
        asked = urllib.request.Request(f"{self._url}/{route}", json.dumps(body).encode(), self._headers)
        try:
            with urllib.request.urlopen(asked, timeout=self._seconds) as answer:
                text = answer.read(1 << 20)
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(4096).decode(errors="replace").split())
            raise EngineError(f"{self._url}/{route} failed with {error.code}: {said}") from None
        return json.loads(text) if text.startswith(b"{") else None


def register() -> None:
    """Registers the backend "longhaul" with vLLM. ValueError where vLLM 0.25 or later is not installed.

    Tested with vLLM 0.32 on a CPU.
    """
    try:
        from vllm.distributed.weight_transfer.base import WeightTransferEngine
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    except ImportError:
        raise ValueError("the backend needs vLLM 0.25 or later: pip install vllm") from None
    from dataclasses import dataclass

    @dataclass
    class InitInfo:
        addresses: list[str]
        token: str | None = None

    @dataclass
    class UpdateInfo:
        version: int
        root: str
        begin: int
        end: int
        last: bool
        seconds: float = PATIENCE

    class LonghaulEngine(WeightTransferEngine):
        init_info_cls, update_info_cls = InitInfo, UpdateInfo
        supports_draft_weight_update = False

        def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
            super().__init__(config, vllm_config, device, model)
            self._worker = Worker(model.load_weights, lambda: initialize_layerwise_reload(model), self._reloaded)

        def _reloaded(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)
            refresh_tied(self.model)

        def init_transfer_engine(self, init_info: InitInfo) -> None:
            self._worker.shutdown()  # another trainer, or the same one started again
            self._worker.init_transfer_engine(init_info.addresses, init_info.token)

        def start_weight_update(self) -> None:
            self._worker.start_weight_update()

        def receive_weights(self, update_info: UpdateInfo) -> None:
            self._worker.receive_weights(Announced(**vars(update_info)))

        def finish_weight_update(self) -> None:
            self._worker.finish_weight_update()

        def shutdown(self) -> None:
            self._worker.shutdown()

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            """Asked for by vLLM 0.25; a trainer has a `Rollout` instead."""
            raise NotImplementedError("send by longhaul.weight_sync.vllm.Rollout")

    WeightTransferEngineFactory.register_engine(BACKEND, LonghaulEngine)


def refresh_tied(model: Any) -> None:
    """Makes what a layer keeps of its weight anew (the packed form of vLLM's CPU kernels) where another layer has the
    same weight, since vLLM's layerwise reload does so in one of them alone."""
    layers: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if weight is not None and weight.numel() and weight.is_floating_point() and weight.element_size() > 1:
            layers.setdefault(weight.data_ptr(), []).append(layer)
    for tied in layers.values():
        for layer in tied if len(tied) > 1 else ():
            if (method := getattr(layer, "quant_method", None)) is not None:
                method.process_weights_after_loading(layer)

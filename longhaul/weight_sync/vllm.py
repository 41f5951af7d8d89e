"""vLLM's weight-transfer interface, both ends: control by its four phases, bytes by the transports of this package.

vLLM (0.25 and later) asks of a backend: init_transfer_engine, start_weight_update, receive_weights (once or more),
finish_weight_update, shutdown; its clients call init_weight_transfer_engine, start_weight_update, update_weights,
finish_weight_update. Here every worker follows a sender by itself, so that a host's workers map one verified image. A
call of update_weights names tensors by version and root, so that no worker loads another version than the rest. Calls
before the last one stage their tensors while the server answers; the last one makes them the model's. Checks that
vLLM's own backends leave out: the order of phases, each tensor exactly once, all of them before the model changes.

vLLM finds the backend by itself where this package is installed (an entry point in `vllm.general_plugins`): `vllm serve
MODEL --weight-transfer-config '{"backend": "longhaul"}'`. The trainer has a `Rollout`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from longhaul.weight_sync.consumers import torch_tensor
from longhaul.weight_sync.engine_http import EngineError, Routes
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver, follow

CHUNK = 1 << 25
"""Bytes of tensors that one call of update_weights names, at most, unless one tensor is larger: a server that packs
them makes no token meanwhile."""

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
    """Arguments of update_weights: tensors `begin` to `end` of the version with this root; `last` applies them all."""

    version: int
    root: str
    begin: int
    end: int
    last: bool
    seconds: float = PATIENCE


class Model(Protocol):
    """Model of a worker, which takes a version in two steps.

    `stage` takes (name, torch tensor) pairs over the received image, in one call or more; the model computes with the
    older version meanwhile. `apply` makes what was staged the model's. `drop` forgets it; it may be called at any time.
    """

    def stage(self, pairs: Iterable[tuple[str, Any]]) -> None: ...

    def apply(self) -> None: ...

    def drop(self) -> None: ...


class Worker:
    """End of an inference worker. `on_commit(version)` is called at an update's end, when a prefix cache is stale."""

    def __init__(self, model: Model, on_commit: Callable[[int], object] = lambda version: None) -> None:
        self._model, self._on_commit = model, on_commit
        self._receiver: Receiver | None = None
        self._version, self._root = -1, ""
        self._left: set[int] = set()
        self._applied = False
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
        self._model.drop()
        self._version, self._root, self._left, self._applied = -1, "", set(), False
        self.phase = Phase.STARTED

    def receive_weights(self, announced: Announced) -> None:
        """Stages the named tensors; the last call also applies all. TimeoutError where their version does not come in
        time."""
        if self.phase is not Phase.STARTED:
            raise PhaseError(f"the worker is {self.phase}; call start_weight_update before update_weights")
        try:
            self._staged(announced)
        except BaseException:  # the server is ready for the next update
            self.phase = Phase.BROKEN
            self._model.drop()
            raise

    def _staged(self, announced: Announced) -> None:
        names, tensors = self._awaited(announced)
        if not self._root:
            self._version, self._root, self._left = announced.version, announced.root, set(range(len(names)))
        elif announced.root != self._root:
            raise PhaseError(f"version {announced.version} came within an update to {self._version}; start it again")
        named = set(range(announced.begin, announced.end))
        if not named <= self._left:
            problem = f"tensors {announced.begin} to {announced.end} of version {announced.version}"
            raise PhaseError(f"{problem}: missing, or already loaded")
        self._model.stage((names[i], torch_tensor(tensors[names[i]])) for i in range(announced.begin, announced.end))
        self._left -= named
        if announced.last:  # vLLM forgets an update that fails here, and not one that can't end
            if self._left:
                problem = f"version {announced.version} lacks {len(self._left)} tensors at its end"
                raise PhaseError(f"{problem}; start it again")
            self._model.apply()
            self._applied = True

    def finish_weight_update(self) -> None:
        """Finishes the update. PhaseError where tensors are missing."""
        if self.phase is not Phase.STARTED or not self._applied:
            why = f"{len(self._left)} tensors are missing" if self._left else "nothing was applied"
            raise PhaseError(f"an update can't end: the worker is {self.phase}, {why}; start it again")
        self._model.drop()
        self.phase, self.version = Phase.OPEN, self._version
        self._on_commit(self.version)

    def shutdown(self) -> None:
        """Gives up an update that was started, and leaves the sender. Idempotent."""
        self._model.drop()
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
    """vLLM as its trainers see it: `Http`, `InProcess`, or an object with these methods."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Rollout:
    """Trainer's end: `update(version, tensors)` publishes, and updates the engine by the four phases.

    The engine serves until all workers have staged the verified version, and is paused while they apply it: requests
    keep their places. After an error before the pause it serves the older version. After one in the pause it stays
    paused, since layers of two versions may be there, until a later update succeeds. `paused` is how many seconds the
    last pause took, `held` the longest call before it: the engine makes no token in such a call.

    `publisher` has quorum "all", or the number of workers; `addresses` are its transports as workers reach them.
    Several engines have one publisher and a `Rollout` each: `offer` once, then each `load`.
    """

    def __init__(
        self, publisher: Publisher, engine: Engine, addresses: Sequence[str], token: str | None = None
    ) -> None:
        self._publisher, self._engine = publisher, engine
        self.paused = self.held = 0.0
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
        root, count, self.held = self._publisher.status()["root"], len(sizes), 0.0
        self._engine.start_weight_update()
        for begin, end in chunks(sizes, CHUNK):
            called = time.monotonic()
            self._engine.update_weights(Announced(version, root, begin, end, False, seconds)._asdict())
            self.held = max(self.held, time.monotonic() - called)
        began = time.monotonic()
        self._engine.pause()
        self._engine.update_weights(Announced(version, root, count, count, True, seconds)._asdict())
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
        self._routes = Routes(url, seconds, token)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._routes.post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Starts an update; one that a trainer left open, which was killed, is given up first."""
        try:
            self._routes.post("start_weight_update", {})
        except EngineError as error:
            if "already active" not in str(error):
                raise
            with suppress(EngineError):  # vLLM forgets an update when this fails, and by nothing else
                self.update_weights(Announced(-1, "", 0, 0, True, 0.0)._asdict())
            self._routes.post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._routes.post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._routes.post("finish_weight_update", {"weight_version": weight_version})
        self._forget()

    def reload(self, folder: str, weight_version: str) -> None:
        """Loads a version's folder by vLLM's own loader, without this package at the server."""
        self._routes.post("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        self._routes.post("update_weight_version", {"new_version": weight_version})
        self._forget()

    def _forget(self) -> None:
        """Drops all keys and values, which are of the version before. Requests under way are computed again with the
        new weights, and their tokens stay; vLLM 0.32 does so at a pause, too."""
        reply = self._routes.post("reset_prefix_cache?reset_running_requests=true", {})
        if isinstance(reply, dict) and reply.get("success") is False:
            raise EngineError(f"{self._routes.url} keeps the cached values of the version before: {reply!r:.200}")

    def pause(self) -> None:
        self._routes.post("pause?mode=keep", {})

    def resume(self) -> None:
        self._routes.post("resume", {})


class InProcess:
    """vLLM's `LLM` object in the trainer's own process, as an engine: it answers nothing while it is updated."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM keeps the cached values of the version before")

    def pause(self) -> None: ...

    def resume(self) -> None: ...


def register() -> None:
    """Registers the backend "longhaul" with vLLM. ValueError where vLLM 0.25 or later is not installed.

    Tested with vLLM 0.32 on a CPU; of 0.25 and 0.33 the base classes were tried.
    """
    try:
        from vllm.distributed.weight_transfer.base import WeightTransferEngine
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # noqa: F401
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
            self._worker = Worker((Beside if packs_beside(model) else Reloaded)(model, self.model_config))

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


# ------------------------------------------------------------------------------------------------------ models of vLLM


class Reloaded:
    """Model of vLLM that loads a version while it is paused, by vLLM's layerwise reload."""

    def __init__(self, model: Any, config: Any) -> None:
        self._model, self._config = model, config
        self._pairs: list[tuple[str, Any]] = []

    def stage(self, pairs: Iterable[tuple[str, Any]]) -> None:
        self._pairs += pairs  # views of the image

    def apply(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self._model)
        try:
            self._model.load_weights(iter(self._pairs))
        finally:  # puts back what was not loaded
            finalize_layerwise_reload(self._model, self._config)
        for layers in tied(self._model):
            for layer in layers:
                layer.quant_method.process_weights_after_loading(layer)

    def drop(self) -> None:
        self._pairs = []


class Beside:
    """Model of vLLM on a CPU, whose next version is packed for its kernels beside the one that computes.

    A copy of the model loads the version by vLLM's layerwise reload, layer by layer. To apply it, the model's
    parameters take the memory of the copy's, and its layers what the kernels keep of a weight. Meanwhile memory for a
    second model is needed.
    """

    def __init__(self, model: Any, config: Any) -> None:
        self._model, self._config = model, config
        self._copies: dict[Any, Any] = {}  # copy of each layer
        self._tied: list[list[Any]] = []  # copies of layers with one weight

    def stage(self, pairs: Iterable[tuple[str, Any]]) -> None:
        import torch

        with torch.no_grad():
            if not self._copies:
                self._copies = copies(self._model)
                self._tied = [[self._copies[layer] for layer in layers] for layers in tied(self._model)]
            self._tie()
            self._copies[self._model].load_weights(iter(list(pairs)))

    def apply(self) -> None:
        import torch
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
        from vllm.model_executor.model_loader.reload import layerwise

        attention = [layer for layer in self._copies if is_deferred_attention_layer(layer)]
        if any(layerwise.get_layerwise_info(self._copies[layer]).load_numel for layer in attention):
            raise ValueError("scales of keys and values can't be updated on a CPU; leave them out of the version")
        with torch.no_grad():
            for copy in self._copies.values():
                info = layerwise.get_layerwise_info(copy)
                if not is_packed(copy) and info.load_numel > 0:  # a padded layer has room for more than is loaded
                    layerwise._layerwise_process(copy, info)
            self._tie()
            packed = [(layer, copy) for layer, copy in self._copies.items() if is_packed(copy)]
            for layer, copy in packed:
                for name, param in layer._parameters.items():
                    if param is not None and copy._parameters[name].is_meta:
                        raise ValueError(f"{type(layer).__name__}.{name} was not loaded")
            for layer, copy in packed:
                take(layer, copy)
            for layer in attention:
                layer.process_weights_after_loading(self._config.dtype)

    def drop(self) -> None:
        for copy in self._copies.values():  # refers to itself by its parameters' loaders
            copy._parameters.clear()
            copy._modules.clear()
        self._copies, self._tied = {}, []

    def _tie(self) -> None:
        """Packs the layers whose weight another layer loaded, which vLLM's layerwise reload leaves as they were."""
        from vllm.model_executor.model_loader.reload import layerwise

        for group in self._tied:
            loaded = next((copy for copy in group if is_packed(copy)), None)
            if loaded is None:
                continue
            for copy in group:
                if not is_packed(copy):
                    copy._parameters["weight"] = loaded._parameters["weight"]
                    copy.quant_method.process_weights_after_loading(copy)
                    layerwise.get_layerwise_info(copy).reset()


def packs_beside(model: Any) -> bool:
    """True if `Beside` knows all layers of a model: on a CPU, without quantisation, LoRA, or buffers in files."""
    try:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
        from vllm.model_executor.model_loader.reload import layerwise, meta  # noqa: F401
    except ImportError:
        return False
    known = type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod
    for layer in model.modules():
        if type(layer).__module__.startswith("vllm.lora"):
            return False
        if any(x is not None and x.device.type != "cpu" for x in layer._parameters.values()):
            return False
        kept = layer._buffers.keys() - layer._non_persistent_buffers_set
        if not is_deferred_attention_layer(layer) and (type(getattr(layer, "quant_method", None)) not in known or kept):
            return False
    return True


def copies(model: Any) -> dict[Any, Any]:
    """Copy of each layer of a model, whose parameters are as vLLM's layerwise reload makes them: without memory, until
    all that a layer needs was loaded."""
    import copy
    from types import MethodType

    from vllm.model_executor.model_loader.reload import layerwise, meta

    copied: dict[Any, Any] = {layer: copy.copy(layer) for layer in model.modules()}
    for layer, new in copied.items():
        recorded, _ = layerwise.get_layerwise_info(layer).restore_metadata
        own = {name: x for name, x in layer._parameters.items() if x is not None} | recorded
        new._parameters = {name: meta.to_meta_tensor(x) for name, x in own.items()}
        for name in new._parameters.keys() & meta.SKIP_TENSORS:  # vLLM gives these no memory later
            new._parameters[name] = meta.materialize_meta_tensor(new._parameters[name])
        new._buffers = {name: None if x is None else meta.to_meta_tensor(x) for name, x in layer._buffers.items()}
        new._modules = {name: None if child is None else copied[child] for name, child in layer._modules.items()}
        new._non_persistent_buffers_set = set(layer._non_persistent_buffers_set)
        for param in new._parameters.values():
            for name, value in vars(param).items():
                while getattr(value, "__name__", "") == "online_process_loader":  # of a reload before
                    value = value.__wrapped__
                if isinstance(value, MethodType):  # vLLM's records name no layer
                    value = value.__func__.__get__(copied.get(value.__self__, new))
                vars(param)[name] = value
    for new in copied.values():
        layerwise.initialize_online_processing(new)
    return copied


def is_packed(copy: Any) -> bool:
    """True if all that a layer needs was loaded into its copy, and packed."""
    from vllm.model_executor.model_loader.reload import layerwise

    return not layerwise.get_layerwise_info(copy).can_load()


def take(layer: Any, copy: Any) -> None:
    """Gives a layer the parameters of its copy, and what the kernels keep of them."""
    for name, param in layer._parameters.items():
        if param is not None:
            param.data = copy._parameters[name].data
    own = vars(layer)
    for name, value in vars(copy).items():
        if name not in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            own[name] = value


def tied(model: Any) -> list[list[Any]]:
    """Layers of a model that have one weight: vLLM's layerwise reload packs it for one of them alone."""
    alike: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if weight is not None and weight.numel() and weight.is_floating_point() and weight.element_size() > 1:
            alike.setdefault(weight.data_ptr(), []).append(layer)
    packed = [[each for each in layers if getattr(each, "quant_method", None) is not None] for layers in alike.values()]
    return [layers for layers in packed if len(layers) > 1]

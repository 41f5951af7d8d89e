"""Rollouts of a run on prompts by inference servers: weights go out to them, completions come back.

An actor that starts a rollout brings the newest weights to the servers first, by one of `UPDATES`. Several actors may
sample meanwhile, so a completion may begin with one version and end with a later one; its `version` is that of its
oldest token. No token is older than the staleness of the run allows, since a server has at least the version with which
a rollout began, or its answers are refused.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import ipaddress
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from longhaul.config.resolve import both
from longhaul.config.run import Run
from longhaul.reasoning import huggingface, problem_sets
from longhaul.reasoning.rollout_servers import DIALECTS, Answer, Ask, Refused, Rules, Server, ServerError, Servers
from longhaul.reasoning.sampler import SAMPLED, Bank, Completions, Marking, chosen_problems
from longhaul.reasoning.tokenizer import Tokeniser, ended_at
from longhaul.runtime import credentials
from longhaul.runtime.errors import RunError
from longhaul.topologies.actor_learner import learner
from longhaul.topologies.actor_learner.actor import Collect, Leaves
from longhaul.topologies.staleness import Ticket
from longhaul.types import PyTree
from longhaul.weight_sync import sglang, transports, vllm
from longhaul.weight_sync.engine_http import EngineError, Reloading
from longhaul.weight_sync.protocol import Settings
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.transports.folder import FolderTransport

METRICS = ("actors/update_seconds", "actors/pause_seconds", "actors/sampling_seconds", "actors/moved_requests",
           "actors/mixed_completions")  # fmt: skip
"""Sums over an update's rollouts: seconds in which servers took new weights, of which they were paused; seconds of
sampling; requests that moved to another server; completions of more than one version."""

LOADING = 120.0
"""Seconds that a server may take to load a version."""

LOOK = 0.2
"""Seconds between two signs of life of an actor that waits for servers."""

Tensors = Mapping[str, np.ndarray]


class Updates(Protocol):
    """Way in which versions reach servers; `load` may be called for several servers at once."""

    def offer(self, version: int, export: Callable[[], Tensors], label: str) -> None:
        """New version, which `load` brings to a server."""

    def load(self, server: Server) -> float:
        """Seconds for which a server was paused to get the newest version."""

    def close(self) -> None: ...


class ByPlugin:
    """vLLM with this package's backend: over shared memory or TCP, by `vllm.Rollout`."""

    def __init__(self, address: str, run: str, epoch: int, token: str | None) -> None:
        self._token, self._rollouts = token, dict[str, vllm.Rollout]()
        self._transport = transports.serve(address, token if address.startswith("tcp:") else None)
        settings = Settings(lease=LOADING / 4)
        self._publisher = Publisher(run, epoch=epoch, transports=[self._transport], settings=settings)
        self._newest: tuple[int, list[int], str] | None = None

    def offer(self, version: int, export: Callable[[], Tensors], label: str) -> None:
        tensors = export()
        vllm.offer(self._publisher, version, tensors, LOADING)
        self._newest = version, vllm.sizes_of(tensors), label

    def load(self, server: Server) -> float:
        assert self._newest is not None
        version, sizes, label = self._newest
        if server.why is not None or server.address not in self._rollouts:  # it may be another process now
            engine = vllm.Http(server.address, LOADING, self._token)
            sent = self._token if self._transport.address.startswith("tcp:") else None
            self._rollouts[server.address] = vllm.Rollout(self._publisher, engine, [self._transport.address], sent)
        rollout = self._rollouts[server.address]
        rollout.load(version, sizes, LOADING, label)
        return rollout.paused

    def close(self) -> None:
        self._publisher.close(0.0)
        self._transport.close()


class ByFolder:
    """Versions as folders that a server's own loader reads: vLLM's and SGLang's, without this package there."""

    def __init__(
        self, folder: Path, run: str, epoch: int, beside: Mapping[str, bytes], engine: Callable[[str], Reloading]
    ) -> None:
        self._engine = engine
        self._newest: tuple[str, str] | None = None  # its folder and its label
        self._transport = FolderTransport(folder, beside=beside)
        self._publisher = Publisher(run, epoch=epoch, transports=[self._transport])

    def offer(self, version: int, export: Callable[[], Tensors], label: str) -> None:
        vllm.offer(self._publisher, version, export(), LOADING)
        if not self._publisher.flush(LOADING):  # renamed, and so to be seen
            why = self._transport.errors[-1:] or [f"not written in {LOADING:g} s"]
            raise TimeoutError(f"version {version} is not in {self._transport.folder}: {why[0]}; see to its disk")
        self._newest = str(self._transport.latest), label

    def load(self, server: Server) -> float:
        assert self._newest is not None
        (newest, label), engine = self._newest, self._engine(server.address)
        began = time.monotonic()
        engine.pause()
        engine.reload(newest, label)
        engine.resume()
        return time.monotonic() - began

    def close(self) -> None:
        self._publisher.close(0.0)
        self._transport.close()


class ByThemselves:
    """Servers that follow the run, as `longhaul serve RUN` does: nothing is sent to them here."""

    def offer(self, version: int, export: Callable[[], Tensors], label: str) -> None: ...

    def load(self, server: Server) -> float:
        return 0.0

    def close(self) -> None: ...


class Fleet:
    """Servers of a run, with the run's weights."""

    def __init__(
        self, updates: Updates, epoch: int | None, export: Callable[[PyTree], Tensors], servers: Callable[..., Servers]
    ) -> None:
        """`epoch`: of the labels of this run's versions; None for servers that follow it."""
        self._updates, self._epoch, self._export = updates, epoch, export
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self.version, self._oldest = -1, 0
        self.servers = servers(self._version_of, self._revive)
        self._pool = concurrent.futures.ThreadPoolExecutor(len(self.servers.all) + 1, "longhaul-servers")

    def bring(
        self, version: int, params: PyTree, oldest: int = 0, beat: Callable[[], object] = lambda: None
    ) -> tuple[float, float]:
        """(seconds, longest pause) of bringing a version to all servers that work, unless they have it.

        A server that follows the run, and has none from `oldest` on yet, gets no requests until it has.
        """
        while not self._lock.acquire(timeout=LOOK):
            beat()
        try:
            self._oldest = max(self._oldest, oldest)
            began, coming = time.monotonic(), self._pool.submit(self._brought, version, params)
            while not coming.done():
                concurrent.futures.wait([coming], LOOK)
                beat()
            return time.monotonic() - began, coming.result()
        finally:
            self._lock.release()

    def _brought(self, version: int, params: PyTree) -> float:
        fresh = version > self.version
        if not fresh and self._epoch is not None:
            return 0.0
        if fresh:
            self._updates.offer(version, lambda: self._export(params), f"{self._epoch}-{version}")
            self.version = version
        working = [server for server in self.servers.all if server.why is None]
        return max(self._pool.map(self._loaded, working), default=0.0)

    def _loaded(self, server: Server) -> float:
        """Seconds of a server's pause; a server that fails gets no requests."""
        try:
            return self._revive(server)
        except (OSError, http.client.HTTPException, Refused, ServerError) as error:
            self.servers.fail(server, " ".join(f"{type(error).__name__}: {error}".split()))
            return 0.0

    def _revive(self, server: Server) -> float:
        """Brings the newest version to a server, and checks that it serves one that may be learnt from."""
        try:
            with self._locks.setdefault(server.address, threading.Lock()):
                paused = self._updates.load(server)
        except EngineError as error:
            raise Refused(str(error)) from error
        if (version := self._version_of(self.servers.label(server))) < self._oldest:
            raise Refused(f"it has version {version}, and {self._oldest} is the oldest that may be learnt from")
        return paused

    def _version_of(self, label: str) -> int:
        """Version that a label of this run's names. Refused where it is another's, or unknown.

        A server that follows the run may be ahead of its actors.
        """
        match = re.fullmatch(r"(?:(\d{1,20})-)?(\d{1,10})", label)
        sent = self._epoch is not None
        if match is None or (sent and (match[1] != str(self._epoch) or int(match[2]) > self.version)):
            raise Refused(f"its weights are {label!r:.60}, and no version of this run's")
        return int(match[2])

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._updates.close()


# ------------------------------------------------------------------------------------------------------------- actors


def opened(run: Run, folder: Path, closed: ExitStack, note: Callable[[str], None], tokeniser: Tokeniser) -> Fleet:
    """Servers of a resolved run in `folder`; `closed` ends what was opened. RunError, one line, for a wrong address."""
    task, config = both(run)
    acting = run.acting
    try:
        token = credentials.load(token_file=acting.rollout_token_file).token if acting.rollout_token_file else None
        epoch = time.time_ns()
        updates = _updates(run, folder, epoch, token)
    except (ValueError, OSError) as error:
        raise RunError(f"--rollout-servers: {error}") from error
    closed.callback(updates.close)
    stops = tuple(text for text in (problem_sets.plain(task.stop),) if text)
    rules = Rules(run.num_steps, config.temperature, tokeniser.ends, stops, config.model.vocabulary)

    def servers(version_of: Callable[[str], int], revive: Callable[[Server], object]) -> Servers:
        return Servers(
            acting.rollout_servers, DIALECTS[acting.rollout_api], rules, version_of, revive, token=token, note=note,
            requests=acting.rollout_requests, seconds=acting.rollout_timeout,
        )  # fmt: skip

    def export(params: PyTree) -> Tensors:
        return huggingface.exported(config.model, params)

    fleet = Fleet(updates, None if acting.rollout_updates == "none" else epoch, export, servers)
    closed.callback(fleet.close)
    return fleet


def _updates(run: Run, folder: Path, epoch: int, token: str | None) -> Updates:
    acting, (_, config) = run.acting, both(run)
    if acting.rollout_updates == "none":
        return ByThemselves()
    if acting.rollout_updates == "folder":
        engine = vllm.Http if acting.rollout_api == "vllm" else sglang.Http
        beside = huggingface.beside(config.model, config.model_folder or None)
        where = Path(acting.rollout_weights or folder / "rollout-weights").absolute()
        return ByFolder(where, folder.name, epoch, beside, lambda url: engine(url, LOADING, token))
    near = all(_is_here(address) for address in acting.rollout_servers)
    if acting.rollout_weights is None and not near:
        raise ValueError(
            "the servers are on other machines; give --rollout-weights tcp:HOST:PORT, as they reach this one"
        )
    return ByPlugin(acting.rollout_weights or f"shm:@longhaul-{epoch}", folder.name, epoch, token)


def _is_here(address: str) -> bool:
    host = urllib.parse.urlsplit(address).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def specification(on_device: learner.CompiledActor, policy: PyTree) -> learner.CompiledActor:
    """Actor with the shapes of one that samples on the device, and `METRICS` beside its scores."""
    own: Any = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in METRICS}
    scores = on_device.scores | own
    return learner.CompiledActor(
        on_device.collect, learner.shapes(policy, (), on_device.data, scores), on_device.data, scores
    )


def collecting(
    run: Run,
    bank: Bank,
    tokeniser: Tokeniser,
    mark: Marking,
    fleet: Fleet,
    acting: learner.CompiledActor,
    policy: PyTree,
    beat: Callable[[], object],
) -> Collect:
    """Rollouts of one actor by the servers of a run. `beat` is called while they work."""
    assert run.acting.actors is not None
    _, config = both(run)
    rows, prompt = run.num_envs // run.acting.actors, np.asarray(bank.prompt)
    nothing: Any = {name: 0.0 for name in acting.scores if name not in METRICS}

    def collect(
        weights: list[np.ndarray], state: Leaves, key: np.ndarray, ticket: Ticket, version: int
    ) -> tuple[Leaves, Leaves, Leaves]:
        speaker = learner.tree(policy, weights)
        staleness = run.acting.staleness
        oldest = 0 if staleness is None else max(0, ticket.batch - staleness)
        seconds, paused = fleet.bring(version, speaker.params, oldest, beat)
        key_which, key_sample = jax.random.split(learner.key_of(key, ticket))
        which = np.asarray(chosen_problems(key_which, rows, len(prompt)))
        seeds = np.asarray(jax.random.randint(key_sample, (rows,), 0, 2**31 - 1))
        asks = [
            Ask(tuple(int(x) for x in prompt[place] if x != tokeniser.pad), config.group, int(seed))
            for place, seed in zip(which, seeds, strict=True)
        ]
        began, moved = time.monotonic(), fleet.servers.moved
        answers = fleet.servers.complete(asks, oldest, beat)
        data = filled(prompt[which], which, answers, run.num_steps, tokeniser)
        data, sums = mark(data, nothing)
        mixed = sum(len(set(answer.version)) > 1 for group in answers for answer in group)
        own = seconds, paused, time.monotonic() - began, fleet.servers.moved - moved, mixed
        scores: Any = {**sums, **{name: np.float32(x) for name, x in zip(METRICS, own, strict=True)}}
        return [], jax.tree.leaves(data), jax.tree.leaves(scores)

    return collect


def filled(
    prompt: np.ndarray, which: np.ndarray, answers: Sequence[Sequence[Answer]], length: int, tokeniser: Tokeniser
) -> Completions:
    """Completions of groups of answers to prompts [M, P] of the problems [M] of a bank, without rewards."""
    group = len(answers[0])
    rows = len(which) * group
    token: Any = np.full((rows, length), tokeniser.pad, np.int32)
    log_prob: Any = np.zeros((rows, length), np.float32)
    written: Any = np.zeros((rows, length), bool)
    version: Any = np.zeros(rows, np.int32)
    for row, answer in enumerate(each for group_ in answers for each in group_):
        count = ended_at(answer.token, tokeniser)
        token[row, :count], log_prob[row, :count] = answer.token[:count], answer.log_prob[:count]
        written[row, :count], version[row] = True, min(answer.version)
    nothing: Any = np.zeros(rows, np.float32)
    prompts: Any = np.repeat(prompt, group, axis=0)
    lesson: Any = np.full(rows, SAMPLED, np.int32)
    problem: Any = np.repeat(which, group).astype(np.int32)
    return Completions(
        prompts, token, written, written.copy(), log_prob, log_prob.copy(), nothing, nothing.copy(), lesson, version,
        problem, nothing.astype(bool),
    )  # fmt: skip

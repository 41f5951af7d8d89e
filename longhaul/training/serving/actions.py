"""Actions for the observations of many requests, computed in one call of a run's policy.

Batches have sizes that are powers of two, each compiled once. A batch has one version of the weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from longhaul.training.api import Policy
from longhaul.training.init_from import names
from longhaul.training.serving.work_queue import Counters, WorkQueue
from longhaul.types import PyTree

Arrays = Mapping[str, np.ndarray]


@dataclass(eq=False)
class Question:
    """One request: observations and memory by the names of `longhaul export`, [B, ...] each."""

    observation: Arrays
    memory: Arrays
    count: int
    deadline: float  # of time.monotonic
    deterministic: bool = True
    seed: int | None = None  # a request with one is computed alone, so that its draw is repeated
    action: Any = None
    after: Arrays = field(default_factory=dict)
    version: str | None = None
    cancelled: bool = False
    done: Future[None] = field(default_factory=Future)


class Engine:
    """Answers the questions of its `queue`, in that queue's thread."""

    def __init__(self, policy: Policy, rows: int, queue: int, version: str = "0") -> None:
        self.policy, self.rows, self.counters = policy, rows, Counters()
        self.queue = WorkQueue[Question]("observations", queue, lambda question: question.count)
        self._act = jax.jit(policy.act)
        self._memory = policy.memory(1)
        self._sizes: set[tuple[int, bool]] = set()  # of compiled programs
        self._weights: tuple[str, PyTree] = (version, jax.tree.map(jax.numpy.asarray, policy.params))
        self._key = jax.random.key(time.time_ns() % 2**32)
        self.queue.start(self._work)

    @property
    def version(self) -> str:
        return self._weights[0]

    def offer(self, version: str, params: PyTree) -> None:
        """Newer weights, which serve from the next batch on."""
        self._weights = (version, jax.tree.map(jax.numpy.asarray, params))
        self.counters.swaps += 1

    def _work(self) -> None:
        while True:
            with self.queue.changed:
                self.queue.changed.wait_for(lambda: self.queue.waiting or self.queue.closing)
                if not self.queue.waiting:
                    return
                batch = self._together()
            now = time.monotonic()
            for late in [each for each in batch if each.cancelled or now > each.deadline]:
                late.done.set_exception(TimeoutError("its deadline is over"))
                batch.remove(late)
            if not batch:
                continue
            try:
                self._answer(batch)
            except Exception as error:  # no memory, say: these requests fail, others may not
                self.counters.failures += 1
                for each in batch:
                    if not each.done.done():
                        each.done.set_exception(error)

    def _together(self) -> list[Question]:
        """Requests that one call answers, from the first that waits on; they leave the queue."""
        first = self.queue.waiting[0]
        batch, rows = [first], first.count
        if first.seed is None:
            for each in self.queue.waiting[1:]:
                if each.seed is None and each.deterministic == first.deterministic and rows + each.count <= self.rows:
                    batch.append(each)
                    rows += each.count
        self.queue.waiting = [each for each in self.queue.waiting if each not in batch]
        return batch

    def _answer(self, batch: list[Question]) -> None:
        version, params = self._weights
        first, total = batch[0], sum(each.count for each in batch)
        size = 2 ** math.ceil(math.log2(total))
        observation = self._joined([each.observation for each in batch], self.policy.spec.observation, size)
        memory = self._joined([each.memory for each in batch], self._memory, size)
        if first.deterministic:
            key = None
        elif first.seed is not None:
            key = jax.random.key(first.seed)
        else:
            self._key, key = jax.random.split(self._key)
        action, after = jax.device_get(self._act(params, memory, observation, key))
        self._sizes.add((size, first.deterministic))
        self.counters.programs = self.counters.compiled = len(self._sizes)
        self.counters.calls += 1
        self.counters.batches += 1
        self.counters.tokens += total
        later, start = names(after, "memory") if self.policy.recurrent else {}, 0
        for each in batch:
            part = slice(start, start + each.count)
            start += each.count
            each.action, each.version = np.asarray(action)[part], version
            each.after = {name: np.asarray(x)[part] for name, x in later.items()}
            each.done.set_result(None)

    @staticmethod
    def _joined(parts: list[Arrays], like: PyTree, size: int) -> PyTree:
        """Tree of the form of `like` from parts by name, padded with zeros to `size` rows."""

        def whole(name: str) -> np.ndarray:
            arrays = np.concatenate([each[name] for each in parts])
            return np.pad(arrays, [(0, size - len(arrays)), *[(0, 0)] * (arrays.ndim - 1)])

        leaves = [whole(name) for name in parts[0]]
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

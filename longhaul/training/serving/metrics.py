"""Metrics of a server in Prometheus's text format, version 0.0.4."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable

import psutil

from longhaul.training.serving.work_queue import Engine

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends of the histogram of seconds."""


class Requests:
    """Requests that were answered: counts by route and status, seconds by route."""

    def __init__(self) -> None:
        self.answered: Counter[tuple[str, int]] = Counter()
        self.seconds: dict[str, list[int]] = {}
        self.sums: Counter[str] = Counter()
        self.under_way = 0

    def note(self, route: str, status: int, seconds: float) -> None:
        self.answered[route, status] += 1
        self.seconds.setdefault(route, [0] * (len(BOUNDS) + 1))[bisect.bisect_left(BOUNDS, seconds)] += 1
        self.sums[route] += seconds  # type: ignore[assignment]


def text(requests: Requests, engine: Engine) -> str:
    """Everything that `/metrics` answers."""
    counters = engine.counters
    lines = [
        *_family("requests_total", "counter", "Requests that were answered.", (
            (f'{{route="{route}",status="{status}"}}', count) for (route, status), count in
            sorted(requests.answered.items())
        )),
        *_histogram(requests),
        *_one("requests_under_way", "gauge", "Requests that are not answered yet.", requests.under_way),
        *_one("queue_length", "gauge", "Completions or observations that wait.", engine.queue.length),
        *_one("active_rows", "gauge", "Completions that are decoded now.", counters.active),
        *_one("prompt_tokens_total", "counter", "Tokens of prompts that were read.", counters.prompt_tokens),
        *_one("generated_total", "counter", "Tokens or actions that were computed.", counters.tokens),
        *_one("batches_total", "counter", "Batches that were begun.", counters.batches),
        *_one("calls_total", "counter", "Calls of the compiled model.", counters.calls),
        *_one("weight_swaps_total", "counter", "Versions of weights that were taken.", counters.swaps),
        *_one("failures_total", "counter", "Batches that failed.", counters.failures),
        *_one("programs", "gauge", "Compiled programs that are kept.", counters.programs),
        *_one("compilations_total", "counter", "Programs that were compiled or loaded.", counters.compiled),
        *_one("memory_bytes", "gauge", "Resident memory of the process.", psutil.Process().memory_info().rss),
        *_family("weights_info", "gauge", "Version of the weights.", ((f'{{version="{engine.version}"}}', 1),)),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _one(name: str, kind: str, about: str, value: float) -> list[str]:
    return _family(name, kind, about, (("", value),))


def _family(name: str, kind: str, about: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    head = [f"# HELP longhaul_{name} {about}", f"# TYPE longhaul_{name} {kind}"]
    return head + [f"longhaul_{name}{labels} {value:g}" if isinstance(value, float) else
                   f"longhaul_{name}{labels} {value}" for labels, value in samples]  # fmt: skip


def _histogram(requests: Requests) -> list[str]:
    name = "longhaul_request_seconds"
    lines = [f"# HELP {name} Seconds from a request's head to its answer's end.", f"# TYPE {name} histogram"]
    for route, counts in sorted(requests.seconds.items()):
        total = 0
        for bound, count in zip((*BOUNDS, "+Inf"), counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{route="{route}",le="{bound}"}} {total}')
        lines += [
            f'{name}_sum{{route="{route}"}} {requests.sums[route]:.6f}',
            f'{name}_count{{route="{route}"}} {total}',
        ]
    return lines

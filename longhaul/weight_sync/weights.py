"""`Weights` (`longhaul.types`) by weight synchronisation: for actors in other processes or on other hosts.

`tests/helpers/weights_conformance.py` is the check that this and the other implementations pass.
"""

from __future__ import annotations

from typing import Any

from longhaul.weight_sync.consumers import JaxWeights
from longhaul.weight_sync.producer import Producer


class SyncWeights:
    """One end of the transfer: a learner's, which has a producer, or an actor's, which has received weights.

    A process that both publishes and acts may have both. Example:

        learner = SyncWeights(producer=Producer(Publisher("run-7", transports=[transports.serve("tcp:HOST:7171")])))
        actor = SyncWeights(received=JaxWeights(follow(["tcp:HOST:7171"]), like=params))
    """

    def __init__(self, producer: Producer | None = None, received: JaxWeights | None = None) -> None:
        if producer is None and received is None:
            raise ValueError("weights without an end: give a producer, or received weights")
        self._producer, self._received = producer, received

    def publish(self, version: int, params: Any) -> None:
        """Hands over a version and returns at once; `params` must not change afterwards. RuntimeError at an actor."""
        if self._producer is None:
            raise RuntimeError("this end receives weights; publish at the learner's")
        self._producer.publish(version, params)

    def latest(self) -> tuple[int, Any]:
        """Newest (version, params) that was committed here. LookupError before the first; RuntimeError at a learner."""
        if self._received is None:
            raise RuntimeError("this end publishes weights; receive them at an actor's")
        return self._received.latest()

"""`Weights` by weight synchronisation passes the check of every implementation."""

from __future__ import annotations

from pathlib import Path

import pytest

from longhaul.weight_sync.consumers import JaxWeights
from longhaul.weight_sync.producer import Producer
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver
from longhaul.weight_sync.weights import SyncWeights
from tests.helpers.weight_sync_transports import way
from tests.helpers.weights_conformance import check_weights, params_of


@pytest.mark.parametrize("kind", ["shared", "tcp", "folder"])
def test_both_ends_do_what_weights_must(kind: str, tmp_path: Path) -> None:
    there = way(kind, tmp_path)
    with (
        Publisher("run", transports=[there.serve()]) as publisher,
        Producer(publisher) as producer,
        Receiver(there.connect) as receiver,
    ):
        check_weights(SyncWeights(producer), SyncWeights(received=JaxWeights(receiver, params_of(0))))


def test_an_end_does_not_do_the_others_part(tmp_path: Path) -> None:
    with (
        Publisher("run") as publisher,
        Producer(publisher) as producer,
        pytest.raises(RuntimeError, match="receive them at an actor's"),
    ):
        SyncWeights(producer).latest()
    with (
        Receiver(way("folder", tmp_path).connect) as receiver,
        pytest.raises(RuntimeError, match="publish at the learner's"),
    ):
        SyncWeights(received=JaxWeights(receiver, params_of(0))).publish(1, params_of(1))
    with pytest.raises(ValueError, match="without an end"):
        SyncWeights()

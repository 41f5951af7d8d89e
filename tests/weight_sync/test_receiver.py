"""Offers that a receiver refuses. Every transport runs the rest in transports/test_base.py."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from longhaul.weight_sync.protocol import NOTHING, ProtocolError
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver
from longhaul.weight_sync.transports import shared_memory
from tests.helpers.weight_sync_transports import is_whole, tensors


def test_a_wrong_base_and_a_stale_offer_are_refused_and_nothing_changes() -> None:
    name = f"@longhaul-test-faults-{time.monotonic_ns()}"
    with Publisher("run", epoch=4, transports=[shared_memory.serve(name)]) as sender:
        sender.publish(5, tensors(5))
        with Receiver(lambda: shared_memory.connect(name, "one")) as receiver:
            assert receiver.wait(5, 20)
            with closing(shared_memory.connect(name, "two")) as source:
                source.bind(NOTHING, 5.0)
                parcel = source.ask(NOTHING, 5.0)
                assert parcel is not None
                for change in ({"base": 4}, {"epoch": 3, "version": 9}, {}, {"run": "other", "version": 9}):
                    bent = parcel._replace(offer=parcel.offer._replace(**change))
                    with pytest.raises(ProtocolError):
                        receiver._take(source, bent)
            assert is_whole(*receiver.latest())

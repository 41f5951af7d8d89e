"""Offers that a receiver refuses. Every transport runs the rest in transports/test_base.py."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from longhaul.weight_sync import receiver as receivers
from longhaul.weight_sync.protocol import NOTHING, ProtocolError
from longhaul.weight_sync.publisher import Publisher
from longhaul.weight_sync.receiver import Receiver
from longhaul.weight_sync.transports import connect, shared_memory, tcp
from tests.helpers.weight_sync_transports import is_whole, tensors, until


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


@pytest.mark.parametrize("given", [True, False])
def test_the_receiver_bounds_the_size_that_a_sender_names(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receivers, "machine_memory", lambda: 100)
    transport = tcp.serve()
    with Publisher("run", epoch=4, transports=[transport]) as sender:
        sender.publish(5, tensors(5))
        with Receiver(lambda: connect(transport.address), budget=1000 if given else None) as receiver:
            until(lambda: bool(receiver.errors))
            assert f"a budget of {1000 if given else 75:,} bytes" in receiver.errors[0]
            assert receiver.served is None and receiver.peak_bytes == 0

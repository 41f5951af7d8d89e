"""One program on each of several devices: the same bits as on one, traced once, and nothing shared."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longhaul.runtime import each_device
from longhaul.runtime.each_device import EachDevice


def test_devices_compute_what_one_does() -> None:
    traced = []

    def function(scale: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
        traced.append(x.shape)
        return {"sum": jnp.tanh(x @ x.T * scale).sum(), "x": x}

    devices = each_device.local(4)
    assert len(devices) == 4
    xs = np.random.default_rng(0).normal(size=(4, 16, 16)).astype(np.float32)
    several, alone = EachDevice(function, devices), EachDevice(function, devices[:1])
    found = several(several.put(np.float32(0.3)), [jax.device_put(x, d) for x, d in zip(xs, devices, strict=True)])
    assert traced == [(16, 16)]
    for x, own in zip(xs, found, strict=True):
        (wanted,) = alone(alone.put(np.float32(0.3)), [x])
        assert own["x"].tobytes() == x.tobytes() and own["sum"].tobytes() == wanted["sum"].tobytes()


def test_each_copy_lies_on_its_device() -> None:
    devices = each_device.local(3)
    copies = EachDevice(lambda x: x, devices).put({"w": np.ones(3)})
    assert [copy["w"].devices() for copy in copies] == [{device} for device in devices]


def test_arguments_for_another_number_of_devices_are_refused() -> None:
    program = EachDevice(lambda x: x, each_device.local(2))
    with pytest.raises(ValueError, match="arguments for 3 devices; give them for each of the 2"):
        program([1, 2, 3])


def test_no_more_devices_than_there_are() -> None:
    assert each_device.local(10_000) == tuple(jax.local_devices())

"""The conditions that conftest.py and pyproject.toml promise to every test do hold."""

from __future__ import annotations

import os
import warnings

import jax
import jax.numpy as jnp
import pytest


def test_there_are_four_devices_on_the_cpu() -> None:
    assert [device.platform for device in jax.devices()] == ["cpu"] * 4
    assert os.environ["NPROC"] == "4"


def test_rank_promotion_is_forbidden() -> None:
    with pytest.raises(ValueError, match="rank"):
        jnp.ones((3, 2)) + jnp.ones(2)


def test_warnings_are_errors() -> None:
    with pytest.raises(DeprecationWarning):
        warnings.warn("old", DeprecationWarning, stacklevel=1)

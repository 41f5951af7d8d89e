"""Device banks in shared memory: mapped as they were written; digests that tell banks and ways to drive apart."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest

from longhaul.driving.sim import device_bank, shared_bank
from longhaul.driving.sim.config import Config, Weights
from tests.helpers.driving_scenarios import bank, line, scenario

MADE = bank(scenario([line((0, 0), (8, 0), 20), line((30, 2), (5, 0), 20)], lights=[(12.0, [1] * 20)]))


@pytest.mark.parametrize("reactive", [False, True])
def test_a_bank_is_mapped_as_it_was_written_without_a_copy(reactive: bool) -> None:
    tables = device_bank.arrange(MADE, 1, reactive=reactive)
    with shared_bank.sharing(tables) as shared:
        found = shared_bank.mapped(shared.descriptor, [list(row) for row in shared.rows])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(shared.descriptor)
    assert jax.tree.structure(found) == jax.tree.structure(tables)
    for name, mapped, written, held in zip(
        found._fields, *map(jax.tree.leaves, (found, tables, jax.device_put(found))), strict=False
    ):
        np.testing.assert_array_equal(mapped, written, strict=True, err_msg=name)
        assert held.unsafe_buffer_pointer() == mapped.ctypes.data, f"{name} was copied"
        assert not mapped.flags.writeable
    assert shared_bank.digest(found, Config()) == shared_bank.digest(tables, Config())


def test_a_digest_tells_scenarios_and_ways_to_drive_apart() -> None:
    tables = device_bank.arrange(MADE, 1, reactive=False)
    cells = tables.cells.copy()
    cells[-1] ^= 1
    others = [
        (tables._replace(cells=cells), Config()),
        (tables, Config(weights=Weights(goal=3.0))),
        (tables, Config(start_speed=0.5)),
        (device_bank.arrange(MADE, 1, reactive=True), Config()),
    ]
    found = [shared_bank.digest(*pair) for pair in [(tables, Config()), *others]]
    assert len(set(found)) == len(found)
    # The name of the user's own reward may differ between machines.
    assert shared_bank.digest(tables, Config(reward="mine:pay")) == found[0]

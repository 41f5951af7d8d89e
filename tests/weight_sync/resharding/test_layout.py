"""Layouts by rule."""

from __future__ import annotations

from longhaul.weight_sync.resharding import layout


def test_uneven_parts_are_the_first_ones_larger_and_small_tensors_leave_ranks_empty() -> None:
    made = layout.sharded({"a": ((10, 3), "uint8"), "b": ((2,), "uint8"), "c": ((), "uint8")}, 4)
    a, b, c = made.tensors
    assert [box[0] for _, box in a.boxes] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert b.boxes == ((0, ((0, 1),)), (1, ((1, 2),)))
    assert c.boxes == tuple((rank, ()) for rank in range(4))

"""Shape of the device mesh, as plain data."""

from __future__ import annotations

from typing import NamedTuple


class MeshShape(NamedTuple):
    """Numbers of shards of the worlds and of parts of the parameters; a device holds one of each."""

    data: int | None  # None: as many as there are devices for
    model: int = 1

    def __str__(self) -> str:
        """The shape as `--mesh` takes it."""
        return f"data={self.data or 'all'}" + f",model={self.model}" * (self.model > 1)

"""Memory of images: a few blocks that are kept and reused, within a budget that is never exceeded.

The first touch of a block's pages costs eight times as much as a later one. An image is lent as a NumPy array; when the
last array over it is gone, wherever its readers had it, the block returns to the pool. An old version therefore lives
exactly as long as it is read (read-copy-update; McKenney and Slingwine, 1998), and Python's reference counts are the
only bookkeeping.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from typing import Any, NamedTuple

import numpy as np

from longhaul.runtime import shared_memory
from longhaul.weight_sync import shared_verification


class Image(NamedTuple):
    """A lent block; it returns to the pool when nothing refers to the array or a view of it."""

    array: np.ndarray  # uint8 [size]
    block: Block | None  # None: memory of another kind, which other processes can't map


class Block:
    """Shared memory without a name: its `descriptor` can be sent to another process, and to files and sockets.

    `notes` is a second descriptor, of a little memory that receivers may write (`shared_verification`).
    """

    def __init__(self, size: int, serial: int) -> None:
        self.size, self.serial = size, serial
        self.descriptor = shared_memory.create(size)
        self.map: Any = shared_memory.mapped(self.descriptor, size)
        shared_memory.allocate(self.map)
        self.notes = shared_memory.create(shared_verification.SIZE)
        self.spent = False  # True: another process may still read it, so it is never used again
        self._turns = (-1, 0)  # a version, and the receivers that were given it
        self._lock = threading.Lock()

    def turn(self, version: int) -> int:
        """Number of the next receiver that maps this version: 0, 1, 2 ..."""
        with self._lock:
            count = self._turns[1] if self._turns[0] == version else 0
            self._turns = (version, count + 1)
            return count

    def free(self) -> None:
        """Releases this process's part; the system frees the memory when no process has it mapped."""
        self.map = None  # unmapped with its last view
        if self.descriptor >= 0:
            os.close(self.descriptor)
            os.close(self.notes)
            self.descriptor = self.notes = -1


class Pool:
    """Blocks of one size, of at most `budget` bytes in all; `peak` is the most that it ever had.

    ValueError where not even `least` blocks fit.
    """

    def __init__(self, size: int, budget: int, least: int = 2) -> None:
        if budget < size * least:
            raise ValueError(
                f"a budget of {budget:,} bytes; {least} images of {size:,} bytes need {size * least:,}: raise it"
            )
        self.size, self.budget, self.peak = size, budget, 0
        self._blocks: dict[int, Block] = {}
        self._serial = 0
        self._lock = threading.Lock()
        self._back: queue.SimpleQueue[Block] = queue.SimpleQueue()  # its put is safe in a finaliser

    @property
    def bytes(self) -> int:
        """Bytes allocated now, lent or not."""
        return len(self._blocks) * self.size

    def take(self, seconds: float = 0.0) -> Image | None:
        """Image of any content; None where all of the budget is lent, and none returns within `seconds`."""
        block = self._returned(0.0) or self._allocated() or self._returned(seconds)
        return None if block is None else self._lent(block)

    def _returned(self, seconds: float) -> Block | None:
        with contextlib.suppress(queue.Empty):
            while True:
                block = self._back.get(timeout=seconds) if seconds > 0 else self._back.get_nowait()
                if not block.spent:
                    return block
                with self._lock:
                    self._blocks.pop(block.serial, None)
                block.free()
                if fresh := self._allocated():
                    return fresh
        return None

    def _allocated(self) -> Block | None:
        with self._lock:
            if self.bytes + self.size > self.budget:
                return None
            self._serial += 1
            block = self._blocks[self._serial] = Block(self.size, self._serial)
            self.peak = max(self.peak, self.bytes)
            return block

    def _lent(self, block: Block) -> Image:
        assert block.map is not None
        array = np.frombuffer(memoryview(block.map), np.uint8, block.size)
        # Every view of the array keeps this memoryview alive.
        weakref.finalize(array.base, self._back.put, block).atexit = False
        return Image(array, block)

    def close(self) -> None:
        """Frees all blocks that are not lent; a lent one is freed with its last reader."""
        with self._lock:
            for block in self._blocks.values():
                block.spent = True
            while not self._back.empty():
                block = self._back.get_nowait()
                self._blocks.pop(block.serial, None)
                block.free()
            for block in self._blocks.values():  # lent: the mapping outlives the descriptor
                block.free()
            self._blocks.clear()

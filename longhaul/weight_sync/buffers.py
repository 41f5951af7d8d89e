"""Memory for images: a few blocks that are kept and used again, within a budget that is never passed.

A block's pages are touched once, at its first use, which costs eight times as much as any later one. An image is lent
as a NumPy array; when the last array over it is gone, wherever its readers had it, the block comes back. So an old
version lives exactly as long as someone reads it (read-copy-update; McKenney and Slingwine, 1998), and the language's
own reference counts are the only bookkeeping.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import threading
import weakref
from typing import NamedTuple

import numpy as np

from longhaul.runtime import shared_memory
from longhaul.weight_sync import shared_verification


class Arriving:
    """How much of an image is in place, for who passes it on before all of it is.

    `counts` says whether its version does, as soon as that is known.
    """

    def __init__(self) -> None:
        self.counts: bool | None = None
        self._count, self._broken = 0, False
        self._changed = threading.Condition()

    def told(self, count: int) -> None:
        """The first `count` bytes are in place, and will not change."""
        with self._changed:
            self._count = count
            self._changed.notify_all()

    def broken(self) -> None:
        """No more will come."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def beyond(self, count: int, seconds: float) -> int:
        """How many bytes are in place, once they are more than `count`. TimeoutError; ConnectionError where no more
        come."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._broken or self._count > count, max(0.0, seconds)):
                raise TimeoutError("the image that is passed on does not come")
            if self._broken:
                raise ConnectionAbortedError("the image that is passed on was withdrawn")
            return self._count


class Image(NamedTuple):
    """A lent block: `array` is uint8 [size]; the block comes back when nothing refers to it or a view of it."""

    array: np.ndarray
    block: Block | None  # None: memory of another kind, which can't be mapped by others
    arriving: Arriving | None = None  # it may not be whole yet


class Block:
    """Shared memory without a name: `descriptor` may be sent to another process, and files and sockets read it.

    `notes` is a little more, which they may write (`ledger`).
    """

    def __init__(self, size: int, serial: int) -> None:
        self.size, self.serial = size, serial
        self.descriptor = shared_memory.create(size)
        self.map: mmap.mmap | None = mmap.mmap(self.descriptor, size)
        self.notes = shared_memory.create(shared_verification.SIZE)
        self.spent = False  # never to be used again: another process may still read it
        self._turns = (-1, 0)  # a version, and how many have it mapped
        self._lock = threading.Lock()

    def turn(self, version: int) -> int:
        """A number for the next who maps it with that version: 0, 1, 2 ..."""
        with self._lock:
            count = self._turns[1] if self._turns[0] == version else 0
            self._turns = (version, count + 1)
            return count

    def free(self) -> None:
        """Gives up our part of it; the system takes it back when nobody has it mapped."""
        self.map = None  # unmapped with its last view
        if self.descriptor >= 0:
            os.close(self.descriptor)
            os.close(self.notes)
            self.descriptor = self.notes = -1


class Pool:
    """Blocks of one size. `budget` bytes are all that it ever has at a time; `peak` is the most it had.

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
        self._back: queue.SimpleQueue[Block] = queue.SimpleQueue()  # whose put a finaliser may call at any moment

    @property
    def bytes(self) -> int:
        """What is allocated now, lent or not."""
        return len(self._blocks) * self.size

    def take(self, seconds: float = 0.0) -> Image | None:
        """An image of any content; None where the budget is lent out, and none comes back within `seconds`."""
        block = self._returned(0.0) or self._made() or self._returned(seconds)
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
                if made := self._made():
                    return made
        return None

    def _made(self) -> Block | None:
        with self._lock:
            if self.bytes + self.size > self.budget:
                return None
            self._serial += 1
            block = self._blocks[self._serial] = Block(self.size, self._serial)
            self.peak = max(self.peak, self.bytes)
            return block

    def _lent(self, block: Block) -> Image:
        assert block.map is not None
        array = np.frombuffer(block.map, np.uint8, block.size)
        # NumPy holds the map through a memoryview, which views of the array, and theirs, keep alive.
        weakref.finalize(array.base, self._back.put, block).atexit = False
        return Image(array, block)

    def close(self) -> None:
        """Gives up all that is not lent; what is goes with its last reader."""
        with self._lock:
            for block in self._blocks.values():
                block.spent = True
            while not self._back.empty():
                block = self._back.get_nowait()
                self._blocks.pop(block.serial, None)
                block.free()
            for block in self._blocks.values():  # lent: the mapping outlives its descriptor
                block.free()
            self._blocks.clear()

"""Child processes: start, supervision, end, and restarts with growing pauses.

Launched training processes, actors, the W&B follower and benchmarks are all a `Process`. A child that calls
`end_with_parent` never outlives its parent. `python -m longhaul.runtime.launch.process MODULE` does so before it runs a
module whose imports take seconds.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

from longhaul.runtime import heartbeat

LIFELINE = "LONGHAUL_LIFELINE"
"""Environment variable: file descriptor that reaches its end when the parent ends; the child then ends too."""

TIED = "longhaul.runtime.launch.process"
"""Module that runs another one, tied to its parent from the first moment on."""

INHERIT, DROP, PIPE = None, subprocess.DEVNULL, subprocess.PIPE
"""Destination of a child's output: the parent's own, none, or a stream that the parent reads."""

Take = Callable[[bytes], None]
"""Receiver of a child's output line by line, in a thread."""

Output = int | Take | IO[bytes] | None


class Process:
    """Child process.

        process = Process(command, payload=b"...", out=print)
        while process.ended() is None:
            ...
        process.end()  # nothing of it is left
    """  # fmt: skip

    def __init__(
        self, command: Sequence[str], *, variables: Mapping[str, str] | None = None, payload: bytes | None = None,
        talks: bool = False, descriptors: Sequence[int] = (), out: Output = INHERIT, error: Output = INHERIT,
        folder: str | None = None, session: bool = False, tied: bool = True,
    ) -> None:  # fmt: skip
        """`variables` is its whole environment; None: ours. `payload` is its standard input; with `talks` the input
        stays open for `say`. `descriptors` are inherited under the same numbers. With `session` it gets its own
        session, out of reach of a terminal's signals, and is killed with all its children. `tied`: it ends with this
        process, once it calls `end_with_parent`."""
        self._session, self._tied = session, tied
        lifeline, self._line = os.pipe() if tied else (-1, -1)
        environment = dict(os.environ if variables is None else variables) | ({LIFELINE: str(lifeline)} if tied else {})
        try:
            self._process = process = subprocess.Popen(
                list(command), env=environment, cwd=folder, start_new_session=session,
                pass_fds=(*descriptors, *([lifeline] if tied else [])),
                stdin=PIPE if talks or payload is not None else DROP,
                stdout=PIPE if callable(out) else out, stderr=PIPE if callable(error) else error,
            )  # fmt: skip
        except BaseException:
            if tied:
                os.close(self._line)
            raise
        finally:
            if tied:
                os.close(lifeline)
        self.id, self.out = process.pid, process.stdout
        pumps = [(process.stdout, out), (process.stderr, error)]
        self._pumps = [_pump(stream, take) for stream, take in pumps if stream is not None and callable(take)]
        if process.stdin is not None and not talks:
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # `ended` reports an early end
                pipe.write(payload or b"")
        elif process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)

    @property
    def code(self) -> int | None:
        """Exit code; negative: signal that killed it; None while it runs."""
        return self._process.poll()

    def ended(self) -> str | None:
        """Reason of its end in words; None while it runs."""
        code = self.code
        if code is None:
            return None
        return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"

    def stopped(self) -> bool:
        """True while it is stopped, for example by SIGSTOP."""
        return self.code is None and heartbeat.stopped(self.id)

    def say(self, data: bytes) -> bool:
        """Words to its standard input, without waiting; -> False if it is gone. A full pipe drops the words: thousands
        are unread."""
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), data)
        except BlockingIOError:
            pass
        except OSError:
            return False
        return self.code is None

    def hang_up(self) -> None:
        """End of its standard input."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def send(self, number: int) -> None:
        """Signal to it; nothing after its end."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill without waiting; with a session of its own, also of its children."""
        if not self._session:
            self._process.kill()
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.id, signal.SIGKILL)

    def wait(self, within: float | None = None) -> bool:
        """True if it ended within so many seconds; None waits without limit."""
        try:
            self._process.wait(timeout=within)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self, within: float = 0.0) -> None:
        """Wait so many seconds for its end, then kill it. Afterwards all its lines are taken and nothing of it is left;
        a child of its own that was not killed may hold its output open, which is not awaited."""
        running = not self.wait(within)
        if running or (self._session and self._tied):  # an untied child's children may go on
            self.kill()
        self.wait()
        for pump in self._pumps:
            pump.join()
        self.hang_up()
        if self.out is not None and not self._pumps:
            self.out.close()
        if self._line >= 0:
            os.close(self._line)
        self._line = -1


def _pump(stream: IO[bytes], take: Take) -> threading.Thread:
    """Thread that passes each line of `stream` to `take`."""

    def run() -> None:
        with stream, contextlib.suppress(OSError):  # the reader of our output is gone
            for line in stream:
                take(line)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def end_with_parent() -> None:
    """End this process at once when its parent ends, even if killed; does nothing without such a parent."""
    if LIFELINE not in os.environ:
        return
    lifeline = int(os.environ.pop(LIFELINE))
    if sys.platform == "linux":  # a thread would not run while the process is stopped
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def wait() -> None:
        while os.read(lifeline, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


class Restarts(NamedTuple):
    """Failures in a row without progress between them, and the pause before the next start."""

    allowed: int  # failures that another start follows
    first: float  # seconds before the first restart, doubled with each
    most: float  # seconds
    failures: int = 0

    def failed(self, *, progress: bool) -> Restarts:
        """State after another failure; `progress`: the failed process had worked, so the count restarts."""
        return self._replace(failures=1 if progress else self.failures + 1)

    @property
    def exhausted(self) -> bool:
        return self.failures > self.allowed

    @property
    def pause(self) -> float:
        """Seconds until the next start."""
        return min(self.most, self.first * 2.0 ** (self.failures - 1))


if __name__ == "__main__":
    end_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

"""Persistent cache of compiled programs, so that a restarted run need not wait for the compiler.

The store is JAX's own persistent cache. Decided here: its place, its size, its reports, and that no fault of it stops a
run.

    LONGHAUL_CACHE              off, or a folder (cache_dir.py)
    JAX_COMPILATION_CACHE_DIR   a folder, if LONGHAUL_CACHE is unset; else $XDG_CACHE_HOME/longhaul/xla,
                                which is ~/.cache/longhaul/xla

JAX's keys cover program, compiler, options and device. A CPU's programs also depend on the number of threads, by which
sums are cut (and with them their last bits), and on the processor, so each combination has its own folder. JAX does not
bound the store without a further package; here the least recently used entries are removed at a process's start. A
writer of the folder could make us run anything, so only the user has access.

Of several processes JAX lets only the first write. On GPUs and TPUs that is enough: all have the same keys. On the CPU
each process's programs have their own keys, so each process has its own folder.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from longhaul.runtime import files
from longhaul.runtime.cache_dir import MOST_BYTES, folder, say, setting, trim

COMPILE = "/jax/core/compile/backend_compile_duration"
HIT, MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"
"""Events of `jax.monitoring`: seconds of a compilation, or of reading the cache instead; a program that the cache had,
or lacked."""

FAULT = r"Error (reading|writing) persistent compilation cache entry for '([^']*)': (.*)"
"""JAX's warning of a fault of the cache: the verb, the program's name, the reason."""


def root() -> Path | None:
    """Folder of the store; None if it is off."""
    place = setting() or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if place == "off":
        return None
    return Path(place).expanduser().absolute() if place else folder("xla")


def subfolder(threads: int, *, on_cpu: bool, process: int = 0) -> str:
    """Folder below `root` of programs for this machine, and on the CPU for this process number."""
    if not on_cpu:
        return ""
    mine = f"cpu-{threads}-threads-{_processor()}"
    return mine if process == 0 else f"{mine}/process-{process}"


def _processor() -> str:
    """Digest of this processor's model and features: programs of one may not run on another."""
    about = [platform.machine()]
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        telling = r"(vendor_id|model name|flags|Features)\b"
        about += sorted(line for line in text.splitlines() if re.match(telling, line))
    except OSError:
        about.append(platform.processor())
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:12]


def enable(threads: int, *, on_cpu: bool, process: int = 0) -> Path | None:
    """Enable the cache; -> its folder, None if it is off or not possible.

    `threads` are those of the CPU's programs, `process` is this process's number. A second call changes nothing.
    """
    store = root()
    if store is None:
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    folder = store / subfolder(threads, on_cpu=on_cpu, process=process)
    if jax.config.jax_compilation_cache_dir == str(folder):  # type: ignore[attr-defined, unused-ignore]
        return folder
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "it can't be written")
        limit = jax.config.jax_compilation_cache_max_size  # type: ignore[attr-defined, unused-ignore]
        trim(store, "*-cache", MOST_BYTES if limit < 0 else limit)
    except OSError as error:
        say(f"no compilation cache in {folder} ({error.strerror}): programs are compiled anew")
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    jax.config.update("jax_compilation_cache_max_size", -1)  # a bound of JAX's own needs a package that we do not
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    _quieten(folder)
    if process > 0 and on_cpu and not _allow_writes():
        say("this JAX keeps programs of process 0 alone: this process compiles its own anew at each start")
    return folder


def _allow_writes() -> bool:
    """Let this process write too, though it is not the first; -> False if this JAX does not allow it.

    JAX 0.10 to 0.12 have no option for it: their writer returns at once in all processes but 0.
    """
    try:
        from jax._src import compilation_cache, compiler

        write, put = compiler._cache_write, compilation_cache.put_executable_and_time
    except (ImportError, AttributeError):
        return False
    names = ["cache_key", "compile_time_secs", "module_name", "backend", "executable"]
    takes = [list(inspect.signature(function).parameters) for function in (write, put)]
    if takes[0][:5] != names or takes[1] != ["cache_key", "module_name", "executable", "backend", "compile_time"]:
        return False

    def mine(key: str, seconds: float, name: str, backend: Any, executable: Any, callbacks: Any = ()) -> None:
        if callbacks:  # callbacks of Python are lost with the process
            return
        try:
            put(key, name, executable, backend, int(seconds))
        except Exception as error:  # in JAX's words, which `_quieten` knows
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"Error writing persistent compilation cache entry for '{name}': {reason}", stacklevel=2)

    compiler._cache_write = mine  # type: ignore[assignment]
    return True


def _quieten(folder: Path) -> None:
    """Turn JAX's warning of a program into one line; remove a broken entry, so that it is written again."""
    before, warned = warnings.showwarning, False

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        nonlocal warned
        fault = re.match(FAULT, str(message), re.DOTALL)
        if fault is None:
            before(message, category, filename, lineno, file, line)
            return
        verb, name, reason = fault.groups()
        for broken in folder.glob(f"{name}-*-cache"):  # JAX never replaces a torn one
            try:
                broken.unlink(missing_ok=True)
            except OSError:
                break
        if not warned:
            short = " ".join(reason.split())[:200]
            say(f"the compilation cache in {folder} failed in {verb} {name} ({short}); it was compiled anew")
        warned = True

    warnings.showwarning = show
    warnings.filterwarnings("always", message="Error (reading|writing) persistent compilation cache entry")


TIMES = "compile-times.json"
"""File of the cache's folder: digest of a program -> seconds that it took the last time."""

MOST_TIMES = 1000


def _times() -> tuple[Path | None, dict[str, float]]:
    """(the file, its content); None where there is no cache."""
    place = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined, unused-ignore]
    if not place or not jax.config.jax_enable_compilation_cache:  # type: ignore[attr-defined, unused-ignore]
        return None, {}
    file = Path(place) / TIMES
    try:
        return file, {str(key): float(seconds) for key, seconds in json.loads(file.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return file, {}


def _digest(program: Any) -> str:
    return hashlib.sha256(json.dumps([jax.__version__, program], sort_keys=True).encode()).hexdigest()[:16]


def seconds_before(program: Any) -> float | None:
    """Seconds that `program`, as JSON describes it, took to compile or to load the last time; None if not known."""
    return _times()[1].get(_digest(program))


def remember(program: Any, seconds: float) -> None:
    """Record of the seconds for the next time."""
    file, known = _times()
    if file is not None:
        known.pop(_digest(program), None)
        newest = dict([*known.items(), (_digest(program), round(seconds, 2))][-MOST_TIMES:])
        with suppress(OSError):
            files.write(file, json.dumps(newest))


class Ledger:
    """Compilations of this process since it was opened; `close` it."""

    def __init__(self) -> None:
        self.seconds = 0.0  # in the compiler, or reading the cache
        self.hits = 0
        self.misses = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE:
            self.seconds += duration_secs

    def _on_event(self, event: str, **_: str | int) -> None:
        self.hits += event == HIT
        self.misses += event == MISS

    @property
    def summary(self) -> str:
        """Origin of the programs in words."""
        if not self.hits + self.misses:
            return "no compilation cache"
        return f"{self.hits} of {self.hits + self.misses} programs from the compilation cache"

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

"""Runs of every kind that are killed at random moments, under limits and with a jumping clock, and must end as if not.

    python -m benchmarks.chaos --minutes 60 [--kinds ppo,actors] [--hits kill,descriptors] [--seed 0] [--json FILE]
                               [--scratch DIR]

A kind is a recipe in a topology (`KINDS`). It is trained once undisturbed, when its first turn comes. Then it is
trained again and again: each process lives in a hit's circumstances (`HITS`) until a random moment, at which all of its
processes get SIGKILL, or one time in four SIGTERM; of those that `longhaul launch` looks after, one alone every other
time. The last start is left alone. Its run must end with exit code 0 and, where the kind is exact, with the parameters
of the undisturbed one, bit for bit; no process may end by a traceback, nor outlive the others. The table has a row for
each kind and hit. Two runs go on at once. No time limit counts the seconds in which this program itself stood still.
Root's runs are those of users without rights, by setpriv. The clock jumps by `jumping_clock.c`, which is compiled at
the start; there, too, no process may count as hung.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[1]

POLES = "--env numpy/longhaul.envs.host.numpy_cartpole:cartpole"

SMALL = "--num-envs 16 --num-steps 16 --hidden-dim 16 --num-layers 1 --evaluation-episodes 4 --threads 1"

LONGEST = 900.0
"""Seconds after which a process that should end hangs: a run of a minute, beside others on a full machine."""

FURTHEST = 86_400 * 10**9
"""Nanoseconds that a clock may be wrong by, forward and back."""

HUNG = "has not begun to work for|was silent for|heartbeat"
"""Words of one who takes another process for hung, `longhaul launch`, a learner or JAX."""


class Awake:
    """Clock that stands while this program does, as do the runs, which are suspended with it."""

    def __init__(self, tick: float = 0.5) -> None:
        self.seconds, self.gaps, self._tick, self._last = 0.0, 0, tick, time.monotonic()

    def run(self) -> None:
        while True:
            time.sleep(self._tick)
            now = time.monotonic()
            passed, self._last = now - self._last, now
            self.seconds += min(passed, 20 * self._tick)
            self.gaps += passed > 20 * self._tick


AWAKE = Awake()


class Kind(NamedTuple):
    flags: str
    updates: int  # until the end
    steps: int  # of an update
    exact: bool = True  # the parameters at the end follow from the seed
    from_saves: bool = False  # and from which saves there are
    own: str = ""  # words before `train`
    line: int = 5  # updates of a line of metrics
    save: int = 20  # updates between saves


KINDS = {
    "ppo": Kind(f"cartpole {SMALL}", 300, 256),
    "impala": Kind(f"impala-cartpole {SMALL}", 300, 256),
    "dqn": Kind("cartpole-dqn --hidden-dim 16 --evaluation-episodes 4 --threads 1", 800, 32, line=16, save=64),
    "sac": Kind("pendulum-sac --hidden-dim 16 --evaluation-episodes 4 --threads 1", 640, 8, line=16, save=64),
    "population": Kind(f"cartpole {SMALL} --seeds 3", 200, 256),
    "actors": Kind(
        f"cartpole {POLES} {SMALL} --topology actors --actors 2 --staleness 1 --pin", 150, 256, line=3, save=12
    ),
    "central": Kind(f"cartpole {POLES} {SMALL} --topology central --actors 2", 100, 256, exact=False, line=2, save=8),
    "hackmatrix": Kind(
        "hackmatrix --num-envs 16 --num-steps 16 --hidden-dim 8 --evaluation-episodes 2", 60, 256, line=1, save=4
    ),
    "driving": Kind(
        "driving --scenarios 8 --num-envs 8 --num-steps 16 --hidden-dim 16 --evaluation-episodes 2",
        30,
        128,
        line=1,
        save=3,
    ),
    "reasoning": Kind("reasoning-arithmetic --num-envs 8 --evaluation-episodes 16", 10, 3584, line=1, save=2),
    "launch": Kind(f"cartpole {SMALL}", 200, 256, own="launch --hosts 2 --devices-per-host 1 --restarts 9 --"),
    "nan": Kind(
        f"ppo --env tests.helpers.nan_environment:poles {SMALL} --rollbacks 50", 150, 256, from_saves=True, save=10
    ),
}
"""Recipe kinds and topologies. In `nan` some rewards are not numbers: the run goes back to its newest save, around
them."""


class Hit(NamedTuple):
    """Circumstances of a process: limits that are set before it begins, something done while it lives."""

    limits: Mapping[str, int] = {}  # prlimit's names
    jumps: bool = False  # its clock is wrong
    meanwhile: Callable[[Path, random.Random], None] = lambda folder, rng: None
    saves: bool = True  # False: some of a process's saves fail


def deny(folder: Path, rng: random.Random) -> None:
    """The right to write checkpoints, or gives it back."""
    if (folder / "checkpoints").is_dir():
        (folder / "checkpoints").chmod(rng.choice([0o500, 0o700]))


def jump(folder: Path, rng: random.Random) -> None:
    """The clock of a run's processes, to any moment of the day before or after."""
    with clock(folder).open("r+b") as moved:  # the processes have it in their memory
        moved.write(struct.pack("q", rng.randrange(-FURTHEST, FURTHEST)))


def clock(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.clock")


HITS = {
    "kill": Hit(),
    "descriptors": Hit({"nofile": 64}),
    "disk": Hit({"fsize": 1 << 14}, saves=False),
    "memory": Hit({"as": 3 << 30}),
    "clock": Hit(jumps=True, meanwhile=jump),
    "threads": Hit({"nproc": 200}),
    "permissions": Hit(meanwhile=deny, saves=False),
}
"""All but the first are lifted for the last process. Root has any right and any number of threads, so that `threads`
and `permissions` need another user."""

DROPS = shlex.split(
    "setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
)
DROPS = DROPS if os.getuid() == 0 and shutil.which("setpriv") else []
"""Program by which root's runs are another user's, who may read all and write nothing but its own."""


def usable() -> list[str]:
    drops = os.getuid() != 0 or bool(DROPS)
    missing = {"threads": not drops, "permissions": not drops, "clock": shutil.which("cc") is None}
    return [name for name in HITS if not missing.get(name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of undisturbed and of disturbed runs")
    parser.add_argument("--kills", type=int, default=1 << 30, help="end after so many, too")
    parser.add_argument("--kinds", default=",".join(KINDS), help="names, separated by commas")
    parser.add_argument("--hits", default=",".join(usable()), help="likewise")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="add each row to this file, too, at once")
    parser.add_argument("--scratch", type=Path, help="folder that is kept: undisturbed runs there are not made again")
    args = parser.parse_args()
    kinds, hits = args.kinds.split(","), args.hits.split(",")
    for name, known in [(each, KINDS) for each in kinds] + [(each, HITS) for each in hits]:
        if name not in known:
            parser.error(f"there is no {name!r}; there are {', '.join(known)}")
    rows: list[dict[str, Any]] = []
    turn, lock = turns(kinds, hits, random.Random(args.seed)), Lock()
    whole, first = dict[str, str | None](), {kind: Lock() for kind in kinds}
    Thread(target=AWAKE.run, daemon=True).start()
    with ExitStack() as ends, ThreadPoolExecutor(args.at_once) as pool:
        scratch = Path(args.scratch or ends.enter_context(tempfile.TemporaryDirectory())).resolve()
        scratch.mkdir(exist_ok=True)
        scratch.chmod(0o777)
        if "clock" in hits:
            build_clock(scratch)
        until = AWAKE.seconds + 60 * args.minutes

        def work(number: int) -> None:
            while AWAKE.seconds < until and sum(row["kills"] for row in rows) < args.kills:
                with lock:
                    kind, hit, seed = next(turn)
                with first[kind]:
                    if kind not in whole:
                        whole[kind] = undisturbed(kind, scratch)
                row = disturbed(kind, hit, whole[kind], scratch / f"run-{number}", random.Random(seed))
                print(json.dumps(row), file=sys.stderr, flush=True)
                with lock:
                    rows.append(row)
                    if args.json:
                        with args.json.open("a") as lines:
                            lines.write(json.dumps(row) + "\n")

        for done in [pool.submit(work, number) for number in range(args.at_once)]:
            done.result()
    show(rows)
    return 1 if any(row["wrong"] for row in rows) else 0


def build_clock(scratch: Path) -> None:
    """Compiles what moves the clocks of the runs of a folder."""
    source, library = ROOT / "benchmarks" / "jumping_clock.c", scratch / "clock.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)


def turns(kinds: list[str], hits: list[str], rng: random.Random) -> Iterator[tuple[str, str, float]]:
    """(Kind, hit, seed) without an end: every kind in turn; every other time a kill alone."""
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            yield kind, hits[0] if rng.random() < 0.5 else rng.choice(hits), rng.random()


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'kind':12} {'hit':12} {'runs':>5} {'kills':>6} {'as undisturbed':>15} {'seconds':>8}  wrong")
    for kind, hit in sorted({(row["kind"], row["hit"]) for row in rows}):
        cases = [row for row in rows if (row["kind"], row["hit"]) == (kind, hit)]
        same = f"{sum(row['same'] for row in cases)} of {len(cases)}" if exact(kind, hit) else "not exact"
        wrong = "; ".join(row["wrong"] for row in cases if row["wrong"]) or "nothing"
        kills, seconds = sum(row["kills"] for row in cases), sum(row["seconds"] for row in cases)
        print(f"{kind:12} {hit:12} {len(cases):>5} {kills:>6} {same:>15} {seconds:>8.0f}  {wrong}")
    print(f"{'together':25} {len(rows):>5} {sum(row['kills'] for row in rows):>6}")


def exact(kind: str, hit: str) -> bool:
    """True if a run ends with the parameters of an undisturbed one."""
    return KINDS[kind].exact and (HITS[hit].saves or not KINDS[kind].from_saves)


def undisturbed(kind: str, scratch: Path) -> str | None:
    """Digest of the parameters at the end; the cache of compiled programs is full then, too."""
    folder = scratch / f"whole-{kind}"
    if (reference := digest(folder)) is not None:
        return reference
    shutil.rmtree(folder, ignore_errors=True)
    process, began = start(kind, folder, Hit()), time.monotonic()
    code = ended(process, 2 * LONGEST)
    if code:
        raise SystemExit(f"{kind} undisturbed ends with {code}: {log(folder)[-2000:]}")
    print(f"{kind} undisturbed: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return digest(folder)


def disturbed(kind: str, hit: str, whole: str | None, folder: Path, rng: random.Random) -> dict[str, Any]:
    """One run with four to sixteen kills, or fewer if it ends before."""
    began, wrong, codes, gaps = time.monotonic(), "", Counter[int](), AWAKE.gaps
    shutil.rmtree(folder, ignore_errors=True)
    log_file(folder).unlink(missing_ok=True)
    clock(folder).write_bytes(bytes(8))
    kills, errors = 0, list[str]()  # by processes that ended with an error before their moment
    for _ in range(rng.randrange(4, 17)):
        process = start(kind, folder, HITS[hit])
        killed = live(process, folder, HITS[hit], rng, KINDS[kind])
        kills += killed
        code = process.returncode
        codes[code] += 1
        if not killed and code:
            errors.append(" ".join(plain(log(folder), folder).split())[-300:])
        if "Traceback" in log(folder) and not killed:
            kept = folder.with_name(f"wrong-{kind}-{hit}-{time.time():.0f}.log")
            shutil.copy(log_file(folder), kept)
            wrong = f"ended by a traceback with {code} (whole in {kept.name}): {plain(log(folder), folder)[-300:]!r}"
        if HITS[hit].jumps and gaps == AWAKE.gaps and (hung := re.search(HUNG, log(folder))):
            wrong = f"a process counts as hung: {log(folder)[hung.start() :][:300]!r}"
        if code == 0:
            break
    if (folder / "checkpoints").is_dir():
        (folder / "checkpoints").chmod(0o700)
    process = start(kind, folder, Hit())
    if (code := ended(process, LONGEST)) is None:
        end(process, signal.SIGKILL)
        code, wrong = -1, "hangs"
    same = digest(folder) == whole
    if not wrong and code:
        wrong = f"ends with {code}: {log(folder)[-300:]!r}"
    if not wrong and exact(kind, hit) and not same:
        wrong = "other parameters"
    seconds = round(time.monotonic() - began, 1)
    wrong = plain(wrong, folder)
    about = {"kind": kind, "hit": hit, "kills": kills, "codes": dict(codes), "same": same, "seconds": seconds}
    return about | {"said": errors, "wrong": wrong}


def live(process: subprocess.Popen[bytes], folder: Path, hit: Hit, rng: random.Random, kind: Kind) -> int:
    """Kills of a process at random moments: within its start, or behind one to four lines of progress. One that it
    launches may be killed alone."""
    done, until, kills = updates(folder), AWAKE.seconds + LONGEST, 0
    while True:
        moment = time.monotonic() + rng.uniform(0.0, 8.0)
        early, done = rng.random() < 0.5, done + rng.randrange(4)
        while process.poll() is None and AWAKE.seconds < until:
            if (early and time.monotonic() >= moment) or (not early and updates(folder) > done):
                break
            time.sleep(0.02)
            if rng.random() < 0.05:
                hit.meanwhile(folder, rng)
        if not early:
            time.sleep(rng.uniform(0.0, 0.3))
        hit.meanwhile(folder, rng)
        if process.poll() is not None:
            return kills
        kills, done = kills + 1, updates(folder)
        members = psutil.Process(process.pid).children() if kind.own else []
        if not members or rng.random() < 0.5:
            asks = rng.random() < 0.25 and not kind.from_saves  # a run that is asked to stop makes one more save
            end(process, signal.SIGTERM if asks else signal.SIGKILL)
            return kills
        with suppress(psutil.NoSuchProcess):
            rng.choice(members).kill()  # the launcher starts it again, and lives to the next moment


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Exit code of a process; None where it takes longer."""
    until = AWAKE.seconds + seconds
    while (code := process.poll()) is None and AWAKE.seconds < until:
        time.sleep(0.05)
    return code


def end(process: subprocess.Popen[bytes], number: int) -> None:
    """A signal to all processes of a session; who does not end within two minutes is killed. So is no child of theirs,
    in a session of its own, which must end by itself."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    try:
        os.killpg(process.pid, number)
        if ended(process, 120.0) is None:
            os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    until = AWAKE.seconds + 60.0
    while (left := psutil.wait_procs(children, 1)[1]) and AWAKE.seconds < until:
        pass
    if left:
        raise SystemExit(f"{[each.cmdline() for each in left]} outlive their parent by a minute")


def start(kind: str, folder: Path, hit: Hit) -> subprocess.Popen[bytes]:
    about = KINDS[kind]
    words = ["train", *shlex.split(about.flags)]
    if (folder / "run.json").exists():
        words = ["train", words[1], "--resume", folder.name]
    else:
        shutil.rmtree(folder, ignore_errors=True)  # it was killed before it said what it is
        words += ["--total-steps", str(about.updates * about.steps), "--run-name", folder.name]
        words += ["--log-interval", str(about.line), "--save-interval", str(about.save)]
    program = [sys.executable, "-m", "longhaul", *shlex.split(about.own), *words, "--runs-dir", str(folder.parent)]
    variables = {
        "JAX_PLATFORMS": "cpu", "LONGHAUL_CACHE": str(folder.parent / "cache"), "PYTHONPATH": str(ROOT),
        "HOME": str(folder.parent),
        "PYTHONDONTWRITEBYTECODE": "" if hit.saves else "1",  # Python keeps half of a file that did not fit
        "PYTHONPYCACHEPREFIX": str(folder.parent / "bytecode"),  # else each start compiles what it imports
    }  # fmt: skip
    if hit.jumps:
        variables |= {"LD_PRELOAD": str(folder.with_name("clock.so")), "JUMPING_CLOCK": str(clock(folder))}
    limits = [f"--{name}={most}" for name, most in hit.limits.items()]
    with log_file(folder).open("wb") as output:
        return subprocess.Popen(
            [*DROPS, "prlimit", *limits, *program] if limits else [*DROPS, *program], cwd=folder.parent, umask=0,
            env=os.environ | variables, start_new_session=True, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def log_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")


def log(folder: Path) -> str:
    """What the newest process of a run said."""
    return log_file(folder).read_text(errors="replace")


def plain(text: str, folder: Path) -> str:
    """Text without this machine's paths, as rows are kept."""
    for place in (folder.parent, ROOT, sys.prefix, sys.base_prefix):
        text = text.replace(f"{place}/", "")
    return text


def updates(folder: Path) -> int:
    """Lines of metrics so far."""
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def digest(folder: Path) -> str | None:
    try:
        result = json.loads((folder / "result.json").read_text())
    except OSError:
        return None
    return json.dumps(result.get("params_sha256") or [each["params_sha256"] for each in result["members"]])


if __name__ == "__main__":
    sys.exit(main())

"""Health checks of a run: findings that begin and end, from its records one after the other.

A finding begins when a value passes its bound and ends when it is well back within it, so that a value at the bound is
reported once. Values are medians of a few records: one odd record is no finding. A rising return is detected from the
means of `BLOCKS` stretches of the window by Mann and Kendall's trend test (Mann 1945, Kendall 1975) and Theil and Sen's
slope (Sen 1968), which are robust to outliers and to changes of spread.

All is a function of the records: a resumed run replays the earlier ones and reaches the same state.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from longhaul.runtime.config_fields import FREE, setting

Record = Mapping[str, Any]

BLOCKS = 12
"""Stretches of the window whose mean returns are compared."""

WARM_UP = 0.03
"""Share of a run at its start in which a healthy run has extreme values."""

SMOOTH, MOST_SMOOTH = 0.02, 5
"""Share of the run's records in the median of a value, and the most records in it."""

MEMORY = 1024
"""Records kept for medians of the past."""

USUAL = {"sps": "speed", "value_loss": "value loss"}
"""Metrics whose past is kept, with the check that compares them with it."""

BACK = 0.8
"""Share of an upper bound below which a finding ends."""

FLAT, CERTAIN = 1.0, 2.33
"""Standard deviations of Kendall's S: below the first there is no trend; 1 % of curves without a trend pass the second.
"""

LITTLE = 0.05
"""Share of the total gain below which a gain over the window counts as none."""

COOL = 0.25
"""Share of the largest learning rate below which a flat return is the effect of annealing."""

LONGER, LOST = 1.2, 0.5
"""Growth of episodes' length that counts as stalling; share of the gain whose loss counts as a loss of return."""

SLOW, SLOW_SECONDS = 0.5, 30.0
"""Share of its own median below which speed is low, and the seconds for which it must be."""

SILENCE = 0.1
"""Share of a run in which some episode should end."""

NOTHING = -0.1
"""Explained variance of a critic that is worse than its targets' mean, whose value is 0."""

EXPLODES = 100.0
"""Multiple of its own median at which the value loss counts as exploding."""

EPISODES = ("episode", "episodes", "peak", "eval")
"""Groups of metrics on episodes."""


def of_learning(name: str) -> str | None:
    """Common name of a learning metric, "ppo/entropy" -> "entropy"; None for other metrics."""
    group, slash, rest = name.partition("/")
    return rest if slash and group not in EPISODES else None


@dataclass(frozen=True)
class Bounds:
    """Bounds of a healthy run. None disables a check, or chooses its bound."""

    watch: bool = setting(True, "report when a run becomes unhealthy, or recovers", resume=FREE, flag="health")
    entropy: float | None = setting(
        None, "nats below which the policy has collapsed; none: chosen by the actions", resume=FREE
    )
    kl: float | None = setting(0.06, "approx_kl above which the policy moves too far an update; none: any", resume=FREE)
    clip: float | None = setting(0.30, "clip fraction above which too many steps are cut off; none: any", resume=FREE)
    window: float | None = setting(
        0.25, "share of the run in which the return should rise; none: it need not", resume=FREE
    )
    solved: float | None = setting(
        None, "mean return from which on it need not rise; none: there is no such", resume=FREE
    )


class Plan(NamedTuple):
    """Planned size of a run."""

    updates: int
    entropy: float | None = None  # nats below which a policy with these actions has collapsed
    longest: int = 0  # updates in the longest episode; 0: unknown


class Reading(NamedTuple):
    """Result of one check at one record."""

    value: float
    bound: float
    bad: bool  # a finding begins
    good: bool  # a finding ends; if neither, the state stays
    says: str  # "entropy is 0.01 nats, below 0.03"
    since: int | None = None  # update; None: the record's


class Finding(NamedTuple):
    check: str
    value: float  # at its start
    bound: float
    says: str
    remedy: str
    since: int  # update
    until: int | None = None  # update at which it ended; None while it lasts


class Event(NamedTuple):
    """Start (`until` is None) or end of a finding."""

    update: int
    finding: Finding

    def line(self) -> str:
        """The event as one line."""
        finding = self.finding
        if finding.until is None:
            return f"warning: {finding.says} (since update {finding.since}); {finding.remedy}"
        return f"over: {finding.check}, from update {finding.since} to {finding.until}"


class Block(NamedTuple):
    """Episodes that ended in a stretch of updates."""

    update: int  # of its first record
    returns: float
    length: float


REMEDIES = {
    "finite": "the run is lost: go back to a checkpoint before, with a lower --lr or --max-grad-norm",
    "lr": "nothing is learnt: give --lr a value above 0",
    "entropy": "the policy hardly explores any more: raise --ent-coef, or lower --lr",
    "kl": "the policy moves too far an update: lower --lr or --update-epochs, or set --kl-stop",
    "clip": "most steps are cut off: lower --lr or --update-epochs, or enlarge the batch",
    "value loss": "lower --lr, or scale the rewards with --reward-scale",
    "critic": "values say less than their mean: scale the rewards with --reward-scale, or lower --lr",
    "episodes": "no return is reported: see that episodes end, or that they have a time limit",
    "plateau": "stop where that is good enough; else change --ent-coef or --lr, or enlarge the batch",
    "stalling": "the agent plays for time: reward what ends an episode well, or make waiting cost something",
    "loss of return": "go back to a checkpoint before, with a lower --lr or a smaller --clip-eps",
    "speed": "see what else runs on this machine, and longhaul doctor RECIPE",
}
"""Remedy of every check, in the order of reports."""

GRAVE = ("finite", "lr", "entropy", "kl", "clip", "value loss", "critic", "episodes", "loss of return")
"""Findings that fail a run if they last to its end; the others are for a human to judge."""


class Past:
    """State of the checks after the records so far."""

    def __init__(self, plan: Plan, bounds: Bounds):
        self.plan, self.bounds = plan, bounds
        self.now: dict[str, float] = {}
        self.update = 0
        self._recent: deque[dict[str, float]] = deque(maxlen=MOST_SMOOTH)
        self._series: dict[str, deque[float]] = {name: deque(maxlen=MEMORY) for name in USUAL}
        self._calls: deque[tuple[float, float]] = deque(maxlen=MEMORY)  # (agent steps, seconds) of each record
        self._smooth: int | None = None
        self._steps = 0.0
        self.lr, self.largest_lr = math.inf, 0.0
        self.heard = 0  # last update with an ended episode
        self.first: Block | None = None
        self.best = -math.inf  # median of three blocks
        self.blocks: deque[Block] = deque(maxlen=BLOCKS)
        self.returns = self.lengths = Trend(0.0, 0.0, 0.0)  # over the blocks, from three blocks on
        self._open: list[tuple[int, float, float, float]] = []  # update, episodes, their returns, their lengths

    @property
    def warm(self) -> bool:
        return self.update > WARM_UP * self.plan.updates

    def add(self, record: Record, ill: Container[str]) -> None:
        """Add one more record; a series with a lasting finding (`ill`) leaves its usual values as they are."""
        self.now = {name: _number(value) for name, value in record.items() if not isinstance(value, str)}
        since, self.update = self.update, int(record["update"])
        if self._smooth is None:
            planned = self.plan.updates / max(self.update, 1)
            self._smooth = int(min(max(SMOOTH * planned, 1), MOST_SMOOTH))
        metrics = self.now | {short: value for name, value in self.now.items() if (short := of_learning(name))}
        self.lr = metrics.get("lr", math.inf)
        self._recent.append(metrics)
        for name, series in self._series.items():
            if self.warm and USUAL[name] not in ill and math.isfinite(value := metrics.get(name, math.nan)):
                series.append(value)
        steps, sps = self.now.get("agent_steps", math.nan), self.now.get("sps", math.nan)
        if steps > self._steps and sps > 0:
            self._calls.append((steps - self._steps, (steps - self._steps) / sps))
        self._steps = steps
        self.largest_lr = max(self.largest_lr, metrics.get("lr", 0.0))
        self._add_episodes(since)

    def _add_episodes(self, since: int) -> None:
        """Add ended episodes to blocks."""
        count, returns = self.now.get("episode/count", 0.0), self.now.get("episode/return", math.nan)
        if count > 0:
            self.heard = self.update
        if count > 0 and math.isfinite(returns):
            self._open.append((since, count, count * returns, count * self.now.get("episode/length", math.nan)))
        window = (self.bounds.window or 1.0) * self.plan.updates / BLOCKS
        if self._open and self.update - self._open[0][0] >= window:
            counts = sum(each[1] for each in self._open)
            means = (sum(each[i] for each in self._open) / counts for i in (2, 3))
            self.blocks.append(Block(self._open[0][0] + 1, *means))
            self.first = self.first or self.blocks[0]
            if len(self.blocks) >= 3:
                self.best = max(self.best, self.level())
                self.returns = trend([block.returns for block in self.blocks])
                self.lengths = trend([block.length for block in self.blocks])
            self._open = []

    def recent(self, name: str) -> float | None:
        """Median of the last records' values; None if there is none. Learning metrics lack the algorithm's name."""
        values = [record[name] for record in list(self._recent)[-(self._smooth or 1) :] if name in record]
        values = [value for value in values if math.isfinite(value)]
        return statistics.median(values) if values else None

    def usual(self, name: str) -> float | None:
        """Median over the past of a kept series; None if it is too short."""
        series = self._series[name]
        return statistics.median(series) if len(series) >= 4 * MOST_SMOOTH else None

    def speed(self) -> float | None:
        """Median of agent steps a second over the records of the last `SLOW_SECONDS`; None before there are enough.

        Neither one long record (a laptop that slept) nor many short ones in one bad moment change it.
        """
        rates, seconds = [], 0.0
        for steps, passed in reversed(self._calls):
            rates.append(steps / passed)
            seconds += passed
            if seconds >= SLOW_SECONDS and len(rates) >= MOST_SMOOTH:
                return statistics.median(rates)
        return None

    def level(self) -> float:
        """Median return of the last three blocks, which must exist."""
        return statistics.median(block.returns for block in list(self.blocks)[-3:])

    def gained(self) -> float:
        """Largest gain of the return since the first block, over three blocks at least."""
        return self.best - self.first.returns if self.first and math.isfinite(self.best) else 0.0

    def solved(self) -> bool:
        """True if the return of the last blocks need not rise further."""
        bound = self.bounds.solved
        return bound is not None and len(self.blocks) >= 3 and self.level() >= bound


class Trend(NamedTuple):
    """Mann and Kendall's trend test of a curve, with Theil and Sen's slope."""

    z: float  # Kendall's S in standard deviations, above 0 for rising values
    gain: float  # Sen's slope from the first value to the last
    noise: float  # deviation of a value from its neighbours'


def trend(values: Sequence[float]) -> Trend:
    """Trend of at least three values at equal distances; ties count as neither rise nor fall."""
    n = len(values)
    pairs = [(j - i, values[j] - values[i]) for i, j in itertools.combinations(range(n), 2)]
    s = sum((rise > 0) - (rise < 0) for _, rise in pairs)
    ties = [len(list(same)) for _, same in itertools.groupby(sorted(values))]
    variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    z = (s - (s > 0) + (s < 0)) / math.sqrt(variance) if variance > 0 else 0.0
    steps = [abs(b - a) for a, b in itertools.pairwise(values)]
    noise = 1.4826 * statistics.median(steps) / math.sqrt(2.0)
    return Trend(z, (n - 1) * statistics.median(rise / apart for apart, rise in pairs), noise)


def _number(value: Any) -> float:
    """NaN for null, as files have it."""
    return math.nan if value is None else float(value)


# ------------------------------------------------------------------------------------------------------------ checks


def _below_bound(past: Past, metric: str, bound: float | None, name: str, unit: str = "") -> Reading | None:
    """Reading of a value that must stay below a bound."""
    value = past.recent(metric)
    if bound is None or value is None or not past.warm:
        return None
    says = f"{name} is {value:.3g}{unit}, above {bound:.3g}{unit}"
    return Reading(value, bound, value > bound, value < BACK * bound, says)


def _finite(past: Past) -> Reading:
    ended = past.now.get("episode/count", 0.0) > 0
    odd = [
        name
        for name, value in past.now.items()
        if not math.isfinite(value) and (ended or not name.startswith("episode/"))
    ]
    shown = ", ".join(odd[:3]) + ", ..." * (len(odd) > 3)
    return Reading(len(odd), 0, bool(odd), not odd, f"no finite number: {shown}")


def _lr(past: Past) -> Reading | None:
    value = past.recent("lr")
    if value is None or not past.warm or past.update > 0.99 * past.plan.updates:
        return None
    return Reading(value, 0.0, value == 0.0, value > 0.0, "the learning rate is 0")


def _entropy(past: Past) -> Reading | None:
    value, bound = past.recent("entropy"), past.bounds.entropy
    bound = past.plan.entropy if bound is None else bound
    if value is None or bound is None or not past.warm:
        return None
    back = bound + 0.1 * max(abs(bound), 0.01)
    return Reading(value, bound, value < bound, value > back, f"entropy is {value:.3g} nats, below {bound:.3g}")


def _value_loss(past: Past) -> Reading | None:
    usual = past.usual("value_loss")
    return _below_bound(past, "value_loss", EXPLODES * usual, "value loss") if usual else None


def _critic(past: Past) -> Reading | None:
    """Explained variance; harmless once the return has risen: targets of a solved task hardly differ."""
    value = past.recent("explained_variance")
    if value is None or len(past.blocks) < BLOCKS:
        return None
    learnt = past.gained() > max(4.0 * past.returns.noise, 0.0)
    says = f"explained variance is {value:.3g}, below {NOTHING}, and the return has not risen"
    return Reading(value, NOTHING, value < NOTHING and not learnt, value > 0.0 or learnt, says)


def _episodes(past: Past) -> Reading:
    silent, bound = past.update - past.heard, max(math.ceil(SILENCE * past.plan.updates), past.plan.longest)
    since = past.heard + 1
    return Reading(silent, bound, silent > bound, silent == 0, f"no episode ended in {silent} updates", since)


def _plateau(past: Past) -> Reading | None:
    if past.bounds.window is None or len(past.blocks) < BLOCKS:
        return None
    z, gain, noise = past.returns
    enough = max(noise, LITTLE * past.gained())
    flat = z < FLAT and gain <= enough
    cool = past.lr < COOL * past.largest_lr
    first, last = past.blocks[0], past.blocks[-1]
    says = f"the return has not risen: {last.returns:.4g}, {gain:+.2g} over {past.update - first.update} updates"
    bad = flat and not cool and not past.solved()
    return Reading(gain, enough, bad, (z > CERTAIN and gain > enough) or past.solved(), says, first.update)


def _stalling(past: Past) -> Reading | None:
    if past.bounds.window is None or len(past.blocks) < BLOCKS:
        return None
    if not all(math.isfinite(block.length) for block in past.blocks):
        return None
    longer, length, rises = past.lengths, past.blocks[-1].length, past.returns.z
    growth = 1.0 + longer.gain / max(length - longer.gain, 1e-9) if longer.gain < length else math.inf
    bad = longer.z > CERTAIN and growth > LONGER and rises < FLAT and not past.solved()
    says = f"episodes got {growth:.2f} times as long ({length:.4g}) while the return stood still"
    good = longer.z < FLAT or rises > CERTAIN or past.solved()
    return Reading(growth, LONGER, bad, good, says, past.blocks[0].update)


def _lost(past: Past) -> Reading | None:
    if len(past.blocks) < 4:
        return None
    gained = past.gained()
    if gained <= max(4.0 * past.returns.noise, 0.0):
        return None
    lost = (past.best - past.level()) / gained
    says = f"the return lost {lost:.0%} of what it had gained: {past.level():.4g} after {past.best:.4g}"
    return Reading(lost, LOST, lost > LOST and not past.solved(), lost < 0.6 * LOST, says)


def _speed(past: Past) -> Reading | None:
    value, usual = past.speed(), past.usual("sps")
    if value is None or usual is None:
        return None
    bound = SLOW * usual
    says = f"{value:,.0f} agent steps a second, less than half of the usual {usual:,.0f}"
    return Reading(value, bound, value < bound, value > 1.4 * bound, says)


CHECKS: dict[str, Callable[[Past], Reading | None]] = {
    "finite": _finite,
    "lr": _lr,
    "entropy": _entropy,
    "kl": lambda past: _below_bound(past, "approx_kl", past.bounds.kl, "approx_kl", " nats"),
    "clip": lambda past: _below_bound(past, "clip_fraction", past.bounds.clip, "clip fraction"),
    "value loss": _value_loss,
    "critic": _critic,
    "episodes": _episodes,
    "plateau": _plateau,
    "stalling": _stalling,
    "loss of return": _lost,
    "speed": _speed,
}
"""Check by name; None means no reading yet."""


class Watch:
    """Findings of a run, record by record. `readings` are the last of each check."""

    def __init__(self, plan: Plan, bounds: Bounds):
        self._past = Past(plan, bounds)
        self._lasting: dict[str, Finding] = {}
        self._over: list[Finding] = []
        self.readings: dict[str, Reading] = {}

    def look(self, record: Record) -> list[Event]:
        """Events of this record."""
        self._past.add(record, self._lasting)
        update, events = self._past.update, []
        for check, read in CHECKS.items():
            reading = read(self._past)
            if reading is None:
                continue
            self.readings[check] = reading
            lasting = self._lasting.get(check)
            if lasting is None and reading.bad:
                since = update if reading.since is None else reading.since
                lasting = Finding(check, reading.value, reading.bound, reading.says, REMEDIES[check], since)
                self._lasting[check] = lasting
                events.append(Event(update, lasting))
            elif lasting is not None and reading.good:
                over = self._lasting.pop(check)._replace(until=update)
                self._over.append(over)
                events.append(Event(update, over))
        return events

    def findings(self) -> list[Finding]:
        """All findings so far, ended ones too, by their start."""
        return sorted([*self._over, *self._lasting.values()], key=lambda finding: finding.since)


def review(records: Iterable[Record], plan: Plan, bounds: Bounds) -> Watch:
    """Watch after all `records`."""
    watch = Watch(plan, bounds)
    for record in records:
        watch.look(record)
    return watch

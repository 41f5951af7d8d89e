"""Scaling checklist of a recipe: measurements with verdicts before a run on many devices."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from longhaul.algorithms import batch_scaling, registry
from longhaul.algorithms.config import LR_RULES, precision
from longhaul.config import recipes
from longhaul.config.resolve import agents, resolve
from longhaul.config.run import Run
from longhaul.diagnostics import hlo
from longhaul.diagnostics.chips import least_seconds
from longhaul.diagnostics.compiled_run import Program, compiled, smaller
from longhaul.runtime import device_memory, overlap, partition
from longhaul.runtime import mesh as meshes
from longhaul.runtime.batch_shards import VIRTUAL
from longhaul.runtime.device_memory import size as _bytes
from longhaul.runtime.errors import RunError
from longhaul.runtime.mesh import FSDP, MODEL
from longhaul.telemetry import sinks
from longhaul.telemetry.aggregate import Sums
from longhaul.topologies import fused
from longhaul.training.assemble import learning_rate
from longhaul.training.data import Feeding

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"
VERDICTS = (PASS, WARN, FAIL, SKIP)
"""Verdicts of a check. `SKIP` means not measured; `remedy` says what is needed."""

HEADER = ("check", "verdict", "value", "bound", "remedy")

STILL = 1e-6
"""Bound of approx_kl in nats at a learning rate of 0: rounding alone."""

COARSE = 100.0
"""Factor on `STILL` for less precise products; a mistake gives far more."""

SHORT = 4
"""Updates of a short run."""

SMALL_BYTES, SMALL_COUNT = 16_384, 16
"""Bounds in bytes and count of an update's small collectives: sums of metrics, moments of advantages and observations.
"""

WARM = 0.25
"""Largest share of a cold compilation that loading from the cache may take."""

SLOW_COLLECTIVES, SLOWER_COLLECTIVES = 0.2, 0.5
"""Shares of an update spent in all-reduces that warn, and that fail."""

STALLED, MORE_STALLED = 0.05, 0.25
"""Shares of the time that devices wait for the host that warn, and that fail."""

PATIENCE = 20.0
"""Seconds of training simulated, at most, while the next chunk is prepared."""

LEAST_SEEDS = 5
"""Seeds of each side: the smallest chance that 5 against 5 can give is 0.008."""

UNLIKELY = 0.01
"""Chance below which two sides count as different."""

LITTLE = 0.1
"""Share of the gain by which the sides may differ, however sure the difference is."""

GROWN = 4.0
"""Multiple of the recipe's batch from which an unchanged learning rate warns."""


class Check(NamedTuple):
    """One row of `longhaul doctor`."""

    name: str
    verdict: str  # one of VERDICTS
    value: str  # measured value in words with its unit
    bound: str = ""
    remedy: str = ""  # one sentence, unless the verdict is `pass`
    figures: Mapping[str, Any] = {}  # the value for programs

    def plain(self) -> dict[str, Any]:
        """The check as JSON can hold it."""
        return {**dict(zip(HEADER, self[:5])), "figures": dict(self.figures)}


def failed(checks: Iterable[Check]) -> list[str]:
    """Names of failed checks."""
    return [check.name for check in checks if check.verdict == FAIL]


def judged(name: str, verdict: str, value: str, bound: str, remedy: str, **figures: Any) -> Check:
    """Check that has its remedy unless it passes."""
    return Check(name, verdict, value, bound, "" if verdict == PASS else remedy, figures)


def within(name: str, value: str, bound: str, remedy: str, *, good: bool, **figures: Any) -> Check:
    """Check that passes or fails."""
    return judged(name, PASS if good else FAIL, value, bound, remedy, **figures)


def skipped(name: str, why: str, remedy: str) -> Check:
    return Check(name, SKIP, why, "", remedy)


def sizes(run: Run) -> tuple[Check, Run | None]:
    """Validity of the sizes; and the resolved run."""
    try:
        resolved = resolve(run)
    except RunError as error:
        return Check("sizes", FAIL, "don't fit", "must divide", str(error), {}), None
    assert resolved.devices is not None
    steps = batch(resolved)
    work = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if _works(run, n)]
    value = (
        f"{steps:,} steps an update, {resolved.total_steps // steps:,} updates; works on {_ranges_text(work)} devices"
    )
    return Check("sizes", PASS, value, figures={"steps": steps, "devices": work}), resolved


def _works(run: Run, devices: int) -> bool:
    try:
        resolve(dataclasses.replace(run, devices=devices))
    except RunError:
        return False
    return True


def _ranges_text(numbers: Sequence[int]) -> str:
    """ "1, 2, 4": powers of two without gaps as "1 to 64"."""
    if len(numbers) > 2 and all(b == 2 * a for a, b in itertools.pairwise(numbers)):
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))


def batch(run: Run) -> int:
    """Agent steps of an update, over all devices."""
    return run.num_envs * agents(run) * run.num_steps


def rate(run: Run) -> Check:
    """Learning rate's rule and effective batch."""
    assert run.devices is not None
    config, steps = registry.on_policy(run.algorithm), batch(run)
    assert config.num_minibatches is not None and config.update_epochs is not None
    lr = learning_rate(run)
    taken, minibatch = config.num_minibatches * config.update_epochs, steps // config.num_minibatches
    value = (
        f"lr {lr:.4g} (rule {run.lr_rule}); batch {steps:,}, {steps // run.devices:,} a device; "
        f"{taken} steps of the optimiser an update, of {minibatch:,} each"
    )
    figures = {
        "lr": lr, "rule": run.lr_rule, "batch": steps, "devices": run.devices, "minibatch": minibatch,
        "optimiser_steps": taken, "eight_times": {rule: lr * batch_scaling.lr_factor(rule, 8, 1)
                                                 for rule in LR_RULES},
    }  # fmt: skip
    if run.recipe in recipes.RECIPES:
        recipe = recipes.recipe(run.recipe)
        grown = steps / batch(recipe)
        if run.lr_rule == "none" and config.lr == recipe.algorithm.lr and grown >= GROWN:
            remedy = f"the batch is {grown:g} times the recipe's at the same lr: --lr-rule sqrt --base-batch "
            bound = f"batch < {GROWN:g} x the recipe's"
            return Check("learning rate", WARN, value, bound, f"{remedy}{batch(recipe)}", figures)
    return Check("learning rate", PASS, value, figures=figures)


def still(run: Run) -> Check:
    """Divergence of the learner's policy from the actor's at a learning rate of 0, which must be 0.

    Parameters are random: a policy close to uniform gives similar outputs for any observation, which hides a mistake.
    """
    assert run.devices is not None
    program = compiled(resolve(smaller(run, devices=run.devices, lr=0.0, ent_coef_final=None, kl_stop=None)))
    progress = program.start(run.seed)
    _, rows = program.updates(progress._replace(state=_random_state(progress.state, run.seed)), SHORT)
    kl = float(abs(rows[f"{run.algorithm.name}/approx_kl"]).max())
    bound = STILL if precision(run.algorithm) == "fp32" else COARSE * STILL
    verdict = PASS if kl < bound else WARN if kl < COARSE * bound else FAIL
    remedy = "acting and learning round apart: compare --precision fp32" if verdict == WARN else (
        "what is learnt from is not what was seen while acting: is an observation, mask or memory mixed up?"
    )  # fmt: skip
    return judged("lr 0", verdict, f"approx_kl {kl:.1e}", f"< {bound:g}", remedy, approx_kl=kl)


def _random_state(state: Any, seed: int) -> Any:
    """An algorithm's state with random parameters, scaled such that activations keep their size."""
    rng = np.random.default_rng(seed)

    def scatter(leaf: jax.Array) -> jax.Array:
        size = 1.0 / np.sqrt(leaf.shape[0]) if leaf.ndim > 1 else 0.1
        noise = size * rng.standard_normal(leaf.shape)
        return jax.device_put(np.asarray(leaf + noise, leaf.dtype), leaf.sharding)

    return state._replace(params=jax.tree.map(scatter, state.params))


@contextmanager
def fresh_cache() -> Iterator[Path]:
    """Context with an empty persistent compilation cache, whatever the user's settings are."""
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
             "jax_persistent_cache_min_entry_size_bytes")  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    with tempfile.TemporaryDirectory(prefix="longhaul-doctor-") as folder:
        try:
            for name, value in zip(names, (True, folder, 0.0, 0), strict=True):
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            yield Path(folder)
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()


def compilation(run: Run) -> tuple[Check, Program]:
    """Seconds of compilation, cold and from a persistent cache; and the program."""
    with fresh_cache():
        cold = compiled(run)
        warm = compiled(run, cold.source)
    figures = {
        "trace_seconds": cold.trace_seconds, "compile_seconds": cold.compile_seconds, "cached": warm.hit,
        "cached_seconds": warm.compile_seconds,
    }  # fmt: skip
    value = (
        f"traced in {cold.trace_seconds:.1f} s, compiled in {cold.compile_seconds:.1f} s, "
        f"from the cache in {warm.compile_seconds:.1f} s"
    )
    bound = f"from the cache <= {WARM:.0%}"
    if not warm.hit:
        remedy = "the same program was compiled twice: something in it differs from run to run, an address or a time"
        return judged("compilation", FAIL, value, bound, remedy, **figures), cold
    slow = warm.compile_seconds > max(WARM * cold.compile_seconds, 1.0)
    remedy = "loading takes as long as compiling: keep the cache on a faster disk"
    return judged("compilation", WARN if slow else PASS, value, bound, remedy, **figures), cold


def memory(program: Program) -> Check:
    """Memory of the program against the device's."""
    footprint = device_memory.footprint(program.executable, program.assembly.mesh)
    if footprint is None:
        return skipped("memory", "the compiler does not say", "watch the first update")
    value = f"{_bytes(footprint.need.total)} a device, {_bytes(footprint.need.temporaries)} of it while it computes"
    figures = footprint.plain()
    if footprint.capacity is None:
        return Check("memory", PASS, value, figures=figures)
    bound = f"{device_memory.TIGHT:.0%} of {_bytes(footprint.capacity)}"
    verdict = FAIL if footprint.refusal() else WARN if footprint.warning() else PASS
    return judged("memory", verdict, value, bound, device_memory.REMEDY, **figures)


def host(program: Program) -> Check:
    """Transfers to the host inside the program: none but the metrics at its end."""
    calls = hlo.host_calls(program.text())
    rows = jax.tree.leaves(program.executable.out_info[1])
    home = sum(leaf.size * leaf.dtype.itemsize for leaf in rows)
    value = f"{len(calls)} inside; {_bytes(home)} of metrics after a call of {program.run.block} updates"
    remedy = f"take the callback out of what is compiled: {', '.join(sorted(set(calls)))}"
    return within("host copies", value, "0 inside", remedy, good=not calls, calls=calls, metrics_bytes=home)


def crossings(program: Program) -> Check:
    """Collectives over shards: one mean of the gradients an optimiser step, some numbers an update, nothing else.

    A mean is an all-reduce; in a deterministic run an all-to-all and an all-gather (`batch_shards.mean_in_order`).
    Collectives among the devices that share the parameters follow from their partition; they are reported, not judged,
    but for those of `--fsdp`.
    """
    if program.assembly.mesh.shape[meshes.FSDP] > 1:
        return _fetches(program)
    model, per_update = program.assembly.mesh.shape[meshes.MODEL], program.optimiser_steps
    exchange = _expected(program)
    collectives = hlo.crossings(program.text())
    across = [each for each in collectives if each.over_shards(model)]
    within_shard = [each for each in collectives if not each.over_shards(model)]
    gradients = [each for each in across if each.bytes >= exchange.least.get(each.operation, math.inf)]
    others = [each for each in across if each not in gradients]
    counts = {kind: _times(each for each in gradients if each.operation == kind) for kind in exchange.least}
    times, moved = max(counts.values()), _moved(gradients)
    count, extra = _times(others), _moved(others)
    odd = sorted({each.operation for each in others} - {"all-reduce", *exchange.least})
    if exchange.bucketed:
        fits = times % per_update == 0 and per_update * exchange.gradient <= moved
        fits &= moved <= per_update * (exchange.whole + SMALL_BYTES)
    else:
        fits = set(counts.values()) == {per_update}
        fits &= moved <= per_update * (exchange.whole + len(exchange.least) * SMALL_BYTES)
    steps = 1 + (registry.on_policy(program.run.algorithm).kl_stop is not None) * per_update  # the KL stop reduces too
    most = SMALL_COUNT * len(exchange.least)
    good = fits and not odd and extra <= SMALL_BYTES * steps and count <= most * steps
    named = " and ".join(f"{kind}s" for kind in exchange.least)
    value = (
        f"{' and '.join(map(str, counts.values()))} {named} of {_bytes(moved / max(times, 1))}, {count} others of "
        f"{_bytes(extra)} in all, an update"
    )
    if within_shard:
        value += f"; {_times(within_shard)} of {_bytes(_moved(within_shard))} among {model} parts of the model"
    remedy = (
        f"{', '.join(odd)} cross devices: see that nothing is sharded that each device needs whole"
        if odd else "gradients must meet in one mean: give the whole tree to `mean` at once, and nothing else"
    )  # fmt: skip
    bound = f"{per_update} {named} of {_bytes(exchange.whole)}{', in buckets' * exchange.bucketed}, <= {most} others"
    return within(
        "collectives", value, bound, remedy, good=good, devices=program.assembly.mesh.size, gradients=times,
        gradient_bytes=moved, others=count, other_bytes=extra,
        operations=sorted({each.operation for each in across}), within=_moved(within_shard),
    )  # fmt: skip


class _Exchange(NamedTuple):
    """Expected exchange of the gradients over the shards in an optimiser step."""

    least: dict[str, int]  # kind of collective -> fewest bytes of one that carries gradients
    gradient: int  # bytes of a device's gradients
    whole: int  # bytes of all collectives together
    bucketed: bool  # gradients travel in parts, which meet while others are computed


def _expected(program: Program) -> _Exchange:
    data, model = program.assembly.mesh.shape[meshes.DATA], program.assembly.mesh.shape[meshes.MODEL]
    gradient = 4 * program.parameters // model
    if program.run.deterministic:  # slices of all shards' gradients to each device, then each summed slice to all
        least = {"all-to-all": gradient * VIRTUAL // data, "all-gather": gradient}
        return _Exchange(least, gradient, sum(least.values()), False)
    bucketed = model == 1 and gradient > overlap.BUCKET
    least = {"all-reduce": overlap.least() if bucketed else gradient}
    return _Exchange(least, gradient, program.own_bytes, bucketed)


def _times(collectives: Iterable[hlo.Crossing]) -> int:
    """Number of times that collectives run in an update."""
    return sum(each.times() for each in collectives)


def _moved(collectives: Iterable[hlo.Crossing]) -> int:
    """Bytes that they move in an update."""
    return sum(each.times() * each.bytes for each in collectives)


def _fetches(program: Program) -> Check:
    """Gathers of the parameters that lie in parts over `fsdp`: an update takes each once to act, and an optimiser step
    once forwards and once backwards. Of stacked layers a gather may take one."""
    mesh, shapes = program.assembly.mesh, jax.eval_shape(lambda: program.start(0).state)
    sizes = {MODEL: mesh.shape[MODEL], FSDP: mesh.shape[FSDP]}
    params, pieces, whole = program.assembly.algorithm.policy(shapes).params, set[int](), 0
    specs = jax.tree.leaves(partition.specs_on(params, mesh), is_leaf=lambda each: isinstance(each, PartitionSpec))
    for leaf, spec in zip(jax.tree.leaves(params), specs, strict=True):
        axes = [name for names in spec if names for name in ((names,) if isinstance(names, str) else names)]
        if FSDP in axes:
            size = leaf.size * leaf.dtype.itemsize // math.prod(sizes[axis] for axis in axes if axis != FSDP)
            whole += size
            pieces |= {size} | ({size // leaf.shape[0]} if leaf.ndim > 2 else set())
    across = [each for each in hlo.crossings(program.text()) if each.over_shards(sizes[MODEL])]
    gathers = [each for each in across if each.operation == "all-gather" and each.bytes in pieces]
    others = sum(each.times() * each.bytes for each in across if each not in gathers)
    passes, moved = 2 * program.optimiser_steps + 1, sum(each.times() * each.bytes for each in gathers)
    count = sum(each.times() for each in gathers)
    value = f"{_bytes(moved)} of parameters in {count} gathers, {_bytes(others)} else, an update"
    return within(
        "collectives", value, f"{passes} times {_bytes(whole)} of parameters that lie in parts",
        "a parameter is gathered twice for one use: see that what the network does with it is written once",
        good=0 < moved <= passes * whole, devices=mesh.size, gathered_bytes=moved, passes=passes, split_bytes=whole,
        other_bytes=others, operations=sorted({each.operation for each in across}),
    )  # fmt: skip


def determinism(program: Program) -> tuple[Check, float]:
    """Equality of two runs of the same seed, bit for bit; and the seconds of an update."""
    digests = []
    for _ in range(2):
        progress, _ = program.updates(program.start(program.run.seed), SHORT)
        digests.append(program.digest(progress))
    seconds = update_seconds(program)
    value = f"{digests[0][:12]} and {digests[1][:12]} after {SHORT} updates, {seconds:.3g} s each"
    remedy = "some sum is taken in an order that changes: on a GPU, XLA_FLAGS=--xla_gpu_deterministic_ops=true"
    good = digests[0] == digests[1]
    return within("determinism", value, "equal", remedy, good=good, digests=digests, update_seconds=seconds), seconds


def update_seconds(program: Program) -> float:
    """Seconds of an update, after the first ones."""
    progress, _ = program.updates(program.start(program.run.seed), 1)
    began = time.perf_counter()
    program.updates(progress, SHORT)
    return (time.perf_counter() - began) / SHORT


def all_reduce(program: Program, update_seconds: float) -> Check:
    """Time of a mean of all gradients over the mesh, and its share of an update."""
    mesh, shards, n, size = program.assembly.mesh, program.assembly.shards, 10, program.own_bytes // 4
    if mesh.shape[FSDP] > 1:
        return skipped("all-reduce", "gradients meet in parts, amid the backward pass", "ask without --fsdp")
    if mesh.shape[meshes.DATA] < 2:
        return skipped("all-reduce", "one device", "ask again with --mesh data=N on a machine with several devices")

    def shard(x: jax.Array) -> jax.Array:
        times: jax.Array = shards.each(
            lambda number, carry: (carry, jax.lax.fori_loop(0, n, lambda i, y: shards.mean(y) + 1e-3, x))
        )(())[1]
        return times

    everywhere = PartitionSpec()
    work = jax.jit(meshes.per_shard(shard, mesh, (everywhere,), everywhere))
    x = meshes.everywhere(jnp.zeros(size, jnp.float32), mesh)
    seconds = least_seconds(work, x) / n
    share = seconds * program.optimiser_steps / update_seconds
    verdict = FAIL if share > SLOWER_COLLECTIVES else WARN if share > SLOW_COLLECTIVES else PASS
    value = f"{1e3 * seconds:.3g} ms for {_bytes(4 * size)}, {share:.1%} of an update on {mesh.size} devices"
    remedy = "larger minibatches (fewer --num-minibatches or --update-epochs, more --num-envs), or fewer devices"
    return judged(
        "all-reduce", verdict, value, f"<= {SLOW_COLLECTIVES:.0%}", remedy, seconds=seconds, share=share,
        devices=mesh.size, bytes=4 * size,
    )  # fmt: skip


def stalls(program: Program, update_seconds: float, *, calls: int = 6) -> Check:
    """Time that devices wait for the host: between calls, and at the next chunk of streamed data."""
    assert program.run.block is not None
    block = program.run.block
    waited, total = _between_calls(program, calls)
    figures: dict[str, Any] = {"between_calls": waited / total, "calls": calls, "block": block}
    share = waited / total
    value = f"{share:.1%} between calls of {block} updates"
    if program.source.period is not None:
        train = program.source.period * update_seconds
        turn = _chunk_gap(program, min(train, PATIENCE))
        figures |= {"turn_seconds": turn, "turn_share": turn / (turn + train)}
        share += turn / (turn + train)
        value += f", {turn:.2g} s for the next chunk each {program.source.period} updates"
    verdict = FAIL if share > MORE_STALLED else WARN if share > STALLED else PASS
    remedy = (
        "more updates a call (--block, --log-interval), or of streamed data a larger --bank, a longer --bank-updates"
    )
    return judged("stalls", verdict, value, f"<= {STALLED:.0%}", remedy, **figures)


def _between_calls(program: Program, calls: int) -> tuple[float, float]:
    """(seconds that devices waited, seconds in all) of calls in the order of training, logged one behind."""

    def ended(rows: Any) -> float:
        jax.block_until_ready(rows)
        return time.perf_counter()

    assert program.run.block is not None
    sent, ends, sums, behind = [], [], Sums(), None
    progress, rows = program.updates(program.start(program.run.seed), program.run.block)
    with (
        ThreadPoolExecutor(1) as watcher,
        tempfile.TemporaryDirectory() as folder,
        closing(sinks.jsonl(Path(folder) / "metrics.jsonl")) as sink,
    ):
        for i in range(calls):
            sent.append(time.perf_counter())
            progress, rows = program.call(progress, program.run.block)
            ends.append(watcher.submit(ended, rows))
            if behind is not None:
                sums.add(program.run.block, jax.device_get(behind))
                sink.write({"update": i, "env_steps": i, "agent_steps": i} | sums.take())
            behind = rows
    ready = [end.result() for end in ends]
    waited = sum(max(0.0, later - done) for later, done in zip(sent[1:], ready))
    return waited, ready[-1] - sent[0]


def _chunk_gap(program: Program, train: float) -> float:
    """Seconds from the end of a chunk to the start of the next, prepared during `train` seconds."""
    assert program.source.period is not None
    with closing(Feeding(program.source)) as feeding:
        progress = program.start(program.run.seed)
        count = meshes.everywhere(jnp.int32(1), program.assembly.mesh)
        jax.block_until_ready(program.executable(progress, feeding.now.context, count))
        time.sleep(train)
        progress = program.start(program.run.seed)
        began = time.perf_counter()
        feeding.turn(program.source.period)
        jax.block_until_ready(fused.entered(progress, program.assembly.enter, feeding.now.context))
        return time.perf_counter() - began


# ---------------------------------------------------------------------------------------------------- convergence


class Comparison(NamedTuple):
    difference: float  # of the means, second less first
    chance: float  # of a difference at least as large, if both were the same
    gained: float  # mean gain of the return from the first update on
    spread: float  # standard error of the difference


def curve(program: Program, seed: int, updates: int) -> np.ndarray:
    """Mean return of the episodes that ended in each update, NaN if none did: float64 [updates]."""
    _, rows = program.updates(program.start(seed), updates)
    counts = rows.get("episodes/return", rows["episodes"])
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(counts > 0, np.asarray(rows["episode/return"], np.float64) / counts, np.nan)


def permutation_chance(first: Sequence[float], second: Sequence[float]) -> float:
    """Share of all assignments of the values to two such sides whose means differ at least as much (Fisher 1935).

    It needs no normal distribution and no equal variances; with few seeds it can never be very small.
    """
    returns, n = np.array([*first, *second], np.float64), len(first)
    seen = abs(returns[:n].mean() - returns[n:].mean())
    total = returns.sum()
    picked = np.array([returns[list(some)].sum() for some in itertools.combinations(range(len(returns)), n)])
    apart = np.abs(picked / n - (total - picked) / (len(returns) - n))
    return float(np.mean(apart >= seen * (1.0 - 1e-9)))


def compare(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> Comparison | None:
    """Comparison of the mean returns in the second halves of two sides' curves, at least two each; None if no episode
    ended in one of them."""
    later = [[each[len(each) // 2 :] for each in side] for side in (first, second)]
    if not all(np.any(np.isfinite(half)) for side in later for half in side):
        return None
    alone, together = ([float(np.nanmean(half)) for half in side] for side in later)
    starts = [float(each[np.isfinite(each)][0]) for each in (*first, *second)]
    gained = statistics.fmean((*alone, *together)) - statistics.fmean(starts)
    spread = math.sqrt(statistics.variance(alone) / len(alone) + statistics.variance(together) / len(together))
    difference = statistics.fmean(together) - statistics.fmean(alone)
    return Comparison(difference, permutation_chance(alone, together), gained, spread)


def convergence(alone: Program, many: Program, *, seeds: int, updates: int) -> Check:
    """Short curves of one device against many at the same batch: an exact permutation test over seeds.

    Other numbers of devices draw other random numbers, so only distributions over seeds can be compared.
    """
    sides = [[curve(each, seed, updates) for seed in range(seeds)] for each in (alone, many)]
    result, devices = compare(*sides), many.assembly.mesh.size
    if result is None:
        return skipped("convergence", f"no episode ended in {updates} updates", "give more --updates")
    enough = LITTLE * abs(result.gained)
    good = result.chance > UNLIKELY or abs(result.difference) <= enough
    value = (
        f"{result.difference:+.3g} +- {result.spread:.2g} in return on {devices} devices (chance {result.chance:.2g}), "
        f"of {result.gained:+.3g} gained in {updates} updates by {seeds} seeds"
    )
    remedy = "devices learn something else together: look at what is averaged over them, and what each draws"
    figures = {**result._asdict(), "seeds": seeds, "updates": updates, "devices": devices,
               "curves": [[each.tolist() for each in side] for side in sides]}  # fmt: skip
    bound = f"chance > {UNLIKELY:g}, or a difference within {LITTLE:.0%} of the gain"
    return within("convergence", value, bound, remedy, good=good, **figures)

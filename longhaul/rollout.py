"""Experience: a collector for training, and episodes for evaluation."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from longhaul import prng
from longhaul.environment import Advise, Tally, Worlds, WorldsState
from longhaul.spaces import Measure
from longhaul.types import (
    ENVIRONMENT,
    INFERENCE,
    Act,
    Collector,
    Environment,
    Guided,
    Key,
    Metrics,
    Params,
    Pathwise,
    PyTree,
    Rollout,
    Successors,
)


class Guide(NamedTuple):
    """Expert beside the policy, consulted at every step."""

    advise: Advise
    share: float  # of the worlds, rounded up, the first ones: there the expert's action is taken where it is known


class Carry(NamedTuple):
    """State between two rollouts; leaves start with [W] or [B], so that a mesh can split them."""

    worlds: WorldsState
    observation: PyTree  # [B, ...]
    memory: PyTree  # [B, ...]


def _where_column(condition: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Leaves of `new` where condition [B], else of `old`."""

    def choose(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(condition.reshape(-1, *([1] * (x.ndim - 1))), x, y)

    return jax.tree.map(choose, new, old)


def _keep(slots: PyTree, used: jax.Array, truncated: jax.Array, successor: PyTree) -> PyTree:
    """Slots [K, B, ...] with the successors of truncated steps written to each column's next free one."""

    def write(slot: jax.Array, value: jax.Array) -> jax.Array:
        column = jnp.arange(value.shape[0])
        if slot.shape[0] == 1:
            return _where_column(truncated, value, slot[0])[None]
        where = jnp.where(truncated, used, slot.shape[0])  # out of range: dropped
        return slot.at[where, column].set(value, mode="drop")

    return jax.tree.map(write, slots, successor)


def collector(
    worlds: Worlds,
    act: Act,
    memory: Callable[[int], PyTree],
    *,
    steps: int,
    unroll: int = 1,
    guide: Guide | None = None,
) -> Collector:
    """Collector of rollouts of `steps` steps of every world; with a `guide`, their extras are `Guided`.

    For each rollout fresh episodes of a world are drawn: one for every 8 steps, at most 16. A rollout's metrics are
    sums over the episodes that ended in it; their number is "episodes". The sums are "episode/return", "episode/length"
    and each "episode/NAME" of the environment, which was valid in "episodes/NAME" of them; "peak/NAME" is the greatest
    value of `Spec.peaks`, -inf where none was valid. Raises ValueError for fewer than 1 step.
    """
    if steps < 1:
        raise ValueError(f"num_steps is {steps}; at least 1 is needed")
    starts = min(16, math.ceil(steps / 8))
    slots = math.ceil(steps / (worlds.spec.truncation_interval or steps))
    has_agents = worlds.spec.agents is not None
    led = math.ceil((guide.share if guide else 0.0) * worlds.worlds) * (worlds.columns // worlds.worlds)

    def start(key: Key) -> Carry:
        state, observation = worlds.reset(key)
        return Carry(state, observation, memory(worlds.columns))

    def collect(params: Params, carry: Carry, key: Key, version: jax.Array) -> tuple[Carry, Rollout, Metrics]:
        key_starts, key_steps = jax.random.split(key)
        with jax.named_scope(ENVIRONMENT):
            # For a single step a bank costs as much as the step itself, and in most steps no world ends.
            bank = key_starts if steps == starts == 1 else worlds.fresh(key_starts, starts)
        initial_memory = memory(worlds.columns)
        kept = jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), carry.observation)

        def one_step(scanned: Any, key_t: Key) -> tuple[Any, Any]:
            (state, observation, remembered), tally, kept, used = scanned
            key_act, key_world = prng.split(key_t, 2)
            valid = worlds.valid(state) if has_agents else None
            with jax.named_scope(INFERENCE):
                action, remembered, extras = act(params, remembered, observation, key_act)
            if guide is not None:
                shown, known = guide.advise(state)
                followed = known & (jnp.arange(worlds.columns) < led)
                action, extras = _where_column(followed, shown, action), Guided(extras, shown, known, followed)
            with jax.named_scope(ENVIRONMENT):
                state, tally, led_to = worlds.step(state, tally, action, key_world, bank)
            ended = led_to.terminated | led_to.truncated
            # A step that did both is an end: its value is zero, and it needs no successor.
            truncated = led_to.truncated & ~led_to.terminated
            if valid is not None:
                ended, truncated = ended & valid, truncated & valid
            kept = _keep(kept, used, truncated, led_to.successor)
            # An agent that waits for its world begins the next episode with fresh memory.
            begins = ended if valid is None else ended | ~valid
            remembered = _where_column(begins, initial_memory, remembered)
            row = (observation, action, led_to.reward, led_to.terminated, truncated, valid, extras)
            after = Carry(state, led_to.observation, remembered)
            return (after, tally, kept, used + truncated), row

        scanned = (carry, worlds.tally(), kept, jnp.zeros(worlds.columns, jnp.int32))
        keys = prng.split(key_steps, steps)
        (after, tally, kept, _), rows = jax.lax.scan(one_step, scanned, keys, unroll=unroll)
        observation, action, reward, terminated, truncated, valid, extras = rows
        if valid is None:
            valid = jnp.ones(reward.shape, bool)
        data = Rollout(
            observation, action, reward, terminated, truncated, valid, extras,
            Successors(after.observation, kept), carry.memory, version,
        )  # fmt: skip
        return after, data, _metrics(tally)

    return Collector(start, collect, steps * worlds.columns, steps * worlds.worlds)


def _metrics(tally: Tally) -> Metrics:
    """Metrics of a rollout from the sums of its columns."""
    sums = {f"episode/{name}": jnp.sum(total) for name, total in tally.sums.items()}
    counts = {f"episodes/{name}": jnp.sum(count) for name, count in tally.counts.items()}
    peaks = {f"peak/{name}": jnp.max(peak) for name, peak in tally.peaks.items()}
    return {"episodes": jnp.sum(tally.episodes)} | sums | counts | peaks


def pathwise(
    worlds: Worlds,
    act: Act,
    memory: Callable[[int], PyTree],
    *,
    steps: int,
    gamma: float,
    detach: bool = False,
) -> Collector:
    """Gradients of rollouts of `steps` steps of every world: data are `Pathwise`.

    The discount counts from the rollout's beginning. The gradient passes through policy, actions, environment and
    rewards; not into the previous rollout, nor from an episode into the next. `detach`: nor through the policy's
    observations, where that path is not smooth, or so long that it explodes. A step is computed again for its gradient,
    so that memory holds little more than the states of worlds. Where a world's gradient is not finite (a contact, a
    norm at zero), it is cut there, and the rest of the batch is learnt from: metric "cuts", a world and rollout.
    """

    def acting(
        params: Params, memory: PyTree, observation: PyTree, key: Key | None
    ) -> tuple[jax.Array, PyTree, PyTree]:
        return act(params, memory, jax.lax.stop_gradient(observation) if detach else observation, key)

    stepping = jax.checkpoint(worlds.step)

    def collect(params: Params, carry: Carry, key: Key, version: jax.Array) -> tuple[Carry, Pathwise, Metrics]:
        def objective(params: Params, cuts: jax.Array) -> tuple[jax.Array, tuple[Carry, Metrics]]:
            def step(state: WorldsState, tally: Tally, action: jax.Array, *others: Any) -> Any:
                state, action = finite_gradient((state, action), worlds.worlds, cuts)
                return stepping(state, tally, action, *others)

            inner = collector(worlds._replace(step=step), acting, memory, steps=steps)
            after, data, metrics = inner.collect(params, carry, key, version)
            powers = gamma ** jnp.arange(steps, dtype=jnp.float32)
            earned = jnp.where(data.valid, data.reward, 0.0)
            return jnp.sum(powers[:, None] * earned) / worlds.columns, (after, metrics)

        found = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(params, jnp.float32(0.0))
        (value, (after, metrics)), (gradient, cuts) = found
        return after, Pathwise(gradient, {"objective": value, "cuts": cuts / worlds.worlds}), metrics

    begun = collector(worlds, acting, memory, steps=steps)
    return Collector(begun.start, collect, begun.steps, begun.env_steps)


def finite_gradient(tree: PyTree, worlds: int, count: jax.Array) -> PyTree:
    """`tree`, leaves [W, ...] or [B, ...], whose gradient is zero for each of the W `worlds` where it is not finite.

    The gradient by `count`, float32, is the number of those worlds.
    """
    leaves, structure = jax.tree.flatten(tree)
    smooth = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    for i, leaf in zip(smooth, _finite_gradient(worlds, [leaves[i] for i in smooth], count), strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _finite_gradient(worlds: int, leaves: list[jax.Array], count: jax.Array) -> list[jax.Array]:
    return leaves


def _no_residuals(worlds: int, leaves: list[jax.Array], count: jax.Array) -> tuple[list[jax.Array], tuple[()]]:
    return leaves, ()


def _of_finite_worlds(worlds: int, residuals: tuple[()], gradient: list[jax.Array]) -> tuple[list[jax.Array], Any]:
    rows = [leaf.reshape(worlds, -1) for leaf in gradient]
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(row), axis=1) for row in rows]), axis=0)
    kept = [jnp.where(finite[:, None], row, 0.0).reshape(leaf.shape) for row, leaf in zip(rows, gradient, strict=True)]
    return kept, jnp.sum(~finite).astype(jnp.float32)


_finite_gradient.defvjp(_no_residuals, _of_finite_worlds)


def join(rollouts: Sequence[Rollout]) -> Rollout:
    """One rollout with the columns of all. Its version is the oldest."""
    if len(rollouts) == 1:
        return rollouts[0]

    def along(axis: int, *trees: PyTree) -> PyTree:
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis), *trees)

    def one(rollout: Rollout) -> tuple[PyTree, PyTree]:
        """(leaves [T, B, ...], leaves [B, ...]) of a rollout."""
        successors = rollout.successors
        wide = rollout._replace(successors=successors.truncated, memory=(), version=())  # type: ignore[arg-type]
        return wide, (successors.last, rollout.memory)

    wide, narrow = zip(*map(one, rollouts))
    last, memory = along(0, *narrow)
    whole = along(1, *wide)
    oldest = jnp.min(jnp.stack([rollout.version for rollout in rollouts]))
    return whole._replace(successors=Successors(last, whole.successors), memory=memory, version=oldest)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MeasureTable:
    """Measures of one shape, a column each. A program keeps or records such a table by two kernels; of separate
    arrays it compiles and runs two for each."""

    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    values: Any  # float32 [..., M]
    valid: Any  # bool [..., M]

    @classmethod
    def of(cls, measures: Mapping[str, Measure], shape: tuple[int, ...]) -> MeasureTable:
        """Table of `measures` of `shape`, by their names in order."""
        names = tuple(sorted(measures))
        if not names:
            return cls((), jnp.zeros((*shape, 0), jnp.float32), jnp.zeros((*shape, 0), bool))
        values, valid = (
            jnp.stack([part.reshape(shape) for part in column], -1)
            for column in zip(*(measures[name] for name in names), strict=True)
        )
        return cls(names, values, valid)

    def beside(self, other: MeasureTable) -> MeasureTable:
        """Table with the columns of both."""
        pairs = ((self.values, other.values), (self.valid, other.valid))
        return MeasureTable(self.names + other.names, *(jnp.concatenate(pair, -1) for pair in pairs))

    def __getitem__(self, name: str) -> Measure:
        """Measure of that name; KeyError names what the table has."""
        if name not in self.names:
            raise KeyError(f"no measure {name!r}: the table has {', '.join(self.names)}")
        i = self.names.index(name)
        return Measure(self.values[..., i], self.valid[..., i])

    def measures(self) -> dict[str, Measure]:
        """Measures by their names; their arrays are views where the table's are NumPy's."""
        return {name: self[name] for name in self.names}


class Episodes(NamedTuple):
    """Scores of whole episodes, [E, A] each (A = 1 without agents)."""

    scores: MeasureTable
    valid: jax.Array  # bool [E, A]: the agent played at all; no score is valid elsewhere
    finished: jax.Array  # bool [E, A]: ended within `steps`


def play(
    environment: Environment,
    act: Act,
    memory: Callable[[int], PyTree],
    *,
    steps: int,
    observe: Callable[[PyTree, MeasureTable], PyTree] | None = None,
) -> Callable[[Params, tuple[PyTree, PyTree], Key | None, Key], tuple[Episodes, PyTree]]:
    """Function (params, starts, key, world_key) -> (episodes, frames) that plays one episode from each start.

    `starts` is (state, observation) with leaves [E, ...]. With `key` None the policy acts by its mode. Frames are
    `observe(states, metrics)` of all [E, ...] states before each step and at the end, with the metrics until then, in
    columns [E, A, M]: leaves [T+1, ...]; () without `observe`. Nothing is reset: an ended agent waits.
    """
    agents = environment.spec.agents

    def run(params: Params, starts: tuple[PyTree, PyTree], key: Key | None, world_key: Key) -> tuple[Episodes, PyTree]:
        state, observation = starts
        count = jax.tree.leaves(state)[0].shape[0]
        columns = count * (agents or 1)

        def flat(tree: PyTree) -> PyTree:
            return tree if agents is None else jax.tree.map(lambda x: x.reshape(columns, *x.shape[2:]), tree)

        def per_agent(x: jax.Array) -> jax.Array:
            return x.reshape(count, agents or 1, *x.shape[1:])

        present = jnp.ones((count, 1), bool) if agents is None else jax.vmap(environment.active)(state)
        nothing = jnp.zeros((count, agents or 1), jnp.float32)

        def measured(state: PyTree) -> MeasureTable:
            return MeasureTable.of(jax.vmap(environment.metrics)(state), nothing.shape)

        def scored(scores: MeasureTable, state: PyTree, played: jax.Array) -> MeasureTable:
            """Scores with the metrics of `state`, of those who `played` [E, A] the step that led to it."""
            return jax.tree.map(lambda new, old: jnp.where(played[..., None], new, old), measured(state), scores)

        def one_step(carried: Any, t: jax.Array) -> tuple[Any, PyTree]:
            state, observation, remembered, played, playing, scores, returns, lengths = carried
            # Metrics of the state that was carried, which lies in memory: a CPU would work out each of those of the
            # following state from the whole step anew.
            scores = scored(scores, state, played)
            frame = () if observe is None else observe(state, scores)
            live = playing & (t < steps)
            chosen = None if key is None else jax.random.fold_in(key, t)
            action, remembered, _ = act(params, remembered, flat(observation), chosen)
            action = action if agents is None else per_agent(action)
            keys = prng.split(jax.random.fold_in(world_key, t), count)
            following, led_to = jax.vmap(environment.step)(keys, state, action)
            ended = (led_to.terminated | led_to.truncated).reshape(count, -1)
            reward = led_to.reward.reshape(count, -1)
            returns, lengths = returns + jnp.where(live, reward, 0.0), lengths + live
            # A world that ended keeps its last state, for the pictures.
            kept = _where_column(jnp.any(live, axis=-1), following, state)
            still = playing & ~(live & ended)
            return (kept, led_to.observation, remembered, live, still, scores, returns, lengths), frame

        unscored = jax.tree.map(jnp.zeros_like, jax.eval_shape(measured, state))
        begun = (state, observation, memory(columns), jnp.zeros_like(present), present, unscored, nothing, nothing)
        # one step more, in which nobody plays any more: it only scores the last state, and draws it
        (*_, playing, scores, returns, lengths), frames = jax.lax.scan(one_step, begun, jnp.arange(steps + 1))
        sums = {"return": Measure(returns, present), "length": Measure(lengths, present)}
        scores = MeasureTable.of(sums, nothing.shape).beside(scores)
        return Episodes(scores, present, ~playing), frames

    return run


def starts(environment: Environment, key: Key, episodes: int) -> tuple[PyTree, PyTree]:
    """Fresh starts of `episodes` episodes: (state, observation), leaves [E, ...]. Raises ValueError for none."""
    if episodes < 1:
        raise ValueError(f"{episodes} evaluation episodes; at least 1 is needed")
    return jax.vmap(environment.reset)(jax.random.split(key, episodes))

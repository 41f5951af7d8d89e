"""Cross-play: policies as the ego among partners of many kinds, and an adversary found among them.

Self-play overfits to the partners that it trained with. Here slot 0 of every world has one policy, and the others
another: learned, or by a rule. Who they are is data (`sim.traffic.Partners`), so all pairs with networks of one shape
share a compiled program. Only the ego is scored.

The adversary is found by the cross-entropy method (Rubinstein, "The cross-entropy method for combinatorial and
continuous optimization", 1999) over what partners are conditioned on: the reward weights of a policy that observes
them, else pace, headway and courtesy of the Intelligent Driver Model. It is searched on the scenarios that it is judged
on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from longhaul import rollout
from longhaul.driving.sim import traffic
from longhaul.driving.sim.device_bank import DeviceBank
from longhaul.driving.sim.reward import RANGES
from longhaul.driving.sim.traffic import Partners
from longhaul.runtime.each_device import EachDevice
from longhaul.runtime.errors import RunError
from longhaul.telemetry import screen
from longhaul.training import confidence
from longhaul.training.evaluate import Scores
from longhaul.training.evaluate_driving import Drives, joined, rows_of
from longhaul.types import Act, Params

METRICS = ("accuracy", "goal", "collision", "at_fault_collision", "offroad", "red_light")

AS_TRAINED = np.zeros(len(RANGES), np.float32)
"""Conditioning of a policy that weighs its reward as the recipe does."""


def conditioning(**terms: float) -> np.ndarray:
    """Conditioning with these draws, -1 .. 1 each."""
    return np.array([terms.get(name, 0.0) for name in RANGES], np.float32)


HASTE = conditioning(progress=1.0, goal=1.0, collision=-1.0, discomfort=-1.0, haste=-1.0)


class Partner(NamedTuple):
    """Driver of the others of a world."""

    name: str
    kind: int = traffic.DRIVEN
    policy: Params | None = None  # of DRIVEN; None: the ego's own
    draws: np.ndarray = AS_TRAINED  # its conditioning
    pace: float = 1.0  # of REACTING, factors
    headway: float = 1.0
    yields: bool = True
    checked: bool = True  # if the ego's commands are (`sim.safety`), those of DRIVEN too


RULES = {
    "idm": Partner("idm", traffic.REACTING),
    "log": Partner("log", traffic.REPLAYED),
    "constant": Partner("constant", traffic.DRIFTING),
}


def styled(name: str, conditioned: bool) -> Partner:
    """Partners that are "hurried" or "slow": the ego's own policy if it is conditioned, else reactive vehicles."""
    sign = 1.0 if name == "hurried" else -1.0
    if conditioned:
        return Partner(name, draws=sign * HASTE)
    return Partner(name, traffic.REACTING, pace=1.0 + 0.35 * sign, headway=2.0**-sign, yields=sign < 0)


Play = Callable[[Params, Partner], Scores]


def arena(drives: Drives) -> Play:
    """Function (ego's policy, partner) -> scores of the ego in each scenario; compiled once for policies of one shape.

    Raises RunError where no scenario has a second agent.
    """
    shell = drives.shell("policy")
    config, steps, agents = shell.config, shell.spec.max_steps, shell.config.agents
    assert steps is not None
    if agents < 2:
        raise RunError("no scenario has a second agent to drive; give --cross-play other data")
    act, memory = _in_pairs(*drives.actor(shell, "policy"), agents, config.conditioning)

    def drive(policies: Any, partners: Partners, tables: DeviceBank) -> rollout.Episodes:
        environment = dataclasses.replace(shell, tables=tables)
        starts = jax.vmap(lambda i: environment.start(i, partners=partners))(jnp.arange(drives.lanes))
        through = rollout.play(environment, act, memory, steps=steps)
        episodes, _ = through(policies, starts, None, jax.random.key(1))
        return episodes

    program = EachDevice(drive, drives.devices())
    opened = drives.opener(config, program.devices, partners=True)

    def play(ego: Params, partner: Partner) -> Scores:
        policies = program.put((ego, ego if partner.policy is None else partner.policy, partner.draws))
        rows, described = [], program.put(_described(partner, agents))
        with opened() as batches:
            for batch in batches:
                episodes = program(policies, described, batch.tables)
                egos = [each._replace(valid=each.valid & (np.arange(agents) == 0)) for each in episodes]
                rows.append(rows_of(egos, batch))
        return joined(rows, drives)

    return play


def _in_pairs(own: Act, remembered: Callable[[int], Any], agents: int, conditioned: bool) -> tuple[Act, Any]:
    """(act, memory) of the ego's policy for the first agent of a world and the partner's for all others.

    The policies are (ego's, partner's, the reward weights that the partner observes where it is `conditioned`).
    """

    def act(policies: Any, memory: Any, observation: Any, key: Any) -> tuple[jax.Array, Any, Any]:
        ego, others, draws = policies
        worlds = jax.tree.leaves(observation)[0].shape[0] // agents

        def slots(first: int, last: int) -> Any:
            return jax.tree.map(
                lambda x: x.reshape(worlds, agents, *x.shape[1:])[:, first:last].reshape(-1, *x.shape[1:]), observation
            )

        observed = slots(1, agents)
        if conditioned:
            observed = observed._replace(ego=observed.ego.at[:, -len(RANGES) :].set(draws))
        first, memory_ego, _ = own(ego, memory[0], slots(0, 1), key)
        rest, memory_others, _ = own(others, memory[1], observed, key)
        action = jnp.concatenate([x.reshape(worlds, -1, *x.shape[1:]) for x in (first, rest)], 1)
        return action.reshape(-1, *action.shape[2:]), (memory_ego, memory_others), ()

    def memory(columns: int) -> Any:
        worlds = columns // agents
        return remembered(worlds), remembered(columns - worlds)

    return act, memory


def _described(partner: Partner, agents: int) -> Partners:
    """The partner as the simulator takes it."""
    return Partners(
        kind=jnp.int32(partner.kind),
        driven=jnp.asarray((np.arange(agents) == 0) | (partner.kind == traffic.DRIVEN)),
        pace=jnp.float32(partner.pace),
        headway=jnp.float32(partner.headway),
        yields=jnp.bool_(partner.yields),
        checked=jnp.bool_(partner.checked),
    )


def adversary(
    play: Play, ego: Params, conditioned: bool, *, rounds: int = 4, population: int = 8, seed: int = 0
) -> Partner:
    """The partner found with which the ego does worst, by accuracy, then progress."""
    draw, dims = np.random.default_rng(seed), len(RANGES) if conditioned else 3
    mean, spread = np.zeros(dims), np.full(dims, 0.7)
    tried: list[tuple[float, Partner]] = []
    with screen.stage("partners tried for the adversary", rounds * population) as advance:
        for _ in range(rounds):
            points = np.clip(mean + spread * draw.normal(size=(population, dims)), -1.0, 1.0)
            scores = []
            for point in points:
                partner = _partner_at(point, conditioned)
                means = play(ego, partner).means()
                scores.append(means["accuracy"] + 0.01 * means["progress"])
                tried.append((scores[-1], partner))
                advance(len(tried))
            best = points[np.argsort(scores, kind="stable")[: max(2, population // 4)]]
            mean, spread = best.mean(0), best.std(0) + 0.1
    return min(tried, key=lambda each: each[0])[1]


def _partner_at(point: np.ndarray, conditioned: bool) -> Partner:
    """Partner at a point of the search, -1 .. 1 each."""
    if conditioned:
        return Partner("adversary", draws=point.astype(np.float32))
    pace, headway, courtesy = point.tolist()
    return Partner("adversary", traffic.REACTING, pace=1.6**pace, headway=4.0**headway, yields=courtesy > 0.0)


def conditioning_of(partner: Partner, conditioned: bool) -> dict[str, float | bool]:
    """Conditioning of a partner, for the JSON."""
    if conditioned:
        return dict(zip(RANGES, map(float, partner.draws), strict=True))
    return {"pace": partner.pace, "headway": partner.headway, "yields": partner.yields}


def matrix(play: Play, egos: dict[str, Params], partners: Sequence[Partner]) -> list[dict[str, Any]]:
    """A cell for each pair: means, 95 % intervals and episodes of the ego's metrics."""
    cells = []
    with screen.stage("pairs of the cross-play matrix", len(egos) * len(partners)) as advance:
        for ego, policy in egos.items():
            for partner in partners:
                scores = play(policy, partner)
                estimates = confidence.bootstrap({name: scores.metrics[name] for name in METRICS}, scores.groups())
                cells.append({
                    "ego": ego,
                    "partner": partner.name,
                    "episodes": len(scores.names),
                    "mean": {name: estimate.mean for name, estimate in estimates.items()},
                    "interval": {name: [estimate.low, estimate.high] for name, estimate in estimates.items()},
                })  # fmt: skip
                advance(len(cells))
    return cells


def fitting(word: str, policy: Params, like: Params) -> Params:
    """`policy` of the run that `word` names. RunError where it has another shape than the ego's."""
    if str(jax.tree.structure(policy)) == str(jax.tree.structure(like)):
        differ = [
            (jax.tree_util.keystr(path), x.shape, y.shape)
            for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(policy), jax.tree.leaves(like), strict=True)
            if x.shape != y.shape
        ]
        if not differ:
            return policy
        name, found, expected = differ[0]
        gap = f"{name} is {list(found)} there and {list(expected)} here"
    else:
        gap = "its network has other parts"
    raise RunError(
        f"--cross-play {word}: its policy does not fit the ego's: {gap}; name a run with the same network, actions "
        "and observation"
    )

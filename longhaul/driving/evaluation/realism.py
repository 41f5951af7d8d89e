"""Likelihood of the log among what a simulator does: realism in the manner of the Waymo Open Sim Agents Challenge.

The world is simulated R times from one beginning. Of each simulated agent a few features are measured, their
distribution over the rollouts is estimated, and the log's own values are looked up in it (Montali et al., "The Waymo
Open Sim Agents Challenge", arXiv 2305.12032). As the paper has it, steps are samples of one distribution (an agent
need not do at the same second what the log did), a component is the exponential of the log-likelihood averaged over the
valid steps, and the meta metric is a weighted mean. Weights are those of the challenge of 2025.

Ours, where the paper leaves it open: the ranges and numbers of bins (`BINS`; values beyond count in the outermost),
one sample's weight spread over the bins so that nothing is impossible, central differences over two steps, the mean
over agents after the exponential, and that a component which no agent of a scenario has is left out with its weight.
Whether there was a collision, a corner off the road or a red light passed is one verdict for an episode. Time to
collision and red lights are those of vehicles. So the numbers tell simulators apart that were measured here; they
can't be set beside the challenge's table.

Even the log itself does not score 1: a feature that changes during the log is spread over several bins.

R rollouts, T frames, N objects, A simulated agents. Metres, radians, seconds. NumPy only.
"""

from __future__ import annotations

import numpy as np

from longhaul.driving.evaluation.realism_features import Scene, measure, scene
from longhaul.driving.scenario.scenario import Scenario
from longhaul.spaces import Measure

WEIGHTS = {
    "linear_speed": 0.05, "linear_acceleration": 0.05, "angular_speed": 0.05, "angular_acceleration": 0.05,
    "distance_to_object": 0.1, "time_to_collision": 0.1, "distance_to_road_edge": 0.05,
    "collision": 0.25, "offroad": 0.25, "red_light": 0.05,
}  # fmt: skip
"""Weights of the challenge of 2025; they sum to 1."""

BINS = {
    "linear_speed": (0.0, 30.0, 30),  # m/s
    "linear_acceleration": (-10.0, 10.0, 20),  # m/s^2, the change of speed
    "angular_speed": (-1.0, 1.0, 20),  # rad/s
    "angular_acceleration": (-4.0, 4.0, 20),  # rad/s^2
    "distance_to_object": (-2.0, 38.0, 20),  # m between boxes, negative where they overlap
    "time_to_collision": (0.0, 5.0, 10),  # s
    "distance_to_road_edge": (-20.0, 10.0, 20),  # m, of the corner that is farthest out; negative on the road
}
"""Least value, greatest value and number of bins of what is measured at each step."""

PRIOR = 1.0
"""Samples that are spread over all bins before any is counted."""


def realism(scenario: Scenario, pose: np.ndarray, present: np.ndarray) -> dict[str, Measure]:
    """The likelihoods of a scenario's log in rollouts of its controlled agents, scalars.

    `pose` [R, T, N, 3] and `present` [R, T, N] are the rollouts, frame 0 being the log's. Gives each component of
    `WEIGHTS`, their weighted mean "realism", and "min_ade": of the rollouts' mean distances (m) to the log over all
    agents and steps, the least. Raises ValueError where shapes do not fit.
    """
    logged, there = scenario.pose[None, : scenario.steps], scenario.present[None, : scenario.steps]
    if pose.ndim != 4 or pose.shape[1:] != logged.shape[1:] or present.shape != pose.shape[:3] or len(pose) == 0:
        wanted = f"[R, {', '.join(map(str, logged.shape[1:]))}]"
        raise ValueError(f"rollouts of {scenario.id!r} have shapes {pose.shape} and {present.shape}; expected {wanted}")
    stage = scene(scenario)
    simulated, real = measure(stage, pose, present), measure(stage, logged, there)
    parts = {}
    for name, (low, high, bins) in BINS.items():
        parts[name] = _over_agents(histogram(simulated.series[name], real.series[name], low, high, bins))
    for name, event in simulated.events.items():
        parts[name] = _over_agents(bernoulli(event, real.events[name]))
    return parts | {"realism": weighted(parts), "min_ade": _min_ade(stage, pose, present, logged, there)}


def weighted(parts: dict[str, Measure]) -> Measure:
    """The meta metric: the mean of the valid parts by `WEIGHTS`."""
    weight = sum(WEIGHTS[name] for name in WEIGHTS if parts[name].valid)
    total = sum(WEIGHTS[name] * float(parts[name].value) for name in WEIGHTS if parts[name].valid)
    return Measure(total / max(weight, 1e-9), weight > 0.0)


def histogram(simulated: Measure, logged: Measure, low: float, high: float, bins: int) -> Measure:
    """[A]: exp of the mean log-probability of an agent's logged values, by the histogram of its simulated ones.

    `simulated` is [R, T, A], `logged` [1, T, A].
    """
    agents = logged.value.shape[-1]

    def place(values: np.ndarray) -> np.ndarray:
        share = (np.nan_to_num(values, nan=low) - low) / (high - low)
        return np.clip((share * bins).astype(int), 0, bins - 1)

    cell = place(simulated.value) + bins * np.arange(agents)
    counts = np.bincount(cell[simulated.valid], minlength=agents * bins).reshape(agents, bins).astype(float)
    number = counts.sum(-1, keepdims=True)
    log_p = np.log((counts + PRIOR / bins) / (number + PRIOR))
    found = np.where(logged.valid[0], log_p[np.arange(agents), place(logged.value[0])], 0.0)
    steps = logged.valid[0].sum(0)
    return Measure(np.exp(found.sum(0) / np.maximum(steps, 1)), (steps > 0) & (number[:, 0] > 0))


def bernoulli(simulated: Measure, logged: Measure) -> Measure:
    """[A]: the probability of an agent's logged verdict, by how often the simulated ones [R, A] were so."""
    number = simulated.valid.sum(0)
    same = (simulated.valid & (simulated.value == logged.value)).sum(0)
    return Measure((same + PRIOR / 2) / (number + PRIOR), (number > 0) & logged.valid[0])


def _over_agents(measure: Measure) -> Measure:
    count = int(np.sum(measure.valid))
    return Measure(float(np.sum(measure.value[measure.valid])) / max(count, 1), count > 0)


def _min_ade(
    stage: Scene, pose: np.ndarray, present: np.ndarray, logged: np.ndarray, there: np.ndarray
) -> Measure:  # fmt: skip
    away = np.linalg.norm((pose - logged)[:, 1:, stage.agents, :2], axis=-1)
    both = (present & there)[:, 1:, stage.agents]
    count = both.sum((1, 2))
    mean = np.where(both, away, 0.0).sum((1, 2)) / np.maximum(count, 1)
    return Measure(float(mean[count > 0].min()) if np.any(count > 0) else 0.0, bool(np.any(count > 0)))

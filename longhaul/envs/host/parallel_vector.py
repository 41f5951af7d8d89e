"""PettingZoo's ParallelEnv as a `HostVector`: an agent is a column, and a world resets when none of its agents is left.

Agents must be alike: one space of observations, one of actions. An agent that has left waits for its world's end; its
steps are not valid.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from longhaul.envs.host.gymnasium_vector import Form, check_observation, form
from longhaul.envs.host.vector import (
    Finals,
    HostStep,
    Interval,
    Slot,
    check_action,
    no_finals,
    no_restore,
    no_state,
    seeds,
    slot,
    stacked,
)
from longhaul.runtime.user_modules import load
from longhaul.spaces import Tree, mapped


class Parallel:
    """Worlds of W environments with A agents each; column w * A + a is agent a of world w."""

    def __init__(self, environments: list[Any], spaces: Form) -> None:
        self.spec, self._form, self._inner = spaces.spec, spaces, environments
        self.agents = list(environments[0].possible_agents)
        self.worlds, self.columns = len(environments), len(environments) * len(self.agents)
        self._playing = np.zeros((self.worlds, len(self.agents)), bool)
        self._interval, self._none = Interval(self.spec, self.columns), no_finals(self.spec)

    def _put(self, out: Slot, world: int, observations: dict[str, Any], infos: dict[str, Any]) -> None:
        """Writes what the agents of a world see; an agent that sees nothing keeps what it saw."""
        for place, name in enumerate(self.agents):
            if name in observations:
                column = world * len(self.agents) + place
                value = self._form.read(observations[name], infos.get(name, {}))
                mapped(lambda to, part, column=column: to.__setitem__(column, part), out.observation, value)

    def _begin(self, out: Slot, world: int, seed: int | None) -> None:
        observations, infos = self._inner[world].reset(seed=seed)
        self._playing[world] = [name in observations for name in self.agents]
        self._put(out, world, observations, infos)

    def reset(self, seed: int, out: Slot | None = None) -> Tree:
        out = slot(self.spec, self.columns) if out is None else out
        self._interval = Interval(self.spec, self.columns)
        for world, its_seed in enumerate(seeds(seed, self.worlds)):
            self._begin(out, world, its_seed)
        return out.observation

    def step(self, action: np.ndarray, out: Slot | None = None) -> HostStep:
        out = slot(self.spec, self.columns) if out is None else out
        chosen = self._form.act(check_action(self.spec, self.columns, action))
        out.reward[:], out.terminated[:], out.truncated[:] = 0.0, False, False
        out.valid[:] = self._playing.ravel()
        ended: list[int] = []
        lasts: list[Tree] = []
        for world, inner in enumerate(self._inner):
            first = world * len(self.agents)
            actions = {
                name: chosen[first + place] for place, name in enumerate(self.agents) if self._playing[world, place]
            }
            observations, rewards, terminations, truncations, infos = inner.step(actions)
            for place, name in enumerate(self.agents):
                if name not in actions:
                    continue
                column = first + place
                out.reward[column] = rewards[name]
                out.terminated[column], out.truncated[column] = terminations[name], truncations[name]
                if terminations[name] or truncations[name]:
                    ended.append(column)
                    lasts.append(self._form.read(observations[name], infos.get(name, {})))
                    self._playing[world, place] = False
            self._put(out, world, observations, infos)
            if not self._playing[world].any():
                self._begin(out, world, None)
        self._interval.check(out.truncated)
        if not ended:
            return HostStep(*out, self._none)
        return HostStep(*out, Finals(np.asarray(ended, np.int32), stacked(self.spec, lasts), {}))

    state, restore = no_state, no_restore

    def close(self) -> None:
        for inner in self._inner:
            inner.close()


def parallel(
    name: str, num_envs: int, seed: int, *, max_steps: int | None = None, action_bound: float | None = None,
    truncation_interval: int | None = None, **options: Any,
) -> Parallel:  # fmt: skip
    """Environments of PettingZoo's parallel API: `name` is module:name, called with the options.

    `max_steps` tells the longest episode, where the environment knows it. ValueError where agents differ.
    """
    environments = [load(name)(**options) for _ in range(num_envs)]
    first = environments[0]
    agents = list(first.possible_agents)
    for agent in agents[1:]:
        for space in ("observation_space", "action_space"):
            leading, other = getattr(first, space)(agents[0]), getattr(first, space)(agent)
            if leading != other:
                raise ValueError(
                    f"{name}: the {space} of {agent} is {other}, and that of {agents[0]} is {leading}; agents must be "
                    "alike: pad them (SuperSuit does)"
                )
    spaces = form(
        first.observation_space(agents[0]), first.action_space(agents[0]), limit=max_steps,
        interval=truncation_interval, bound=action_bound,
    )  # fmt: skip
    begun = first.reset(seed=0)
    for agent, observation in begun[0].items():
        check_observation(f"{name}: the observation of {agent}", spaces, observation, begun[1].get(agent, {}))
    return Parallel(environments, spaces._replace(spec=replace(spaces.spec, agents=len(agents))))

"""Vector environments whose every number is known, in each of Gymnasium's autoreset modes, and one of torch tensors."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

LENGTHS = (3, 5, 2)
"""Of the episodes of world w, over and over from place w on. Those of length 5 are truncated, the others terminate."""


def length(world: int, episode: int) -> int:
    return LENGTHS[(world + episode) % len(LENGTHS)]


class Count(VectorEnv):
    """Sees (world, episode, step) and the last action; a step is worth its number. As nested as observations get."""

    def __init__(self, num_envs: int, mode: str = "SameStep", drift: bool = False) -> None:
        self.num_envs, self.mode = num_envs, AutoresetMode(mode)
        self.metadata = {"autoreset_mode": self.mode}
        self.single_observation_space = spaces.Dict(
            {"where": spaces.Box(-1, 1000, (3,), np.float64), "last": spaces.Tuple((spaces.Discrete(4, start=-1),))}
        )
        self.single_action_space = spaces.Discrete(3, start=10)
        self.episode, self.count, self.last = (np.zeros(num_envs, np.int64) for _ in range(3))
        self.waits = np.zeros(num_envs, bool)
        self.drift = drift  # an episode of length 5 is cut short: a promise broken

    def seen(self) -> Any:
        where = np.stack([np.arange(self.num_envs), self.episode, self.count], axis=1).astype(np.float64)
        return {"where": where, "last": (self.last.copy(),)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        which = np.ones(self.num_envs, bool) if options is None else options["reset_mask"]
        self.episode = np.where(which, 0 if options is None else self.episode + 1, self.episode)
        self.count, self.last = np.where(which, 0, self.count), np.where(which, -1, self.last)
        self.waits[:] = False
        return self.seen(), {}

    def step(self, action: np.ndarray) -> Any:
        assert action.dtype == np.int64
        assert action.min() >= 10
        went = ~self.waits
        self.count = np.where(went, self.count + 1, 0)
        self.last = np.where(went, action - 10, -1)
        self.episode = self.episode + self.waits
        ends = np.array([length(w, e) for w, e in enumerate(self.episode)])
        done = went & (self.count >= ends)
        terminated, truncated = done & (ends != 5), done & (ends == 5)
        reward, seen, infos = np.where(went, self.count, 0).astype(np.float64), self.seen(), {}
        if self.mode == AutoresetMode.NEXT_STEP:
            self.waits = done
        elif self.mode == AutoresetMode.SAME_STEP and done.any():
            infos = {"final_obs": seen, "_final_obs": done}
            self.episode, self.count = self.episode + done, np.where(done, 0, self.count)
            self.last, seen = np.where(done, -1, self.last), None
        return self.seen() if seen is None else seen, reward, terminated, truncated, infos


def sync(num_envs: int, mode: str = "SameStep", env_id: str = "CartPole-v1", **options: Any) -> VectorEnv:
    """Gymnasium's own loop."""
    makers = [lambda: gym.make(env_id, **options) for _ in range(num_envs)]
    return SyncVectorEnv(makers, autoreset_mode=mode)


def ale(num_envs: int, mode: str = "SameStep", **options: Any) -> VectorEnv:
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv("breakout", num_envs, num_threads=1, autoreset_mode=AutoresetMode(mode), **options)


class Tensors:
    """Isaac Lab's convention: episodes end after 4 steps, or at once by an action above 0; reset in the same step."""

    def __init__(self, num_envs: int, tell: bool = False) -> None:
        import torch

        self.num_envs, self.device, self.max_episode_length, self.tell = num_envs, torch.device("cpu"), 4, tell
        self.single_observation_space = spaces.Dict(
            {"policy": spaces.Box(-np.inf, np.inf, (2,)), "critic": spaces.Box(-np.inf, np.inf, (1,))}
        )
        self.single_action_space = spaces.Box(-np.inf, np.inf, (1,))
        self.steps, self.start = torch.zeros(num_envs, dtype=torch.int64), torch.zeros(num_envs)

    def _seen(self) -> Any:
        import torch

        return {"policy": torch.stack([self.steps.float(), self.start], dim=1), "critic": self.start[:, None]}

    def reset(self, seed: int) -> Any:
        import torch

        self.random = torch.Generator().manual_seed(seed)
        self.steps[:] = 0
        self.start = torch.rand(self.num_envs, generator=self.random)
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        import torch

        self.steps += 1
        terminated, truncated = action[:, 0] > 0, self.steps >= 4
        reward = self.steps.float()
        extras = {"final_obs": self._seen()} if self.tell else {}
        ended = terminated | truncated
        fresh = torch.rand(self.num_envs, generator=self.random)
        self.steps, self.start = torch.where(ended, 0, self.steps), torch.where(ended, fresh, self.start)
        return self._seen(), reward, terminated, truncated, extras

    def close(self) -> None:
        pass

"""CartPole-v1 of many worlds in torch, by Isaac Lab's convention: `torch/benchmarks.peers.torch_cartpole:make`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces


class CartPole:
    """So many carts on a device; an episode ends in the step that resets it, and its last observation is told."""

    def __init__(self, num_envs: int, device: str = "cpu") -> None:
        self.num_envs, self.device, self.max_episode_length = num_envs, torch.device(device), 500
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (4,))
        self.single_action_space = spaces.Discrete(2)
        self._random = torch.Generator(device)
        self._state, self._steps = torch.zeros(num_envs, 4, device=device), torch.zeros(num_envs, device=device)

    def _starts(self) -> torch.Tensor:
        return torch.rand(self.num_envs, 4, generator=self._random, device=self.device) * 0.1 - 0.05

    def reset(self, seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
        self._random.manual_seed(seed)
        self._state, self._steps = self._starts(), torch.zeros_like(self._steps)
        return self._state, {}

    def step(self, action: torch.Tensor) -> Any:
        _, speed, angle, spin = self._state.unbind(1)
        push, cos, sin = action * 20.0 - 10.0, angle.cos(), angle.sin()
        thrust = (push + 0.05 * spin * spin * sin) / 1.1
        spin_up = (9.8 * sin - cos * thrust) / (0.5 * (4.0 / 3.0 - 0.1 * cos * cos / 1.1))
        speed_up = thrust - 0.05 * spin_up * cos / 1.1
        rates = torch.stack([speed, speed_up, spin, spin_up], dim=1)
        last, self._steps = self._state + 0.02 * rates, self._steps + 1
        terminated = (last[:, 0].abs() > 2.4) | (last[:, 2].abs() > 12 * math.pi / 180)
        truncated = (self._steps >= self.max_episode_length) & ~terminated
        ended = terminated | truncated
        self._state = torch.where(ended[:, None], self._starts(), last)
        self._steps = torch.where(ended, 0.0, self._steps)
        return self._state, torch.ones(self.num_envs, device=self.device), terminated, truncated, {"final_obs": last}

    def close(self) -> None:
        pass


def make(num_envs: int, device: str = "cpu") -> CartPole:
    """CartPole of `num_envs` worlds on a device."""
    return CartPole(num_envs, device)

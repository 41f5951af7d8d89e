"""PPO from its parts: an environment, an algorithm and a topology, put together by hand and trained on CartPole.

    python examples/ppo_from_parts.py

`longhaul train cartpole` does the same and also saves, resumes, evaluates and reports. Here is the architecture alone:

- the environment is two functions, `reset` and `step`; `vectorise` makes many worlds of it, which reset themselves;
- the algorithm is five functions over its own state: `init`, `policy`, `memory`, `act` and `learn`;
- the collector acts in the worlds and returns rollouts [T, B, ...];
- the topology `fused` compiles acting and learning into one program on the device.
"""

from __future__ import annotations

import jax

from longhaul.algorithms import ppo
from longhaul.algorithms.config import PPOConfig
from longhaul.algorithms.run_context import RunContext
from longhaul.environment import vectorise
from longhaul.envs.classic_control import cartpole
from longhaul.rollout import collector
from longhaul.runtime import mesh as meshes
from longhaul.topologies import fused
from longhaul.types import Collector

WORLDS, STEPS = 64, 32  # a rollout is [STEPS, WORLDS, ...]
UPDATES, BLOCK = 200, 25  # updates in all, and in one call of the compiled program


def train(seed: int = 0, updates: int = UPDATES) -> list[float]:
    """Mean return of the episodes that ended in each block of updates."""
    environment = cartpole()
    mesh = meshes.make_mesh(1)

    config = PPOConfig(lr=1e-3, num_minibatches=4, update_epochs=4)
    algorithm = ppo.ppo(environment.spec, config, RunContext(updates, mean=meshes.identity))

    def collect_in(context: tuple[()]) -> Collector:
        """The collector. `context` is data that worlds read and never write, such as driving logs: none here."""
        return collector(vectorise(environment, WORLDS), algorithm.act, algorithm.memory, steps=STEPS)

    progress = fused.start(algorithm, fused.entering(collect_in, mesh), (), jax.random.key(seed), mesh)
    program = fused.compiled(algorithm, collect_in, progress, (), mesh, block=BLOCK)

    returns = []
    for progress, n, metrics in fused.fused(program, progress, (), updates=updates, block=BLOCK):
        total, episodes = (metrics[name][:n].sum() for name in ("episode/return", "episodes"))
        returns.append(float(total / episodes))
        print(f"update {int(progress.updates):4d}   mean return {returns[-1]:6.1f}")
    return returns


if __name__ == "__main__":
    train()

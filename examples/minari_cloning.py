"""Cloning from a Minari data set: recorded by Minari, then imitated. Run: python examples/minari_cloning.py"""

import gymnasium
import minari
import numpy as np

import longhaul

NAME = "cartpole/linear-v0"
GAINS = np.array([0.1, 0.2, 2.0, 1.0])
"""Linear controller, which balances the pole to the end."""


def record(episodes=20):
    """Writes the data set: whole episodes of the controller."""
    environment = minari.DataCollector(gymnasium.make("CartPole-v1"), data_format="arrow")
    for seed in range(episodes):
        observation, _ = environment.reset(seed=seed)
        over = False
        while not over:
            observation, _, terminated, truncated, _ = environment.step(int(observation @ GAINS > 0))
            over = terminated or truncated
    environment.create_dataset(NAME, algorithm_name="linear controller")
    environment.close()


if __name__ == "__main__":
    if NAME not in minari.list_local_datasets():
        record()
    result = longhaul.train("bc", env="cartpole", recorded=(f"minari:{NAME}",), total_steps=200_000)
    print(result.evaluation["trained"])

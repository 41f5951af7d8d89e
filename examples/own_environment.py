"""A Gymnasium environment of one's own: trained, loaded, acted in. Run: python examples/own_environment.py"""

import gymnasium
import numpy as np

import longhaul


class Corridor(gymnasium.Env):
    """Walk to the right end of seven cells; a step costs 0.01, the end is worth 1."""

    observation_space = gymnasium.spaces.Box(0, 1, (7,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = int(self.np_random.integers(0, 6)), 0
        return self.see(), {}

    def step(self, action):
        self.place, self.steps = min(max(self.place + 2 * int(action) - 1, 0), 6), self.steps + 1
        won = self.place == 6
        return self.see(), float(won) - 0.01, won, self.steps >= 50, {}

    def see(self):
        return np.eye(7, dtype=np.float32)[self.place]


if __name__ == "__main__":
    result = longhaul.train("ppo", env=Corridor, total_steps=30_000)
    print(result.evaluation["trained"])
    result.plot("episode/return").save(result.folder / "curve.html")

    policy, environment = longhaul.load(result.folder), Corridor()
    observation, _ = environment.reset(seed=3)
    over = False
    while not over:
        observation, reward, terminated, truncated, _ = environment.step(policy.act_numpy(observation))
        over = terminated or truncated
    print("the end" if terminated else "out of time", "after", environment.steps, "steps")

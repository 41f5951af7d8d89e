"""PureJaxRL's `make_train` in turn with `longhaul bench ppo-cartpole` and `seeds`; takes the folder of its `ppo.py`."""

from __future__ import annotations

import sys
import time

import turns

sys.path.insert(0, sys.argv[2])

import jax
from ppo import make_train

NAMES = {
    "LR": "lr", "NUM_ENVS": "num_envs", "NUM_STEPS": "num_steps", "TOTAL_TIMESTEPS": "total_steps",
    "UPDATE_EPOCHS": "update_epochs", "NUM_MINIBATCHES": "num_minibatches", "GAMMA": "gamma",
    "GAE_LAMBDA": "gae_lambda", "CLIP_EPS": "clip_eps", "ENT_COEF": "ent_coef", "VF_COEF": "vf_coef",
    "MAX_GRAD_NORM": "max_grad_norm",
}  # fmt: skip
"""Its settings -> ours."""

config = turns.about()["config"]
settings = {theirs: config[ours] for theirs, ours in NAMES.items()}
settings |= {"ACTIVATION": "tanh", "ENV_NAME": "CartPole-v1", "ANNEAL_LR": True, "DEBUG": False}
runs = config.get("runs", 1)


def key(seed: int) -> jax.Array:
    return jax.random.split(jax.random.PRNGKey(seed), runs) if runs > 1 else jax.random.PRNGKey(seed)


began = time.perf_counter()
train = make_train(settings) if runs == 1 else jax.vmap(make_train(settings))
train = jax.jit(train).lower(key(0)).compile()
compiled = time.perf_counter() - began


def work(seed: int) -> dict[str, float]:
    metrics = jax.block_until_ready(train(key(seed)))["metrics"]
    last = -max(1, metrics["returned_episode"].shape[-3] // 10)
    ended, score = (metrics[name][..., last:, :, :] for name in ("returned_episode", "returned_episode_returns"))
    return {"mean_return": float((score * ended).sum() / ended.sum())}


work(0)
turns.ready(compiled, ["jax"])
turns.serve(work)

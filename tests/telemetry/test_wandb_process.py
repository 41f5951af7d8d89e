"""Records under the names and in the units of the old trainer."""

from __future__ import annotations

import jax

from longhaul.envs.hackmatrix.environment import hackmatrix
from longhaul.envs.hackmatrix.reward import PARTS
from longhaul.telemetry import wandb_process
from tests.helpers.wandb_files import record

THEIRS = {
    *(f"train/{name}" for name in ("pg_loss", "vf_loss", "ent_loss", "total_loss", "entropy")),
    *(f"train/{name}" for name in ("approx_kl", "clip_frac")),
    *(f"train/{name}" for name in ("mean_reward", "mean_episode_length", "mean_episode_return", "num_episodes")),
    *(f"train/{name}" for name in ("updates_per_second", "update_step", "steps_per_second")),
    *(f"key/{name}" for name in ("mean_reward", "mean_episode_return", "mean_episode_length")),
    *(f"reward/{name}" for name in PARTS),
    *(f"actions/{name}_frac" for name in ("move", "siphon", "program")),
    "stats/highest_stage",
}
"""What the old trainer logs, and what its specification wanted it to."""


def test_a_record_of_hackmatrix_has_all_the_old_names() -> None:
    game = hackmatrix(boards=2)
    told = jax.eval_shape(lambda key: game.metrics(game.reset(key)[0]), jax.random.key(0))
    learnt = ("policy_loss", "value_loss", "total_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm", "lr")
    names = ["episode/count", "episode/return", "episode/length", *(f"episode/{name}" for name in told)]
    names += [f"peak/{name}" for name in game.spec.peaks] + [f"ppo/{name}" for name in learnt]
    found = wandb_process.renamed(record(4, **dict.fromkeys(names, 1.0)))
    ours = {"env_steps", "agent_steps", "wall_seconds", "ppo/grad_norm", "ppo/lr", "episode/stage", "episode/score"}
    assert set(found) == THEIRS | ours


def test_renaming_changes_units_as_the_old_trainer_has_them() -> None:
    told = {
        "episode/count": 6.0, "episode/return": -3.0, "episode/length": 20.0, "episode/reward_kills": 1.0,
        "episode/reward_damage_penalty": -4.0, "ppo/entropy": 2.0, "ppo/policy_loss": 0.25, "peak/stage": 3.0,
    }  # fmt: skip
    found = wandb_process.renamed(record(6, **told), record(4))
    assert found["train/mean_reward"] == found["key/mean_reward"] == -0.15
    assert (found["reward/kills"], found["reward/damage_penalty"]) == (0.05, -0.2)  # together the mean reward
    assert found["train/num_episodes"] == 3.0  # an update
    assert found["train/ent_loss"] == -found["train/entropy"] == -2.0
    assert found["train/steps_per_second"] == 640.0
    assert found["train/updates_per_second"] == 20.0  # of 32 steps each
    assert (found["train/update_step"], found["train/pg_loss"], found["stats/highest_stage"]) == (6, 0.25, 3.0)
    assert not [name for name in found if name.startswith(("episode/", "peak/"))]


def test_a_record_without_an_ended_episode_leaves_its_means_out() -> None:
    found = wandb_process.renamed(record(2, **{"episode/count": 0.0, "episode/return": None, "episode/length": None}))
    assert not [name for name in found if "mean_" in name]
    assert found["train/num_episodes"] == 0.0

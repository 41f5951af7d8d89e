"""Recipes: a name for a complete Run that works, each with its measured result."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from longhaul.algorithms import external
from longhaul.algorithms.config import (
    ALGORITHMS,
    LOSSES,
    APGConfig,
    BCConfig,
    DQNConfig,
    GRPOConfig,
    IMPALAConfig,
    PPOConfig,
    PQNConfig,
    SACConfig,
    TD3Config,
)
from longhaul.config.run import Driving, Named, Run
from longhaul.driving.sim.config import Config as SimulatorConfig
from longhaul.driving.sim.config import Weights
from longhaul.networks.config import NetworkConfig
from longhaul.reasoning.config import ModelConfig, Reasoning
from longhaul.runtime.config_fields import replaced, walk
from longhaul.runtime.errors import ModuleError, RunError
from longhaul.telemetry.health import Bounds
from longhaul.topologies.actor_learner.config import ActorConfig


@dataclass(frozen=True)
class Grid:
    """Runs of a law: `base` with each of `sizes` (million parameters), of `scenarios` and of `seeds` seeds.

    `checks` are points "SIZE:SCENARIOS" that the law forecasts; they are trained last and left out of the fit.
    """

    base: Run
    sizes: tuple[float, ...]
    scenarios: tuple[int, ...]
    seeds: int = 1
    metric: str = "goal"
    checks: tuple[str, ...] = ()


def cartpole() -> Run:
    """CartPole-v1 by PPO: balance a pole.

    Mean return 500 of 500 on 100 episodes after 500,000 steps, for seeds 0, 1 and 2.
    """
    return Run(
        "cartpole",
        Named("cartpole"),
        PPOConfig(lr=2.5e-3, ent_coef=0.01),
        total_steps=500_000,
        num_envs=32,
        num_steps=64,
        health=Bounds(solved=475.0),  # as Gymnasium has it
    )


def impala_cartpole() -> Run:
    """CartPole-v1 by IMPALA: V-trace, RMSProp, one step of it an update.

    Mean return 500 of 500 on 100 episodes after 500,000 steps, for seeds 0, 1 and 2, in every topology (central
    inference by gRPC: seed 0). In training 475 within 131,000 steps by `fused`, 164,000 by 2 `actors`, threads or
    processes, and 229,000 by 2 of `central`.
    """
    return dataclasses.replace(
        cartpole(), recipe="impala-cartpole", algorithm=IMPALAConfig(lr=5e-3, ent_coef=0.01), num_steps=20
    )


def appo_cartpole() -> Run:
    """CartPole-v1 by APPO: V-trace, a clipped surrogate, several steps of Adam an update.

    Mean return 500 of 500 on 100 episodes after 500,000 steps, for seeds 0, 1 and 2; in training, 475 within 164,000.
    """
    return dataclasses.replace(
        cartpole(), recipe="appo-cartpole",
        algorithm=IMPALAConfig(
            lr=2.5e-3, optimiser="adam", vtrace_lambda=0.95, clip_eps=0.2, num_minibatches=4, update_epochs=4,
            max_grad_norm=0.5, normalise_advantage=True,
        ),
    )  # fmt: skip


def impala_pong() -> Run:
    """Pong from pixels by IMPALA: actors step Atari on the host, for a large CPU with a GPU.

    The paper's settings for Atari as remembered, not looked up, for means where its losses are sums over 640 steps:
    gradients are clipped at 40 / 640, and RMSProp adds 0.01 / 640^2. Not measured: `seed-pong` says what was.
    """
    return Run(
        "impala-pong",
        Named("ale/pong"),
        IMPALAConfig(
            lr=6e-4, rms_eps=0.01 / 640**2, max_grad_norm=40 / 640, ent_coef=0.01, reward_clip="unit",
            network=NetworkConfig(torso="nature", shared=True),
        ),
        topology="actors",
        acting=ActorConfig(staleness=1),
        total_steps=50_000_000,
        num_envs=32,
        num_steps=20,
        evaluation_episodes=10,
        health=Bounds(solved=18.0),
    )  # fmt: skip


def seed_pong() -> Run:
    """Pong from pixels by central inference: actors step Atari, and the policy acts on the learner's device.

    SEED RL's topology (Espeholt et al. 2020) with `appo-pong`'s learning, on frames of 84x84. One run with four actors
    and an H100, on six shared cores, ended with the machine after 1.27 M of 4 M steps, in 7 minutes: from -20.4 it came
    above 0 after 0.84 M, and was at 17.3 from 1.15 M on, in training (benchmarks/results/pong.json).
    """
    return dataclasses.replace(appo_pong(), recipe="seed-pong", environment=Named("ale/pong"), topology="central")


def appo_pong() -> Run:
    """Pong from small pixels by APPO, for a CPU: frames of 42x42 make the network several times as cheap.

    Measured so far, on a small share of two busy cores: 168,960 steps of seed 0 in 23 minutes, one actor, with the
    learning rate falling over 1 M steps: too few to learn, mean return -20.3 throughout. `seed-pong` learns with these
    settings from frames of 84x84, and is above 0 after 0.84 M steps.
    """
    return dataclasses.replace(
        impala_pong(), recipe="appo-pong", environment=Named("ale/pong?img_height=42&img_width=42"),
        algorithm=IMPALAConfig(
            lr=5e-4, optimiser="adam", vtrace_lambda=0.95, clip_eps=0.15, num_minibatches=4, update_epochs=3,
            max_grad_norm=0.5, normalise_advantage=True, ent_coef=0.01, reward_clip="unit", chunk=256,
            network=NetworkConfig(torso="nature", shared=True),
        ),
        total_steps=4_000_000,
        num_steps=32,
    )  # fmt: skip


def pendulum() -> Run:
    """Pendulum-v1 by PPO: swing a rod up and hold it.

    Mean return -167, -165 and -175 on 100 episodes after 2 M steps, for seeds 0, 1 and 2.
    """
    return Run(
        "pendulum",
        Named("pendulum"),
        PPOConfig(
            lr=1e-3, gamma=0.95, gae_lambda=0.95, ent_coef=0.0, clip_value=False, reward_scale=0.1, num_minibatches=8,
            update_epochs=8, normalise_observation=True,
        ),
        total_steps=2_000_000,
        num_envs=64,
        num_steps=64,
        health=Bounds(solved=-200.0),
    )  # fmt: skip


def cartpole_dqn() -> Run:
    """CartPole-v1 by DQN: double, duelling, returns of 3 steps, by priority.

    Mean return 500 of 500 on 100 episodes after 200,000 steps, for seeds 0, 1 and 2.
    """
    return dataclasses.replace(
        cartpole(), recipe="cartpole-dqn",
        algorithm=DQNConfig(
            lr=1e-3, gradient_steps=16, batch_size=64, tau=0.005, epsilon_final=0.02, exploration=0.1,
            replay_size=200_000,
        ),
        total_steps=200_000, num_envs=8, num_steps=4,
    )  # fmt: skip


def cartpole_pqn() -> Run:
    """CartPole-v1 by PQN: values from many worlds at once, without a replay.

    Mean return 500 of 500 on 100 episodes after 500,000 steps, for seeds 0, 1 and 2.
    """
    algorithm = PQNConfig(lr=1e-3, num_minibatches=16, q_lambda=0.95, epsilon_final=0.02)
    return dataclasses.replace(cartpole(), recipe="cartpole-pqn", algorithm=algorithm)


def minatar_dqn() -> Run:
    """Breakout of MinAtar by DQN, from 10x10 pixels; needs gymnax.

    Mean return 27.0 on 100 episodes of at most 1,000 steps after 500,000 steps, seed 0; 16.3 in training, where 5 % of
    the actions are random. Curve: benchmarks/results/minatar-dqn.json.
    """
    return Run(
        "minatar-dqn",
        Named("gymnax/Breakout-MinAtar"),
        DQNConfig(
            lr=5e-4, gradient_steps=16, batch_size=32, tau=0.005, exploration=0.1, learning_starts=5_000,
            replay_size=100_000, replay_precision="bf16",
            network=dataclasses.replace(DQNConfig.network, torso="minatar"),
        ),
        total_steps=500_000,
        num_envs=32,
        num_steps=4,
    )  # fmt: skip


def brax_ant() -> Run:
    """Brax's ant by PPO: run on four legs; needs brax.

    Mean return 1,113 in training after 500,000 steps, seed 0, still rising. On an H100, with `--num-envs 4096
    --num-minibatches 32 --lr 3e-4 --total-steps 50000000`, seed 0: 7,789 in training after 20.5 M steps, 13 seconds
    after the first, when the machine had to be given back. Curves: benchmarks/results/brax-ant.json.
    """
    return Run(
        "brax-ant",
        Named("brax/ant?backend=spring"),
        PPOConfig(
            lr=5e-4, gamma=0.97, gae_lambda=0.95, ent_coef=0.001, clip_value=False, reward_scale=0.1,
            num_minibatches=16, update_epochs=4, max_grad_norm=1.0, normalise_observation=True,
            network=NetworkConfig(hidden_dim=128, activation="silu"),
        ),
        total_steps=500_000,
        num_envs=256,
        num_steps=16,
        evaluation_episodes=16,
    )  # fmt: skip


def pendulum_sac() -> Run:
    """Pendulum-v1 by SAC: swing a rod up and hold it, learnt from a replay in few steps.

    Mean return -142, -145 and -146 on 100 episodes after 30,000 steps, for seeds 0, 1 and 2.
    """
    return dataclasses.replace(
        pendulum(), recipe="pendulum-sac",
        algorithm=SACConfig(
            lr=1e-3, batch_size=128, gradient_steps=8, learning_starts=1_000, replay_size=30_000,
            network=dataclasses.replace(SACConfig.network, hidden_dim=64),
        ),
        total_steps=30_000, num_envs=4, num_steps=2,
    )  # fmt: skip


def pendulum_td3() -> Run:
    """Pendulum-v1 by TD3: swing a rod up and hold it, learnt from a replay in few steps.

    Mean return -146, -146 and -153 on 100 episodes after 30,000 steps, for seeds 0, 1 and 2.
    """
    return dataclasses.replace(
        pendulum_sac(), recipe="pendulum-td3",
        algorithm=TD3Config(
            lr=1e-3, batch_size=128, gradient_steps=8, replay_size=30_000,
            network=dataclasses.replace(TD3Config.network, hidden_dim=64),
        ),
    )  # fmt: skip


def pendulum_apg() -> Run:
    """Pendulum-v1 by analytic policy gradient: through the pendulum's own motion, in half a minute.

    Mean return -203 on 100 episodes after 1 M steps, seed 0. The horizon, 32 steps, matters: at half the learning rate
    16 reached -322, and 64 reached -743.
    """
    return dataclasses.replace(
        pendulum(), recipe="pendulum-apg", algorithm=APGConfig(lr=1e-2, gamma=0.99, max_grad_norm=1.0),
        total_steps=1_000_000, num_steps=32,
    )  # fmt: skip


def cartpole_swingup_apg() -> Run:
    """Cart-pole swing-up of MuJoCo Playground by analytic policy gradient, through MJX's physics; needs playground.

    Mean return 437 on 32 episodes after 2 M steps, seed 0; untrained 0.02. PPO with the settings of `pendulum`: 300.
    """
    return Run(
        "cartpole-swingup-apg",
        Named("playground/CartpoleSwingup"),
        APGConfig(lr=3e-3, gamma=0.99, max_grad_norm=1.0),
        total_steps=2_048_000,
        num_envs=32,
        num_steps=64,
        evaluation_episodes=32,
    )  # fmt: skip


def bc() -> Run:
    """Behaviour cloning of what was recorded in any environment: give --env NAME and --recorded FILES."""
    return Run("bc", Named("cartpole"), BCConfig(), total_steps=500_000, num_envs=16, num_steps=32)


CONDUCT = Weights(
    collision=-6.0, offroad=-6.0, red_light=-6.0, speeding=-0.1, unease=-0.05, near_collision=-0.2
)  # fmt: skip
"""Reward with terms for what the benchmarks' scores judge: speed limits, comfort, time to collision."""


def driving() -> Run:
    """Driving among logged traffic by PPO, in generated scenarios or, with --data, in real logs.

    The safety check replaces commands in training too, so few steps are enough; --no-safety trains the network alone,
    at 2.5 times the rate. After 1.8 M steps (7:48 minutes of two cores with scenarios, compiling and evaluation, 27 s
    more with the installation), on 256 generated scenarios not trained in, seed 0: accuracy 0.996, V-Max score 0.976,
    no red light run, goals 0.957. On seven real logs as the ego among logged traffic: accuracy 1.0, V-Max score 0.887.
    The generator and the check were changed after looking at these logs, so they are no unseen test. Without the check,
    after 16 M steps in the generator of 2026-11-24: accuracy 0.988, V-Max score 0.946.
    """
    return Run(
        "driving",
        Driving(scenarios=4096, simulator=SimulatorConfig(speed_limit=True, weights=CONDUCT, safety=True)),
        PPOConfig(
            lr=5e-4, gamma=0.98, gae_lambda=0.95, ent_coef=0.005, ent_coef_final=0.0, clip_value=False,
            num_minibatches=8, update_epochs=4, network=NetworkConfig(torso="deepset", hidden_dim=128),
        ),
        total_steps=1_800_000,
        num_envs=256,
        num_steps=32,
        health=Bounds(solved=6.5),
    )  # fmt: skip


def driving_bc() -> Run:
    """Driving by behaviour cloning: what the driver of each log did, or in generated scenarios that of the traffic.

    In half of the worlds the policy drives and is told what he would do. After 3 M steps of seed 0, on 128 generated
    scenarios not trained in: accuracy 0.992, no collision, nobody off the road, 0.024 of the red lights run, progress
    0.970. Beside it, in the same scenarios, the Intelligent Driver Model: accuracy 0.992, collisions 0.008, progress
    0.991. With the expert in all worlds (plain cloning), after 0.5 M steps in 256 scenarios: accuracy 0.805, collisions
    0.086, off the road 0.094, progress 0.879.
    """
    network = NetworkConfig(torso="deepset", hidden_dim=128)
    return dataclasses.replace(
        driving(), recipe="driving-bc", environment=Driving(),
        algorithm=BCConfig(num_minibatches=8, expert_share=0.5, network=network),
        total_steps=3_000_000, health=Bounds(),
    )  # fmt: skip


def driving_sac() -> Run:
    """Driving by SAC from a replay that keeps observations in bf16, with the reward and the safety check of `driving`.

    After 0.3 M steps, on 1,000 generated scenarios not trained in, seeds 0, 1 and 2: accuracy 0.989, 0.969 and 0.987,
    collisions 0.006, 0.010 and 0.012, off the road 0.005, 0.021 and 0.001, no red light, V-Max score 0.92, 0.90 and
    0.94, and goals 0.65, 0.68 and 0.63: it drives with care, and is late. On seven real logs, on which the check was
    tuned: accuracy 0.857, 1.0 and 1.0. 612 CPU-seconds for the three in one program (--seeds 3), all included.
    """
    return dataclasses.replace(
        driving(), recipe="driving-sac",
        environment=replaced(driving(), actions="continuous").environment,
        algorithm=SACConfig(
            lr=5e-4, gamma=0.98, tau=0.01, batch_size=256, gradient_steps=8, learning_starts=5_000,
            replay_size=400_000, replay_precision="bf16",
            network=dataclasses.replace(SACConfig.network, torso="deepset", hidden_dim=128),
        ),
        total_steps=1_000_000, num_envs=64, num_steps=4,
    )  # fmt: skip


def driving_bcsac() -> Run:
    """Driving by BC-SAC: SAC among whose worlds are some that the expert drives, whose actions it finds likely.

    With the reward and the safety check of `driving`. After 0.7 M steps, on 1,000 generated scenarios not trained in,
    seeds 0, 1 and 2: accuracy 0.977, 0.990 and 0.991, collisions 0.008, 0.003 and 0.005, off the road 0.014, 0.007 and
    0.004, V-Max score 0.95, 0.96 and 0.96, and goals 0.89, 0.92 and 0.89, more than SAC's.
    """
    return dataclasses.replace(replaced(driving_sac(), imitation=0.1, expert_share=0.25), recipe="driving-bcsac")


def driving_selfplay() -> Run:
    """Self-play: all agents of generated worlds driven by one policy, from its own observation each.

    Worlds with 12 agents or more to control, of which 16 are driven; nobody knows where others are bound. Measured
    after 40 M agent steps (26 CPU-minutes, one seed): of the 2,952 agents of 256 generated scenarios that neither
    training nor the choice of these settings saw, whatever their number, 97.0 % reached their goal, 0.5 % collided and
    0.5 % left the road; of the 730 that met a light that was known, 9.2 % ran it red. Curve, and the much weaker
    figures on real logs: benchmarks/results/driving-selfplay.json.
    """
    return dataclasses.replace(
        driving(), recipe="driving-selfplay",
        environment=Driving(scenarios=2048, least=12, simulator=SimulatorConfig(agents=16)),
        total_steps=40_000_000, num_envs=64, health=Bounds(solved=7.0),
    )  # fmt: skip


def driving_best() -> Run:
    """Self-play with the safety check and a brisk reward: what the shipped policy was fine-tuned by.

    All agents of crowded worlds, up to 16 each. A collision counts more than elsewhere and so does progress, since a
    goal is where the log is at its end: who drives more slowly than the log misses it. Begin it from a policy that
    drives, `--init-from pretrained`. 400 M steps are a night of two cores. On an H100 700 M took 167 s, by

        longhaul train driving-best --init-from pretrained --num-envs 1024 --num-minibatches 16 --lr 0.0006 \\
            --scenarios 8192 --total-steps 700000000

    Figures: docs/driving-findings.md, benchmarks/results/driving-pretrained.json.
    """
    weights = dataclasses.replace(
        CONDUCT, progress=0.15, goal=4.0, collision=-10.0, speeding=-0.06, unease=-0.1, unsafe=-0.02
    )
    return dataclasses.replace(
        replaced(driving(), lr=3e-4), recipe="driving-best",
        environment=Driving(
            scenarios=4096, least=8,
            simulator=SimulatorConfig(
                agents=16, speed_limit=True, weights=weights, safety=True,
                bystanders=(0.15, 0.1), start_offset=(0.2, 0.05), start_speed=0.15,
            ),
        ),
        total_steps=400_000_000, num_envs=64, health=Bounds(),
    )  # fmt: skip


def driving_log() -> Run:
    """The ego among replayed logs, sized for thousands of them: give --data, best shards of `longhaul data convert`.

    `driving` at a larger size: a wider network that sees 16 others, for longer. The others follow their log whatever
    the ego does, so that what it scores is as much imitation as driving; evaluate it with --traffic idm, too. Measured
    so far: `driving`, not this.
    """
    return dataclasses.replace(
        replaced(driving(), lr=3e-4, hidden_dim=256), recipe="driving-log",
        environment=Driving(scenarios=4096, objects=64, simulator=SimulatorConfig(neighbours=16)),
        total_steps=100_000_000, num_envs=512, health=Bounds(),
    )  # fmt: skip


def driving_large() -> Run:
    """Driving by a Wayformer of 10 million parameters that sees 200 pieces of road, in bf16: for a GPU.

    Not measured yet: what it reaches, and how fast. It starts and trains on a CPU too, tested at small sizes (give
    --model-size, --num-envs, --num-steps): by its count of products an update takes two cores hours as it stands.
    """
    return Run(
        "driving-large",
        Driving(scenarios=10_000, simulator=SimulatorConfig(neighbours=16, waypoints=20, road_points=200)),
        PPOConfig(
            lr=2e-4, gamma=0.98, gae_lambda=0.95, ent_coef=0.005, ent_coef_final=0.0, clip_value=False,
            num_minibatches=8, update_epochs=3, chunk=2048,
            network=NetworkConfig(torso="wayformer", model_size=10.0, precision="bf16"),
        ),
        total_steps=200_000_000,
        num_envs=1024,
        num_steps=32,
    )  # fmt: skip


def driving_scaling() -> Grid:
    """A law: failure of driving over a model's size and the number of scenarios it was trained in.

    Measured with 512 worlds, 4.2 M steps a run and 512 episodes (170 s of an H100 for 32 runs): failure falls from 0.39
    to 0.05, as about scenarios^-0.48 (90 %: 0.43 to 0.67), and hardly with size, whose exponent the fit does not find.
    Runs and law: benchmarks/results/driving-scaling.json.
    """
    base = replaced(driving(), model_size=0.3, evaluation_episodes=1024)
    base = dataclasses.replace(base, recipe="driving-scaling", environment=Driving(), total_steps=6_000_000)
    return Grid(base, sizes=(0.03, 0.1, 0.3, 1.0), scenarios=(16, 64, 256, 1024), seeds=2)


def hackmatrix() -> Run:
    """HackMatrix by PPO with masked actions, with the settings of the game's own trainer.

    Rewards as they are, from -0.01 to above 1,500. The network is that trainer's, too: 469,021 parameters, one torso,
    as Flax begins it. Where we differ: advantages are normalised over the whole batch.

    Measured after 10 M steps, the mean of seeds 0, 1 and 2: return -1.18 (-0.80, -0.89 and -0.97 on 100 games by the
    likeliest action), entropy 0.77, approx_kl at most 0.003, clip fraction at most 0.02, stage 1.86, 4 the highest.
    Part of it is won by dying in the step that completes the first stage, which costs less than going on.
    Curves: benchmarks/results/hackmatrix-learning.json.
    """
    return Run(
        "hackmatrix",
        Named("hackmatrix"),
        PPOConfig(
            lr=2.5e-4, anneal=False, ent_coef=0.15, clip_value=False, adam_eps=1e-8, num_minibatches=None,
            update_epochs=None, network=NetworkConfig(hidden_dim=256, activation="relu", shared=True, init="lecun"),
        ),
        total_steps=10_000_000,
        num_envs=256,
        num_steps=128,
        scaling="batch",
        # Its trainer's plan asks for 1.0. A policy that chooses evenly among what is legal has 1.16, and one that has
        # learnt to walk to the exit about 0.75.
        health=Bounds(entropy=0.3),
    )  # fmt: skip


def hackmatrix_best() -> Run:
    """HackMatrix, with defects of its trainer's rules put right, by settings that learn more of it.

    Against `hackmatrix`: four times as many updates of a quarter of the batch, a learning rate four times as large that
    falls to 0, less entropy, rewards scaled. In the rules as they are these settings find that whoever dies in the step
    that completes a stage loses less than who plays on; `hackmatrix-fixed` has no such step.

    Measured after 20 M steps of seed 0: return 0.47 on 100 games by the likeliest action, mean stage 1.61 in training
    and 6 the highest; 1.7 % of the actions are siphons, 0.1 % programs. Curve: benchmarks/results/hackmatrix-best.json.
    After 500 M steps with batches 16 times as large: return 2.72, mean stage 1.75, 2.9 % siphons, 1.7 % programs; one
    game in 1,300 is won, or fewer. Curve: benchmarks/results/hackmatrix-500m.json.
    """
    run = replaced(
        hackmatrix(), env="hackmatrix-fixed", num_steps=32, total_steps=20_000_000, lr=1e-3, anneal=True, ent_coef=0.05,
        ent_coef_final=0.005, reward_scale=0.1,
    )  # fmt: skip
    return dataclasses.replace(run, recipe="hackmatrix-best")


def reasoning_arithmetic() -> Run:
    """Chained arithmetic in written steps by DAPO: a language model of 108,000 parameters, from nothing.

    A warm start imitates demonstrations, of which 30 % are the answer alone and some are wrong; then rewards teach.
    Measured, seeds 0 to 9: pass@1 0.981 to 0.999 on 256 problems held out, after 130 updates from rewards, which find
    it at 0.65 to 0.71; 150 CPU-seconds. Curves: benchmarks/results/reasoning-arithmetic.json.

    Where the next term of a chain stands in the prompt is what a seed may fail to find. Heads for a sum's two terms,
    its sign and its place, and positions that turn within 40 tokens, find it each time (docs/reasoning.md).
    """
    return Run(
        "reasoning-arithmetic",
        Reasoning(),
        GRPOConfig(loss="dapo", lr=4e-4, taught=150, model=ModelConfig(heads=4, kv_heads=4, head_dim=16, theta=100.0)),
        total_steps=280 * 16 * 16 * 28,
        num_envs=16,
        num_steps=28,
        health=Bounds(entropy=0.0, solved=0.95),  # who is sure of a sum has no entropy left
    )


def reasoning_questions() -> Run:
    """Questions with answers from your JSONL file by DAPO: give --questions FILE, and --model-folder a model.

    Answers are checked on the host, where completions are sampled, in a thread beside the learner. Not measured: that
    depends on file and model.
    """
    return Run(
        "reasoning-questions",
        Reasoning(task="questions"),
        GRPOConfig(loss="dapo", group=8, lr=1e-5),
        topology="actors",
        acting=ActorConfig(actor_kind="thread"),
        total_steps=200 * 16 * 8 * 256,
        num_envs=16,
        num_steps=256,
        health=Bounds(entropy=0.0, solved=0.95),
    )


def reasoning_smollm() -> Run:
    """SmolLM2-135M-Instruct on sums of reasoning-gym by DAPO and LoRA: first `longhaul fetch smollm2-135m`.

    The prompt has two solved examples, so that the answer's format is known and a completion has few tokens. Measured,
    seeds 0 and 1: pass@1 on 64 problems held out from 0.379 to 0.742 and from 0.406 to 0.719. Curves, and those of
    products with the same settings: benchmarks/results/reasoning-smollm.json.
    """
    return Run(
        "reasoning-smollm",
        Reasoning(
            task="reasoning-gym:chain_sum",
            task_settings="min_terms=2,max_terms=2,min_digits=1,max_digits=1",
            template="Question: {question}\nAnswer: ", stop="\n", shots=2, problems=2048, wave=128,
        ),
        GRPOConfig(
            loss="dapo", group=16, lr=1e-4, warmup=4, num_minibatches=1, accumulate=4,
            model_folder="smollm2-135m", model=ModelConfig(lora=16),
        ),
        topology="actors",
        acting=ActorConfig(actor_kind="thread", actors=1),
        total_steps=24 * 8 * 16 * 6,
        num_envs=8,
        num_steps=6,
        evaluation_episodes=64,
        health=Bounds(entropy=0.0, solved=0.95),
    )  # fmt: skip


def ppo() -> Run:
    """PPO with PureJaxRL's settings in any environment: give --env NAME."""
    return Run("ppo", Named("cartpole"), PPOConfig(), total_steps=1_000_000, num_envs=64, num_steps=128)


RECIPES: dict[str, Callable[[], Run]] = {
    "cartpole": cartpole,
    "impala-cartpole": impala_cartpole,
    "appo-cartpole": appo_cartpole,
    "impala-pong": impala_pong,
    "seed-pong": seed_pong,
    "appo-pong": appo_pong,
    "cartpole-dqn": cartpole_dqn,
    "cartpole-pqn": cartpole_pqn,
    "minatar-dqn": minatar_dqn,
    "brax-ant": brax_ant,
    "pendulum": pendulum,
    "pendulum-sac": pendulum_sac,
    "pendulum-td3": pendulum_td3,
    "pendulum-apg": pendulum_apg,
    "cartpole-swingup-apg": cartpole_swingup_apg,
    "driving": driving,
    "driving-bc": driving_bc,
    "driving-sac": driving_sac,
    "driving-bcsac": driving_bcsac,
    "driving-selfplay": driving_selfplay,
    "driving-best": driving_best,
    "driving-log": driving_log,
    "driving-large": driving_large,
    "hackmatrix": hackmatrix,
    "hackmatrix-best": hackmatrix_best,
    "reasoning-arithmetic": reasoning_arithmetic,
    "reasoning-questions": reasoning_questions,
    "reasoning-smollm": reasoning_smollm,
    "bc": bc,
    "ppo": ppo,
}

NO_ENV = ("ppo", "bc")
"""Recipes for any environment, which must be named."""

GRIDS: dict[str, Callable[[], Grid]] = {"driving-scaling": driving_scaling}
"""Recipes of many runs."""

GROUP = "longhaul.recipes"
"""Entry points of installed packages whose objects are recipes: functions that return a Run."""


def recipe(name: str) -> Run:
    """The Run of that name, of an installed package's or of the user's own "package.module:name".

    Raises RunError, with the nearest names, where there is none.
    """
    if name in GRIDS:
        raise RunError(f"recipe {name} is a grid of many runs, and this is for one: driving, say")
    if name in RECIPES:
        return RECIPES[name]()
    installed = {point.name: point.value for point in entry_points(group=GROUP)}
    if name not in installed and ":" not in name:
        raise RunError(f"no recipe is named {name!r}; {_hint(name, [*RECIPES, *GRIDS, *installed])}")
    return dataclasses.replace(_own(installed.get(name, name)), recipe=name)


ELSEWHERE = (
    "a2c a3c acktr acer trpo ddpg d4pg c51 qrdqn rainbow r2d2 redq droq tqc crossq cql iql awr awac td3bc mappo ippo "
    "qmix vdn maddpg dreamer dreamerv3 muzero es ars reinforce"
)
"""Algorithms of other libraries that are no algorithm here."""


def _hint(name: str, names: Sequence[str]) -> str:
    """Remedy for a name that no recipe has: an algorithm's recipes, the nearest names, or all."""
    word = name.lower()
    if word in LOSSES and word not in ALGORITHMS:
        return f"{word} is a loss of GRPO: longhaul train reasoning-questions --loss {word}"
    if word in ELSEWHERE.split():
        names = ", ".join(ALGORITHMS)
        return f"{word} is not among the algorithms ({names}); your own is --algorithm my_module:MyClass"
    if word == "sft":
        return "answers of a file are imitated before rewards by longhaul train reasoning-questions --taught UPDATES"
    if word not in RECIPES and word in ALGORITHMS:
        known = learning_by(word)
        anywhere = [candidate for candidate in known if isinstance(RECIPES[candidate]().environment, Named)][:1]
        remedy = "".join(f"; in another environment: longhaul train {candidate} --env NAME" for candidate in anywhere)
        return f"{word} is an algorithm, of the recipes {', '.join(known)}{remedy}"
    if near := difflib.get_close_matches(word, names, n=3, cutoff=0.5):
        return f"did you mean {' or '.join(near)}?"
    from longhaul.envs import registry  # which imports JAX

    env = f"gymnasium/{name}" if re.fullmatch(r"\w+-v\d+", name) else word
    if env != word or word in registry.TABLE:
        return f"{name} is an environment: longhaul train ppo --env {env}"
    return f"there are {', '.join(names)}"


def learning_by(algorithm: str) -> list[str]:
    """Names of the recipes with an algorithm."""
    return [name for name, make in RECIPES.items() if external.name_of(make().algorithm) == algorithm]


def _own(name: str) -> Run:
    """The Run that the function "module:name" returns."""
    from longhaul.runtime.user_modules import load

    try:
        loaded = load(name)
    except ValueError as error:
        raise ModuleError(f"recipe {name}: {error}") from error
    run = loaded() if callable(loaded) else loaded
    if not isinstance(run, Run):
        raise RunError(f"recipe {name} gives a {type(run).__name__}; it must give a longhaul.config.run.Run")
    return run


def with_algorithm(recipe: Run, algorithm: Any) -> Run:
    """`recipe` with another algorithm: its name, or the class of the user's own, or one that is made.

    Raises RunError, one line, where there is none, or where a setting of it is one of the run already.
    """
    if isinstance(algorithm, str):
        config = external.load(algorithm)
    else:
        try:
            config = external.config_of(algorithm)
        except ValueError as error:
            raise RunError(f"algorithm {getattr(algorithm, '__qualname__', repr(algorithm))}: {error}") from error
    if isinstance(algorithm, str | type) and type(config) is type(recipe.algorithm):
        return recipe  # with its values
    run = dataclasses.replace(recipe, algorithm=config)
    seen: set[str] = set()
    for leaf in walk(run):
        if leaf.name in seen:
            raise RunError(f"{external.name_of(config)}: {leaf.name} is a setting of the run already; rename the field")
        seen.add(leaf.name)
    return run


def about(name: str) -> str:
    """The first line about a recipe, of one run or of many."""
    known = RECIPES | GRIDS
    if name not in known:
        return f"Recipe {name}, from outside the package."
    return (known[name].__doc__ or name).splitlines()[0]  # python -OO has no docstrings


def described() -> list[tuple[str, str]]:
    """Every recipe with its first line, those of installed packages last."""
    ours = [(name, about(name)) for name in (*RECIPES, *GRIDS)]
    return ours + [(point.name, f"of {point.value}") for point in entry_points(group=GROUP)]

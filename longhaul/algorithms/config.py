"""Configurations of all algorithms: plain data, without JAX, so that flags and recipes start fast."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from longhaul.networks.config import NetworkConfig
from longhaul.reasoning.config import GateConfig, ModelConfig
from longhaul.runtime.config_fields import CHANGEABLE, Setting, nested, setting

SCALINGS = ("none", "batch")
"""Rules by which minibatches and epochs follow from the batch; see `batch_scaling`."""

LR_RULES = ("none", "linear", "sqrt")
"""Rules by which the learning rate does."""

STORES = ("fp32", "bf16")
"""Types of float32 observations in the replay."""

LR = Setting("learning rate", least=0, resume=CHANGEABLE)
ANNEAL = Setting("let the learning rate fall to 0 over the run, linearly", resume=CHANGEABLE)
WARMUP = Setting("updates over which the learning rate rises to lr at the beginning", least=0, resume=CHANGEABLE)
GAMMA = Setting("discount of a step", least=0, most=1, resume=CHANGEABLE)
MINIBATCHES = Setting(
    "minibatches of an epoch, which must divide a device's batch; none: by --scaling", least=1, resume=CHANGEABLE
)
EPOCHS = Setting("passes over the batch of an update; none: by --scaling", least=1, resume=CHANGEABLE)
VF_COEF = Setting("weight of the value's loss", resume=CHANGEABLE)
ENT_COEF = Setting("weight of the entropy", resume=CHANGEABLE)
ENT_COEF_FINAL = Setting("value of ent-coef at the run's end, approached linearly; none: constant", resume=CHANGEABLE)
MAX_GRAD_NORM = Setting("norm to which longer gradients are cut", least=0, resume=CHANGEABLE)
ADAM_EPS = Setting("term added to the root of Adam's second moment", above=0)  # 0: 0 / 0 for an input that is always 0
NORMALISE_ADVANTAGE = Setting("normalise advantages of a batch to mean 0 and deviation 1", resume=CHANGEABLE)
NORMALISE_OBSERVATION = Setting("normalise observations by running mean and deviation")
REWARD_SCALE = Setting("factor on rewards for learning", resume=CHANGEABLE)
KL_STOP = Setting("end an update once approx_kl passed it", resume=CHANGEABLE)
CHUNK = Setting(
    "rows of a minibatch whose gradient is taken at once; affects speed; none: by the device",
    least=1,
    resume=CHANGEABLE,
)
ACCUMULATE = Setting(
    "pieces of a minibatch, at least, over which its gradient is summed: the same one, in less memory",
    least=1,
    resume=CHANGEABLE,
)
CLIP_EPS = Setting("clip range of the policy's ratio about 1", least=0, resume=CHANGEABLE)
EPSILON = Setting("share of random actions when learning begins", least=0, most=1, resume=CHANGEABLE)
EPSILON_FINAL = Setting("share of random actions at the end", least=0, most=1, resume=CHANGEABLE)
EXPLORATION = Setting("share of the run over which epsilon falls to epsilon-final", least=0, most=1, resume=CHANGEABLE)
DUELLING = Setting("duelling heads of DQN or PQN: a value, and advantages about it")
TAU = Setting("share by which target networks follow, a step of the optimiser", least=0, most=1, resume=CHANGEABLE)
N_STEP = Setting("rewards that a target sums before it trusts a critic", least=1)
BATCH_SIZE = Setting(
    "steps of a step of the optimiser, drawn from the replay, over all devices", least=1, resume=CHANGEABLE
)
GRADIENT_STEPS = Setting("steps of the optimiser an update", least=1, resume=CHANGEABLE)
LEARNING_STARTS = Setting("steps in the replay before learning; until then actions are drawn evenly", least=0)
REPLAY_SIZE = Setting("steps that the replay holds, over all devices", least=1)
REPLAY_PRECISION = Setting("type of float observations in the replay; bf16 takes half the memory", choices=STORES)
PRIORITY_EXPONENT = Setting("exponent of the error in a step's sampling probability; none: uniform", least=0)
IMPORTANCE_EXPONENT = Setting("exponent of the importance weights; rises to 1 over the run", least=0, resume=CHANGEABLE)
EXPERT_SHARE = Setting(
    "share of the worlds that the expert drives; in the others the policy drives and the expert labels",
    least=0,
    most=1,
    resume=CHANGEABLE,
)

OF_ACTOR_CRITICS = ("model_size", "shared", "memory")
"""Fields of a network's config that algorithms with a replay have no use for."""


@dataclass(frozen=True)
class PPOConfig:
    """PPO's hyperparameters; the defaults are PureJaxRL's."""

    name: ClassVar[str] = "ppo"
    title: ClassVar[str] = "PPO"
    lr: float = LR.field(2.5e-4)
    anneal: bool = ANNEAL.field(True)
    warmup: int = WARMUP.field(0)
    gamma: float = GAMMA.field(0.99)
    gae_lambda: float = setting(0.95, "lambda of the advantage estimate", least=0, most=1, resume=CHANGEABLE)
    num_minibatches: int | None = MINIBATCHES.field(4)
    update_epochs: int | None = EPOCHS.field(4)
    clip_eps: float = CLIP_EPS.field(0.2)
    clip_value: bool = setting(True, "clip the value's loss, too", resume=CHANGEABLE)
    vf_coef: float = VF_COEF.field(0.5)
    ent_coef: float = ENT_COEF.field(0.01)
    ent_coef_final: float | None = ENT_COEF_FINAL.field(None)
    max_grad_norm: float = MAX_GRAD_NORM.field(0.5)
    adam_eps: float = ADAM_EPS.field(1e-5)
    normalise_advantage: bool = NORMALISE_ADVANTAGE.field(True)
    normalise_observation: bool = NORMALISE_OBSERVATION.field(False)
    reward_scale: float = REWARD_SCALE.field(1.0)
    kl_stop: float | None = KL_STOP.field(None)
    chunk: int | None = CHUNK.field(None)
    accumulate: int | None = ACCUMULATE.field(None)
    network: NetworkConfig = nested(NetworkConfig())


OPTIMISERS = ("rmsprop", "adam")

REWARD_CLIPS = ("none", "unit", "asymmetric")
"""Rewards unchanged, clipped to -1 and 1, or the paper's for DMLab-30: 0.3 min(tanh r, 0) + 5 max(tanh r, 0)."""


@dataclass(frozen=True)
class IMPALAConfig:
    """IMPALA's hyperparameters. None for a clip leaves ratios as they are."""

    name: ClassVar[str] = "impala"
    title: ClassVar[str] = "IMPALA, or APPO"
    lr: float = LR.field(6e-4)
    anneal: bool = ANNEAL.field(True)
    warmup: int = WARMUP.field(0)
    optimiser: str = setting("rmsprop", "RMSProp, or Adam", choices=OPTIMISERS)
    rms_decay: float = setting(
        0.99, "share of its past that RMSProp's second moment keeps in a step", least=0, most=1, resume=CHANGEABLE
    )
    rms_eps: float = setting(1e-5, "term added to RMSProp's second moment, within the root", above=0, resume=CHANGEABLE)
    momentum: float = setting(0.0, "momentum of RMSProp", least=0, most=1)
    adam_eps: float = ADAM_EPS.field(1e-5)
    gamma: float = GAMMA.field(0.99)
    vtrace_lambda: float = setting(
        1.0, "lambda of V-trace: below 1 its targets reach less far", least=0, most=1, resume=CHANGEABLE
    )
    rho_clip: float | None = setting(
        1.0,
        "upper bound of the policy's ratio to the actor's in errors and gradients; none: any",
        least=0,
        resume=CHANGEABLE,
    )
    c_clip: float | None = setting(1.0, "upper bound of that ratio in the trace; none: any", least=0, resume=CHANGEABLE)
    clip_eps: float | None = CLIP_EPS.field(None)
    num_minibatches: int | None = MINIBATCHES.field(1)
    update_epochs: int | None = EPOCHS.field(1)
    vf_coef: float = VF_COEF.field(0.5)
    ent_coef: float = ENT_COEF.field(0.01)
    ent_coef_final: float | None = ENT_COEF_FINAL.field(None)
    max_grad_norm: float = MAX_GRAD_NORM.field(40.0)
    normalise_advantage: bool = NORMALISE_ADVANTAGE.field(False)
    normalise_observation: bool = NORMALISE_OBSERVATION.field(False)
    reward_scale: float = REWARD_SCALE.field(1.0)
    reward_clip: str = setting(
        "none",
        "rewards within -1 and 1, or 0.3 min(tanh r, 0) + 5 max(tanh r, 0)",
        choices=REWARD_CLIPS,
        resume=CHANGEABLE,
    )
    kl_stop: float | None = KL_STOP.field(None)
    chunk: int | None = CHUNK.field(None)
    accumulate: int | None = ACCUMULATE.field(None)
    network: NetworkConfig = nested(NetworkConfig())


@dataclass(frozen=True)
class PQNConfig:
    """PQN's hyperparameters. Steps are agent steps."""

    name: ClassVar[str] = "pqn"
    title: ClassVar[str] = "PQN"
    lr: float = LR.field(2.5e-4)
    anneal: bool = ANNEAL.field(True)
    warmup: int = WARMUP.field(0)
    adam_eps: float = ADAM_EPS.field(1e-8)
    gamma: float = GAMMA.field(0.99)
    q_lambda: float = setting(
        0.65,
        "lambda of PQN's returns: 0 looks a step ahead, 1 to the rollout's end",
        least=0,
        most=1,
        resume=CHANGEABLE,
    )
    epsilon: float = EPSILON.field(1.0)
    epsilon_final: float = EPSILON_FINAL.field(0.05)
    exploration: float = EXPLORATION.field(0.2)
    num_minibatches: int | None = MINIBATCHES.field(4)
    update_epochs: int | None = EPOCHS.field(4)
    max_grad_norm: float = MAX_GRAD_NORM.field(10.0)
    duelling: bool = DUELLING.field(False)
    layer_norm: bool = setting(True, "layer normalisation, which PQN needs to be stable")
    normalise_observation: bool = NORMALISE_OBSERVATION.field(False)
    reward_scale: float = REWARD_SCALE.field(1.0)
    chunk: int | None = CHUNK.field(None)
    accumulate: int | None = ACCUMULATE.field(None)
    network: NetworkConfig = nested(
        NetworkConfig(hidden_dim=128, activation="relu", init="lecun", shared=True), without=("shared",)
    )

    kl_stop: ClassVar[None] = None
    vf_coef: ClassVar[float] = 1.0
    ent_coef: ClassVar[float] = 0.0
    ent_coef_final: ClassVar[None] = None


@dataclass(frozen=True)
class DQNConfig:
    """DQN's hyperparameters. Steps are agent steps."""

    name: ClassVar[str] = "dqn"
    title: ClassVar[str] = "DQN"
    lr: float = LR.field(1e-3)
    anneal: bool = ANNEAL.field(True)
    adam_eps: float = ADAM_EPS.field(1e-8)
    max_grad_norm: float | None = MAX_GRAD_NORM.field(10.0)
    gamma: float = GAMMA.field(0.99)
    tau: float = TAU.field(0.01)
    n_step: int = N_STEP.field(3)
    double: bool = setting(
        True, "double DQN: the network chooses the target's action, the target network values it", resume=CHANGEABLE
    )
    duelling: bool = DUELLING.field(True)
    epsilon: float = EPSILON.field(1.0)
    epsilon_final: float = EPSILON_FINAL.field(0.05)
    exploration: float = EXPLORATION.field(0.25)
    batch_size: int = BATCH_SIZE.field(128)
    gradient_steps: int = GRADIENT_STEPS.field(1)
    learning_starts: int = LEARNING_STARTS.field(1000)
    replay_size: int = REPLAY_SIZE.field(100_000)
    replay_precision: str = REPLAY_PRECISION.field("fp32")
    priority_exponent: float | None = PRIORITY_EXPONENT.field(0.6)
    importance_exponent: float = IMPORTANCE_EXPONENT.field(0.4)
    reward_scale: float = REWARD_SCALE.field(1.0)
    network: NetworkConfig = nested(
        NetworkConfig(hidden_dim=128, activation="relu", init="lecun"), without=OF_ACTOR_CRITICS
    )


@dataclass(frozen=True)
class SACConfig:
    """SAC's hyperparameters. Steps are agent steps."""

    name: ClassVar[str] = "sac"
    title: ClassVar[str] = "SAC"
    lr: float = LR.field(3e-4)
    anneal: bool = ANNEAL.field(False)
    adam_eps: float = ADAM_EPS.field(1e-8)
    max_grad_norm: float | None = MAX_GRAD_NORM.field(None)
    gamma: float = GAMMA.field(0.99)
    tau: float = TAU.field(0.005)
    n_step: int = N_STEP.field(1)
    temperature: float | None = setting(None, "weight of SAC's entropy; none: learnt", least=0, why=", or none")
    target_entropy: float | None = setting(
        None,
        "nats that SAC's temperature aims at; none: -1 a dimension, or half of what choices allow",
        resume=CHANGEABLE,
    )
    batch_size: int = BATCH_SIZE.field(256)
    gradient_steps: int = GRADIENT_STEPS.field(1)
    learning_starts: int = LEARNING_STARTS.field(1000)
    replay_size: int = REPLAY_SIZE.field(1_000_000)
    replay_precision: str = REPLAY_PRECISION.field("fp32")
    priority_exponent: float | None = PRIORITY_EXPONENT.field(None)
    importance_exponent: float = IMPORTANCE_EXPONENT.field(0.4)
    reward_scale: float = REWARD_SCALE.field(1.0)
    imitation: float = setting(
        0.0, "weight of the expert's negative log-likelihood in SAC (BC-SAC); 0: no expert", least=0
    )
    expert_share: float = EXPERT_SHARE.field(0.25)
    network: NetworkConfig = nested(
        NetworkConfig(hidden_dim=256, activation="relu", init="lecun"), without=OF_ACTOR_CRITICS
    )


@dataclass(frozen=True)
class TD3Config:
    """TD3's hyperparameters. Steps are agent steps; noise is of actions within -1 to 1."""

    name: ClassVar[str] = "td3"
    title: ClassVar[str] = "TD3"
    lr: float = LR.field(1e-3)
    anneal: bool = ANNEAL.field(False)
    adam_eps: float = ADAM_EPS.field(1e-8)
    max_grad_norm: float | None = MAX_GRAD_NORM.field(None)
    gamma: float = GAMMA.field(0.99)
    tau: float = TAU.field(0.005)
    n_step: int = N_STEP.field(1)
    noise: float = setting(
        0.1, "deviation of TD3's action noise; actions range from -1 to 1", least=0, resume=CHANGEABLE
    )
    target_noise: float = setting(
        0.2, "deviation of the noise of target actions, which smooths critics", least=0, resume=CHANGEABLE
    )
    noise_clip: float = setting(0.5, "bound of the noise of target actions", least=0, resume=CHANGEABLE)
    actor_interval: int = setting(
        2, "steps of the critics for one of TD3's actor and targets", least=1, resume=CHANGEABLE
    )
    batch_size: int = BATCH_SIZE.field(256)
    gradient_steps: int = GRADIENT_STEPS.field(2)
    learning_starts: int = LEARNING_STARTS.field(1000)
    replay_size: int = REPLAY_SIZE.field(1_000_000)
    replay_precision: str = REPLAY_PRECISION.field("fp32")
    priority_exponent: float | None = PRIORITY_EXPONENT.field(None)
    importance_exponent: float = IMPORTANCE_EXPONENT.field(0.4)
    reward_scale: float = REWARD_SCALE.field(1.0)
    network: NetworkConfig = nested(
        NetworkConfig(hidden_dim=256, activation="relu", init="lecun"), without=OF_ACTOR_CRITICS
    )


@dataclass(frozen=True)
class BCConfig:
    """Behaviour cloning's hyperparameters."""

    name: ClassVar[str] = "bc"
    title: ClassVar[str] = "behaviour cloning"
    recorded: tuple[str, ...] = setting(
        (),
        "recordings to imitate: .npz files of observation and action, folders of them, minari:NAME; none: the expert "
        "acts",
        path=True,
    )
    expert_share: float = EXPERT_SHARE.field(1.0)
    lr: float = LR.field(1e-3)
    anneal: bool = ANNEAL.field(True)
    warmup: int = WARMUP.field(0)
    num_minibatches: int | None = MINIBATCHES.field(4)
    update_epochs: int | None = EPOCHS.field(1)
    ent_coef: float = ENT_COEF.field(0.0)
    ent_coef_final: float | None = ENT_COEF_FINAL.field(None)
    max_grad_norm: float = MAX_GRAD_NORM.field(0.5)
    adam_eps: float = ADAM_EPS.field(1e-5)
    normalise_observation: bool = NORMALISE_OBSERVATION.field(False)
    chunk: int | None = CHUNK.field(None)
    accumulate: int | None = ACCUMULATE.field(None)
    network: NetworkConfig = nested(NetworkConfig())

    kl_stop: ClassVar[None] = None
    vf_coef: ClassVar[float] = 1.0


@dataclass(frozen=True)
class APGConfig:
    """Analytic policy gradient's hyperparameters."""

    name: ClassVar[str] = "apg"
    title: ClassVar[str] = "analytic policy gradient"
    lr: float = LR.field(1e-3)
    anneal: bool = ANNEAL.field(True)
    gamma: float = GAMMA.field(0.99)
    detach: bool = setting(
        False, "stop APG's gradient at observations: it passes through actions only", resume=CHANGEABLE
    )
    max_grad_norm: float = MAX_GRAD_NORM.field(1.0)
    adam_eps: float = ADAM_EPS.field(1e-8)
    network: NetworkConfig = nested(NetworkConfig())

    normalise_observation: ClassVar[bool] = False  # what the collector gives is a gradient, not what was seen


class Loss(NamedTuple):
    """Definition of a variant."""

    level: str  # of the ratio: "token"; "sequence": the geometric mean over a completion's tokens
    clip: str  # "pessimistic": PPO's; "weight": the ratio weighs the gradient, truncated, and nothing is cut off
    low: float  # ratios below 1 - low are clipped
    high: float  # ratios above 1 + high are
    over: str  # mean over "token"s; over "sequence"s of means over theirs; "constant": as many tokens as there could be
    scaled: bool  # advantages are divided by their group's standard deviation


LOSSES = {
    "grpo": Loss("token", "pessimistic", 0.2, 0.2, "sequence", True),
    "dr_grpo": Loss("token", "pessimistic", 0.2, 0.2, "constant", False),
    "dapo": Loss("token", "pessimistic", 0.2, 0.28, "token", True),
    "gspo": Loss("sequence", "pessimistic", 3e-4, 4e-4, "sequence", True),
    "cispo": Loss("token", "weight", 1.0, 0.28, "token", True),
}


@dataclass(frozen=True)
class GRPOConfig:
    """GRPO's hyperparameters."""

    name: ClassVar[str] = "grpo"
    title: ClassVar[str] = "GRPO, or one of its kin"
    loss: str = setting("dapo", "loss on groups of completions", choices=tuple(LOSSES))
    clip_low: float | None = setting(
        None, "clip range of a ratio below 1; none: the loss's own", least=0, resume=CHANGEABLE
    )
    clip_high: float | None = setting(
        None, "clip range of a ratio above 1; none: the loss's own", least=0, resume=CHANGEABLE
    )
    lr: float = setting(2e-4, "learning rate", above=0, resume=CHANGEABLE)
    anneal: bool = setting(
        True,
        "let the learning rate fall to a tenth, in the last third of the updates after the warm start",
        resume=CHANGEABLE,
    )
    lr_taught: float = setting(
        6e-3, "learning rate of the warm start, which falls to a tenth in its last third", above=0, resume=CHANGEABLE
    )
    lr_scaffold: float = setting(
        1e-3, "learning rate of imitation while the gate is closed", above=0, resume=CHANGEABLE
    )
    warmup: int = setting(20, "steps of the optimiser over which each of these rates rises", least=0, resume=CHANGEABLE)
    adam_b2: float = setting(0.98, "share of its past that Adam's second moment keeps in a step")
    max_grad_norm: float = setting(1.0, "norm to which longer gradients are cut", above=0, resume=CHANGEABLE)
    kl_coef: float = setting(
        0.0,
        "weight of the KL divergence to the policy before the first update from rewards; with --lora, to the model "
        "without it",
        least=0,
    )
    correction: str = setting(
        "truncate",
        "rule for tokens whose probability differs between sampler and learner by more than --correction-cap: "
        "truncate the ratio, or mask the token",
        choices=("truncate", "mask", "none"),
        resume=CHANGEABLE,
    )
    correction_cap: float = setting(3.0, "largest ratio of a token's probabilities", above=1, resume=CHANGEABLE)
    mask_truncated: bool = setting(
        False, "leave completions out of the loss that were cut at --num-steps", resume=CHANGEABLE
    )
    overlong: float = setting(
        0.0,
        "share of --num-steps at its end over which a completion's reward falls by 1 (DAPO's soft penalty)",
        least=0,
        most=1,
        resume=CHANGEABLE,
    )
    length_penalty: float = setting(
        0.0, "part of the reward that a completion of --num-steps tokens loses, a shorter one less", least=0,
        resume=CHANGEABLE,
    )  # fmt: skip
    temperature: float = setting(1.0, "temperature at which completions are sampled", above=0)
    top_k: int = setting(0, "most tokens that one is drawn from, the likeliest; 0: all", least=0)
    top_p: float = setting(
        1.0, "probability of the likeliest tokens together, from which alone one is drawn; 1: all", above=0, most=1
    )
    min_p: float = setting(
        0.0, "least probability of a token that is drawn, as a share of the likeliest one's; 0: none", least=0, most=1
    )
    resample: int = setting(
        0, "times that groups with equal rewards, which teach nothing, are sampled again from other problems (DAPO)",
        least=0, most=64, resume=CHANGEABLE,
    )  # fmt: skip
    group: int = setting(16, "completions of a problem", least=2, why=": an advantage is over the group's mean")
    taught: int = setting(0, "updates of the warm start, which imitates demonstrations", least=0)
    curriculum: float = setting(
        0.3,
        "share of the warm start over which harder demonstrations join the easiest quarter; 0: all at once",
        least=0,
        most=1,
    )
    gate: GateConfig = nested(GateConfig(), "gate_")
    num_minibatches: int | None = MINIBATCHES.field(2)
    update_epochs: int | None = EPOCHS.field(1)
    accumulate: int = ACCUMULATE.field(1)
    pack: int = setting(
        0, "tokens of a row in which completions of different lengths lie side by side to be learnt from, without "
        "padding and without those that teach nothing; a row has at least those of the longest prompt and --num-steps; "
        "0: each completion takes --num-steps", least=0, most=2**20, resume=CHANGEABLE,
    )  # fmt: skip
    model_folder: str = setting(
        "", "a model in Hugging Face's files that learning begins with, and its sizes; none: random weights"
    )
    model: ModelConfig = nested(ModelConfig(), "model_")


OnPolicy = PPOConfig | IMPALAConfig
"""Configs of algorithms with a policy that learn from a rollout in minibatches and discard it."""

InMinibatches = OnPolicy | PQNConfig | BCConfig
"""Configs of algorithms that learn in minibatches (algorithms/minibatch.py)."""

OnActorCritic = InMinibatches | APGConfig
"""Configs of algorithms with one network of an actor and a critic (algorithms/actor_critic.py)."""

OffPolicy = SACConfig | DQNConfig | TD3Config
"""Configs of algorithms that learn from a replay (algorithms/off_policy.py)."""

Reasoner = GRPOConfig
"""Configs of algorithms that learn from completions of prompts (reasoning/sampler.py)."""

AlgorithmConfig = OnActorCritic | OffPolicy | Reasoner
"""Config of any algorithm; at run time also one of the user's own (external.py). A run.json without the algorithm's
name is of the first."""

ALGORITHMS: dict[str, Any] = {config.name: config for config in typing.get_args(AlgorithmConfig)}
"""Config of each algorithm by its name in run.json, which is the prefix of its metrics, too ("ppo/entropy")."""


def precision(config: AlgorithmConfig) -> str:
    """Type that the network's layers compute in."""
    return config.model.precision if isinstance(config, Reasoner) else config.network.precision

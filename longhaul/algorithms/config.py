"""Configurations of all algorithms: plain data, without JAX, so that flags and recipes start fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from longhaul.reasoning.config import GateConfig, ModelConfig


@dataclass(frozen=True)
class PPOConfig:
    """PPO's hyperparameters; the defaults are PureJaxRL's."""

    lr: float = 2.5e-4
    anneal: bool = True  # the learning rate falls to 0 over the run, linearly
    warmup: int = 0  # updates over which the learning rate rises to it at the beginning, linearly
    gamma: float = 0.99
    gae_lambda: float = 0.95
    num_minibatches: int | None = 4  # None: chosen by `run.resolve`, else 4, or what divides the batch
    update_epochs: int | None = 4
    clip_eps: float = 0.2
    clip_value: bool = True
    vf_coef: float = 0.5
    ent_coef: float = 0.01
    ent_coef_final: float | None = None  # annealed to, linearly; None: constant
    max_grad_norm: float = 0.5
    adam_eps: float = 1e-5  # added to the root of Adam's second moment
    normalise_advantage: bool = True
    normalise_observation: bool = False
    reward_scale: float = 1.0
    kl_stop: float | None = None  # no further step of an update once approx_kl passed it
    torso: str = "mlp"
    hidden_dim: int = 64
    num_layers: int = 2
    model_size: float | None = None  # millions of parameters, from which hidden_dim and num_layers follow
    activation: str = "tanh"  # of mlp and deepset
    shared: bool = False  # actor and critic of mlp and deepset have one torso, without memory, too
    init: str = "orthogonal"  # of mlp, deepset and heads; "lecun" is Flax's default
    memory: int = 0  # width of the recurrent unit; 0: none
    chunk: int | None = None  # most rows of a minibatch whose gradient is taken at once; None: what suits the device
    accumulate: int | None = None  # pieces, at least, in which it is taken; None: as `chunk` has it
    precision: str = "fp32"  # of the torso; "bf16": in bfloat16, with parameters, heads and losses in float32
    remat: str = "none"  # what of the torso is computed again for the gradient instead of kept: networks.config.REMATS


OPTIMISERS = ("rmsprop", "adam")


REWARD_CLIPS = ("none", "unit", "asymmetric")
"""Rewards unchanged, clipped to -1 and 1, or the paper's for DMLab-30: 0.3 min(tanh r, 0) + 5 max(tanh r, 0)."""


@dataclass(frozen=True)
class IMPALAConfig:
    """IMPALA's hyperparameters. None for a clip leaves ratios as they are."""

    lr: float = 6e-4
    anneal: bool = True  # the learning rate falls to 0 over the run, linearly
    warmup: int = 0  # updates over which the learning rate rises to it at the beginning, linearly
    optimiser: str = "rmsprop"  # or "adam"
    rms_decay: float = 0.99
    rms_eps: float = 1e-5  # added to RMSProp's second moment, within the root
    momentum: float = 0.0  # of RMSProp
    adam_eps: float = 1e-5  # added to the root of Adam's second moment
    gamma: float = 0.99
    vtrace_lambda: float = 1.0
    rho_clip: float | None = 1.0  # of the ratio in temporal differences and in the policy's gradient
    c_clip: float | None = 1.0  # of the ratio in the trace
    clip_eps: float | None = None  # APPO's clip; None: IMPALA's policy gradient
    num_minibatches: int | None = 1
    update_epochs: int | None = 1
    vf_coef: float = 0.5
    ent_coef: float = 0.01
    ent_coef_final: float | None = None  # annealed to, linearly; None: constant
    max_grad_norm: float = 40.0
    normalise_advantage: bool = False
    normalise_observation: bool = False
    reward_scale: float = 1.0
    reward_clip: str = "none"  # of what reward_scale made; one of REWARD_CLIPS
    kl_stop: float | None = None  # no further step of an update once approx_kl passed it
    torso: str = "mlp"
    hidden_dim: int = 64
    num_layers: int = 2
    model_size: float | None = None  # millions of parameters, from which hidden_dim and num_layers follow
    activation: str = "tanh"  # of mlp and deepset
    shared: bool = False  # actor and critic of mlp and deepset have one torso, without memory, too
    init: str = "orthogonal"  # of mlp, deepset and heads; "lecun" is Flax's default
    memory: int = 0  # width of the recurrent unit; 0: none
    chunk: int | None = None  # most rows of a minibatch whose gradient is taken at once; None: what suits the device
    accumulate: int | None = None  # pieces, at least, in which it is taken; None: as `chunk` has it
    precision: str = "fp32"  # of the torso; "bf16": in bfloat16, with parameters, heads and losses in float32
    remat: str = "none"  # what of the torso is computed again for the gradient instead of kept: networks.config.REMATS


@dataclass(frozen=True)
class PQNConfig:
    """PQN's hyperparameters. Steps are agent steps."""

    lr: float = 2.5e-4
    anneal: bool = True  # the learning rate falls to 0 over the run, linearly
    warmup: int = 0  # updates over which the learning rate rises to it at the beginning, linearly
    adam_eps: float = 1e-8  # added to the root of the second moment of rectified Adam
    gamma: float = 0.99
    q_lambda: float = 0.65
    epsilon: float = 1.0  # share of random actions at the beginning
    epsilon_final: float = 0.05  # and after `exploration`
    exploration: float = 0.2  # share of the run over which the one goes to the other
    num_minibatches: int | None = 4  # None: chosen by `run.resolve`, else 4, or what divides the batch
    update_epochs: int | None = 4
    max_grad_norm: float = 10.0
    duelling: bool = False  # a value, and advantages about it
    layer_norm: bool = True
    normalise_observation: bool = False
    reward_scale: float = 1.0
    torso: str = "mlp"
    hidden_dim: int = 128
    num_layers: int = 2
    model_size: float | None = None  # millions of parameters, from which hidden_dim and num_layers follow
    activation: str = "relu"  # of mlp and deepset
    init: str = "lecun"  # of mlp, deepset and heads
    memory: int = 0  # width of the recurrent unit; 0: none
    chunk: int | None = None  # most rows of a minibatch whose gradient is taken at once; None: what suits the device
    accumulate: int | None = None  # pieces, at least, in which it is taken; None: as `chunk` has it
    precision: str = "fp32"  # of the torso; "bf16": in bfloat16, with parameters, heads and losses in float32
    remat: str = "none"  # what of the torso is computed again for the gradient instead of kept: networks.config.REMATS

    @property
    def shared(self) -> bool:
        """There is one torso: the values of choices, and where they duel that of the place, come of it."""
        return True


STORES = ("fp32", "bf16")
"""Types of float32 observations in the replay."""


@dataclass(frozen=True)
class DQNConfig:
    """DQN's hyperparameters. Steps are agent steps."""

    lr: float = 1e-3
    anneal: bool = True  # the learning rate falls to 0 over the run, linearly
    adam_eps: float = 1e-8
    max_grad_norm: float | None = 10.0  # None: gradients are not cut
    gamma: float = 0.99
    tau: float = 0.01  # how far targets follow, a step of the optimiser
    n_step: int = 3  # rewards that a target sums before it trusts the network
    double: bool = True  # the network chooses, its target judges
    duelling: bool = True  # a value, and advantages about it
    epsilon: float = 1.0  # share of random actions at the beginning
    epsilon_final: float = 0.05  # and after `exploration`
    exploration: float = 0.25  # share of the run over which the one goes to the other
    batch_size: int = 128  # of a step of the optimiser, over all devices
    gradient_steps: int = 1  # of the optimiser, an update
    learning_starts: int = 1000  # steps in the replay before learning; until then actions are drawn evenly
    replay_size: int = 100_000  # steps that the replay holds, over all devices
    replay_precision: str = "fp32"  # how float observations are kept: off_policy.STORES
    priority_exponent: float | None = 0.6  # of the error, for the chance of a step to be sampled; None: all alike
    importance_exponent: float = 0.4  # of the weights that make up for it; rises to 1 over the run
    reward_scale: float = 1.0
    torso: str = "mlp"
    hidden_dim: int = 128
    num_layers: int = 2
    activation: str = "relu"  # of mlp and deepset
    init: str = "lecun"  # of mlp, deepset and heads
    precision: str = "fp32"  # of the torso
    remat: str = "none"  # what of the torso is computed again for the gradient: networks.config.REMATS


@dataclass(frozen=True)
class SACConfig:
    """SAC's hyperparameters. Steps are agent steps."""

    lr: float = 3e-4
    anneal: bool = False  # the learning rate falls to 0 over the run, linearly
    adam_eps: float = 1e-8
    max_grad_norm: float | None = None  # of the actor's and the critics' gradients, each; None: they are not cut
    gamma: float = 0.99
    tau: float = 0.005  # how far targets follow, a step of the optimiser
    n_step: int = 1  # rewards that a target sums before it trusts a critic
    temperature: float | None = None  # the entropy's weight; None: learnt
    target_entropy: float | None = None  # nats that the learnt one aims at; None: -1 a dimension, half of log n
    batch_size: int = 256  # of a step of the optimiser, over all devices
    gradient_steps: int = 1  # of the optimiser, an update
    learning_starts: int = 1000  # steps in the replay before learning; until then actions are drawn evenly
    replay_size: int = 1_000_000  # steps that the replay holds, over all devices
    replay_precision: str = "fp32"  # how float observations are kept: off_policy.STORES
    priority_exponent: float | None = None  # of the error, for the chance of a step to be sampled; None: all alike
    importance_exponent: float = 0.4  # of the weights that make up for it; rises to 1 over the run
    reward_scale: float = 1.0
    imitation: float = 0.0  # weight of the expert's negative log-likelihood (BC-SAC's lambda); 0: nobody is asked
    expert_share: float = 0.25  # of the worlds, which the expert drives where there is imitation
    torso: str = "mlp"
    hidden_dim: int = 256
    num_layers: int = 2
    activation: str = "relu"  # of mlp and deepset
    init: str = "lecun"  # of mlp, deepset and heads
    precision: str = "fp32"  # of the torso
    remat: str = "none"  # what of the torso is computed again for the gradient: networks.config.REMATS


@dataclass(frozen=True)
class TD3Config:
    """TD3's hyperparameters. Steps are agent steps; noise is of actions within -1 to 1."""

    lr: float = 1e-3
    anneal: bool = False  # the learning rate falls to 0 over the run, linearly
    adam_eps: float = 1e-8
    max_grad_norm: float | None = None  # of the actor's and the critics' gradients, each; None: they are not cut
    gamma: float = 0.99
    tau: float = 0.005  # how far targets follow, each time the actor steps
    n_step: int = 1  # rewards that a target sums before it trusts a critic
    noise: float = 0.1  # deviation of what is added to actions
    target_noise: float = 0.2  # and to the target actor's, for critics that are smooth in actions
    noise_clip: float = 0.5  # at most
    actor_interval: int = 2  # steps of the optimiser, of which the actor and the targets join one
    batch_size: int = 256  # of a step of the optimiser, over all devices
    gradient_steps: int = 2  # of the optimiser, an update
    learning_starts: int = 1000  # steps in the replay before learning; until then actions are drawn evenly
    replay_size: int = 1_000_000  # steps that the replay holds, over all devices
    replay_precision: str = "fp32"  # how float observations are kept: off_policy.STORES
    priority_exponent: float | None = None  # of the error, for the chance of a step to be sampled; None: all alike
    importance_exponent: float = 0.4  # of the weights that make up for it; rises to 1 over the run
    reward_scale: float = 1.0
    torso: str = "mlp"
    hidden_dim: int = 256
    num_layers: int = 2
    activation: str = "relu"  # of mlp and deepset
    init: str = "lecun"  # of mlp, deepset and heads
    precision: str = "fp32"  # of the torso
    remat: str = "none"  # what of the torso is computed again for the gradient: networks.config.REMATS


@dataclass(frozen=True)
class BCConfig:
    """Behaviour cloning's hyperparameters."""

    recorded: tuple[str, ...] = ()  # files of what was recorded (recordings.py); (): the environment's expert shows it
    expert_share: float = 1.0  # of the worlds that the expert drives; in the others he says what he would do
    lr: float = 1e-3
    anneal: bool = True  # the learning rate falls to 0 over the run, linearly
    warmup: int = 0  # updates over which the learning rate rises to it at the beginning, linearly
    num_minibatches: int | None = 4
    update_epochs: int | None = 1
    ent_coef: float = 0.0
    ent_coef_final: float | None = None  # annealed to, linearly; None: constant
    max_grad_norm: float = 0.5
    adam_eps: float = 1e-5  # added to the root of Adam's second moment
    normalise_observation: bool = False
    torso: str = "mlp"
    hidden_dim: int = 64
    num_layers: int = 2
    model_size: float | None = None  # millions of parameters, from which hidden_dim and num_layers follow
    activation: str = "tanh"  # of mlp and deepset
    shared: bool = False  # actor and critic of mlp and deepset have one torso, without memory, too
    init: str = "orthogonal"  # of mlp, deepset and heads; "lecun" is Flax's default
    memory: int = 0  # width of the recurrent unit; 0: none
    chunk: int | None = None  # most rows of a minibatch whose gradient is taken at once; None: what suits the device
    accumulate: int | None = None  # pieces, at least, in which it is taken; None: as `chunk` has it
    precision: str = "fp32"  # of the torso; "bf16": in bfloat16, with parameters, heads and losses in float32
    remat: str = "none"  # what of the torso is computed again for the gradient instead of kept: networks.config.REMATS


@dataclass(frozen=True)
class APGConfig:
    """Analytic policy gradient's hyperparameters."""

    lr: float = 1e-3
    anneal: bool = True  # the learning rate falls to 0 over the run, linearly
    gamma: float = 0.99  # discount of a step, from the rollout's beginning
    detach: bool = False  # the gradient does not pass through what the policy sees, only through what it does
    max_grad_norm: float = 1.0
    adam_eps: float = 1e-8  # added to the root of Adam's second moment
    torso: str = "mlp"
    hidden_dim: int = 64
    num_layers: int = 2
    model_size: float | None = None  # millions of parameters, from which hidden_dim and num_layers follow
    activation: str = "tanh"  # of mlp and deepset
    shared: bool = False  # actor and critic of mlp and deepset have one torso, without memory, too
    init: str = "orthogonal"  # of mlp, deepset and heads; "lecun" is Flax's default
    memory: int = 0  # width of the recurrent unit; 0: none
    precision: str = "fp32"  # of the torso; "bf16": in bfloat16, with parameters, heads and losses in float32
    remat: str = "none"  # what of the torso is computed again for the gradient instead of kept: networks.config.REMATS

    @property
    def normalise_observation(self) -> bool:
        """Never: what the collector gives is a gradient, not what was seen."""
        return False


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

    loss: str = "dapo"  # one of LOSSES
    clip_low: float | None = None  # None: the loss's own
    clip_high: float | None = None
    lr: float = 2e-4
    anneal: bool = True  # it falls to a tenth in the last third of the updates after the warm start
    lr_taught: float = 6e-3  # of the warm start; it falls to a tenth in its last third
    lr_scaffold: float = 1e-3  # of imitation while the gate is closed
    warmup: int = 20  # steps of the optimiser over which each of these rates rises
    adam_b2: float = 0.98
    max_grad_norm: float = 1.0
    kl_coef: float = 0.0  # of the KL divergence to the policy that imitation ended with
    temperature: float = 1.0  # at which completions are sampled
    group: int = 16  # completions of a problem
    taught: int = 0  # updates of the warm start, in which demonstrations are imitated
    curriculum: float = 0.3  # share of the warm start over which harder ones join the easiest quarter; 0: all at once
    gate: GateConfig = field(default_factory=GateConfig)
    num_minibatches: int | None = 2
    update_epochs: int | None = 1
    accumulate: int = 1  # pieces in which a minibatch's gradient is taken
    model_folder: str = ""  # of Hugging Face's files: the model that learning begins with; "": random weights
    model: ModelConfig = field(default_factory=ModelConfig)

    @property
    def precision(self) -> str:
        """Type that the layers compute in."""
        return self.model.precision


OnPolicy = PPOConfig | IMPALAConfig
"""Configs of algorithms with a policy that learn from a rollout in minibatches and discard it."""


OffPolicy = SACConfig | DQNConfig | TD3Config
"""Configs of algorithms that learn from a replay (algorithms/off_policy.py)."""


Reasoner = GRPOConfig
"""Configs of algorithms that learn from completions of prompts (reasoning/sampler.py)."""


AlgorithmConfig = OnPolicy | PQNConfig | OffPolicy | Reasoner | BCConfig | APGConfig
"""Config of any algorithm. A run.json without the algorithm's name is of the first."""

NAMES: dict[type, str] = {
    PPOConfig: "ppo",
    IMPALAConfig: "impala",
    PQNConfig: "pqn",
    BCConfig: "bc",
    APGConfig: "apg",
    DQNConfig: "dqn",
    SACConfig: "sac",
    TD3Config: "td3",
    GRPOConfig: "grpo",
}
"""Name of each algorithm in run.json and in front of its metrics ("ppo/entropy")."""

TITLES: dict[type, str] = {
    PPOConfig: "PPO",
    IMPALAConfig: "IMPALA, or APPO",
    PQNConfig: "PQN",
    BCConfig: "behaviour cloning",
    APGConfig: "analytic policy gradient",
    DQNConfig: "DQN",
    SACConfig: "SAC",
    TD3Config: "TD3",
    GRPOConfig: "GRPO, or one of its kin",
}
"""Name of each algorithm in help texts and messages."""

"""Names of settings that users of other libraries type: other words for ours, and answers where there is none.

They count for flags, for keywords of `longhaul.train` and in files of settings.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from longhaul.runtime import config_fields
from longhaul.runtime.errors import RunError, answer, did_you_mean

ALIASES = {
    "lr": ("learning-rate",), "num-envs": ("n-envs",), "num-steps": ("n-steps",), "update-epochs": ("n-epochs",),
    "clip-eps": ("clip-range",), "replay-size": ("buffer-size",), "seed": ("random-seed",),
    "total-steps": ("total-timesteps",), "accumulate": ("micro-batches",), "runs-dir": ("checkpoint-dir",),
    "resume": ("resume-run",),
}  # fmt: skip
"""Flags -> other words for them."""

ANSWERS = {
    "batch-size minibatch-size train-batch-size per-device-train-batch-size":
        "a batch is --num-envs x --num-steps, of which --num-minibatches parts are learnt from in turn",
    "gpus devices num-gpus": "devices are given by --mesh data=N",
    "device gpu cuda": "JAX takes the accelerator that is there; the variable JAX_PLATFORMS=cpu chooses the CPU",
    "epochs num-epochs num-train-epochs":
        "passes over a batch are --update-epochs, and the length of a run is --total-steps",
    "episodes timesteps steps max-steps num-updates num-iterations":
        "the length of a run is --total-steps, in agent steps",
    "set override": "a setting is a flag of its own: --lr 0.001",
    "rollout-length unroll-length rollout-fragment-length":
        "the steps of an environment between two updates are --num-steps",
    "entropy-coef entropy-coeff ent-coeff": "the weight of the entropy is --ent-coef",
    "lam lambda lambda- gae": "the lambda of generalised advantages is --gae-lambda",
    "lr-schedule anneal-lr anneal-learning-rate": "the learning rate falls to 0 with --anneal",
    "rnn use-rnn gru use-gru lstm use-lstm": "a recurrent policy has --memory WIDTH",
    "env-kwargs env-params": "options of an environment stand behind its name: NAME?option=value",
    "num-worlds num-environments num-envs-per-env-runner num-envs-per-worker":
        "worlds that are stepped at once are --num-envs",
    "workers num-workers num-env-runners num-rollout-workers":
        "environments of JAX need none; others are stepped by --topology actors with --actors N",
    "optimizer": "an algorithm has its own; --algorithm my_module:MyClass is yours",
    "network policy policy-kwargs net-arch hidden-sizes layer-size fcnet-hiddens":
        "the network is --torso, a name or my_module:function of your own, with --hidden-dim and --num-layers",
    "output output-dir log-dir logdir": "the folder of runs is --runs-dir",
    "name exp-name experiment-name": "the name of a run is --run-name",
    "resume-from checkpoint load load-model load-model-path":
        "go on with --resume RUN, or begin from its parameters with --init-from RUN",
    "checkpoint-freq checkpoint-interval checkpoint-every save-freq save-steps":
        "updates between two checkpoints are --save-interval",
    "eval-freq eval-interval eval-steps": "updates between two evaluations are --evaluation-interval",
    "eval-episodes num-eval-episodes": "episodes of an evaluation are --evaluation-episodes",
    "report-to tensorboard": "files for TensorBoard are always written; other trackers are --track NAME",
    "wandb-project wandb-project-name": "a tracker's project is --project",
    "num-seeds": "runs side by side are --seeds N",
    "data dataset dataset-name prompts train-file train-files":
        "questions are --questions FILE.jsonl of recipe reasoning-questions; driving logs are --data PATH of driving",
    "verifier reward reward-fn reward-func reward-funcs reward-function custom-reward-function":
        "a verifier of answers is --check my_module:function; a reward of driving is --reward my_module:function",
    "model model-path model-name-or-path":
        "a language model is --model-folder DIR with Hugging Face's files; longhaul fetch gets one",
    "num-generations group-size n-samples rollout-n": "completions of a question are --group N",
    "max-new-tokens max-tokens max-completion-length max-response-length response-length":
        "the most tokens of a completion are --num-steps",
    "beta kl-beta kl-loss-coef": "the weight of a language model's KL to the policy before rewards is --kl-coef",
    "epsilon epsilon-high clip-param cliprange":
        "a ratio's clip range is --clip-eps, of a language model --clip-low and --clip-high",
    "push-to-hub": "after training longhaul push uploads a policy; a language model is exported, then hf upload",
    "lora-r lora-rank": "LoRA's rank is --lora RANK",
    "gradient-accumulation-steps": "micro-batches of an update are --accumulate N",
    "gradient-checkpointing": "what is computed again for the gradient is --remat, of a language model --model-remat",
    "bf16 dtype": "the type of the computation is --precision, of a language model --model-precision",
    "loss-type": "the loss of a language model is --loss",
    "vllm use-vllm vllm-server": "servers that sample for a run are --rollout-servers URL...",
}  # fmt: skip
"""Flags of other libraries -> what to give."""


def aliases_of(config: Any) -> dict[str, str]:
    """Other names of settings -> their own, with underscores."""
    own = {leaf.name for leaf in config_fields.walk(config)}
    named = {name.replace("-", "_"): [word.replace("-", "_") for word in aliases] for name, aliases in ALIASES.items()}
    return {word: name for name, aliases in named.items() if name in own for word in aliases if word not in own}


def canonical(config: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their own names, with underscores, whichever of their names were given.

    Raises RunError where two names of one setting disagree.
    """
    names = aliases_of(config)
    named: dict[str, Any] = {}
    for word, value in settings.items():
        name = names.get(word, word)
        if name in named and named[name] != value:
            raise RunError(f"{name} is {named[name]!r} and {value!r}, under two names of one setting; give one of them")
        named[name] = value
    return named


def hint(config: Any, word: str, otherwise: str) -> str:
    """Sentence for a name that no setting has: the answer, the nearest names, or `otherwise`."""
    if known := answer(word, ANSWERS):
        return re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), known)
    near = difflib.get_close_matches(word.lower(), [leaf.name for leaf in config_fields.walk(config)], n=3, cutoff=0.5)
    return did_you_mean(near, otherwise)


def as_typed(text: str, words: list[str]) -> str:
    """An error's text with flags as the user typed them among `words`: --learning-rate or --num_envs."""
    written = [word.partition("=")[0] for word in words if word.startswith("--")]
    typed = {word.replace("_", "-"): word for word in written}
    for name, aliases in ALIASES.items():
        for word in [typed[f"--{alias}"] for alias in aliases if f"--{alias}" in typed]:
            typed.setdefault(f"--{name}", word)
    return re.sub(r"--[a-z][a-z-]*", lambda flag: typed.get(flag[0], flag[0]), text)

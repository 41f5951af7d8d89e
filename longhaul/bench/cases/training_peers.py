"""Other libraries' training at the settings of a case of `longhaul bench`, as programs that run under their own Python.

Each does as `bench.serve` does: says what it is once it is ready, and repeats for every line that comes in.
"""

from __future__ import annotations

PUREJAXRL = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[1])
about = json.loads(sys.argv[2])
config = about["config"]
import jax
from ppo import make_train
names = dict(LR="lr", NUM_ENVS="num_envs", NUM_STEPS="num_steps", TOTAL_TIMESTEPS="total_steps",
             UPDATE_EPOCHS="update_epochs", NUM_MINIBATCHES="num_minibatches", GAMMA="gamma", GAE_LAMBDA="gae_lambda",
             CLIP_EPS="clip_eps", ENT_COEF="ent_coef", VF_COEF="vf_coef", MAX_GRAD_NORM="max_grad_norm")
settings = {theirs: config[ours] for theirs, ours in names.items()}
settings |= dict(ACTIVATION="tanh", ENV_NAME="CartPole-v1", ANNEAL_LR=True, DEBUG=False)
began = time.perf_counter()
runs = config.get("runs", 1)
def key(seed):
    return jax.random.split(jax.random.PRNGKey(seed), runs) if runs > 1 else jax.random.PRNGKey(seed)
train = make_train(settings) if runs == 1 else jax.vmap(make_train(settings))
train = jax.jit(train).lower(key(0)).compile()
compiled = time.perf_counter() - began
def cpu():
    both = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in both)
def work(seed):
    found = jax.block_until_ready(train(key(seed)))["metrics"]
    last = -max(1, found["returned_episode"].shape[-3] // 10)
    ended, score = (found[name][..., last:, :, :] for name in ("returned_episode", "returned_episode_returns"))
    return {"mean_return": float((score * ended).sum() / ended.sum())}
def tell(what):
    print("figure " + json.dumps(what), flush=True)
work(0)
versions = {"jax": jax.__version__}
tell({"steps": about["steps"], "unit": about["unit"], "compile_seconds": compiled, "versions": versions})
for i, _ in enumerate(sys.stdin):
    used, began = cpu(), time.perf_counter()
    found = work(i)
    tell({"wall_seconds": time.perf_counter() - began, "cpu_seconds": cpu() - used} | found)
"""
"""Drives PureJaxRL's `make_train`; takes the folder of its `ppo.py`, too."""

BRAX_SAC = """
import functools, importlib.metadata, json, resource, sys, time
about = json.loads(sys.argv[1])
config = about["config"]
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
def replicated(tree, devices):
    sharding = NamedSharding(Mesh(np.array(devices), "i"), PartitionSpec("i"))
    return jax.tree.map(lambda x: jax.device_put(jnp.stack([jnp.asarray(x)] * len(devices)), sharding), tree)
if not hasattr(jax, "device_put_replicated"):
    jax.device_put_replicated = replicated
from brax import envs
from brax.training import acting, replay_buffers
from brax.training.agents.sac import networks, train as sac
acting.Evaluator.run_evaluation = lambda self, params, training_metrics, aggregate_episodes=True: dict(training_metrics)
name, _, query = config["env"].partition("/")[2].partition("?")
options = dict(part.split("=") for part in query.split("&")) if query else {}
def cpu():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
def tell(what):
    print("figure " + json.dumps(what), flush=True)
WARM, MOST = 3, 200  # epochs: Brax compiles anew in the second and third
began, epochs, mark = time.perf_counter(), -1, None
def progress(step, metrics):
    global epochs, mark
    now, used = time.perf_counter(), cpu()
    epochs += 1
    if epochs < WARM:
        return
    if epochs == WARM:
        versions = {each: importlib.metadata.version(each) for each in ("jax", "brax")}
        compiled = time.perf_counter() - began
        tell({"steps": about["steps"], "unit": about["unit"], "compile_seconds": compiled, "versions": versions})
    else:
        tell({"wall_seconds": now - mark[0], "cpu_seconds": used - mark[1]})
    if not sys.stdin.readline():
        sys.exit(0)
    mark = time.perf_counter(), cpu()
prefill = config["learning_starts"]
if config["fill"]:
    empty = replay_buffers.UniformSamplingQueue.init
    def full(self, key):
        state, filled = empty(self, key), jnp.int32(config["fill"] * self._data_shape[0])
        return state.replace(data=jax.random.uniform(key, self._data_shape), insert_position=filled)
    replay_buffers.UniformSamplingQueue.init = full
hidden = (config["hidden_dim"],) * config["num_layers"]
sac.train(
    envs.get_environment(name, **options), num_timesteps=prefill + (WARM + MOST) * about["steps"], episode_length=1000,
    num_envs=config["num_envs"], num_eval_envs=1, num_evals=1 + WARM + MOST, learning_rate=config["lr"],
    discounting=config["gamma"], batch_size=config["batch_size"], tau=config["tau"], min_replay_size=prefill,
    max_replay_size=config["replay_size"], grad_updates_per_step=config["gradient_steps"], max_devices_per_host=1,
    network_factory=functools.partial(networks.make_sac_networks, hidden_layer_sizes=hidden), progress_fn=progress,
)
"""
"""Brax's `train`, whose epochs are the repeats: between two of them it waits to be asked. Its evaluations are left
out, as ours are, and its replay begins as full as ours does. A function that JAX has no more, without which the
released Brax can't train at all, is put back (`jax.device_put_replicated`, Brax's issue 671)."""

"""Training, loading and evaluation from Python: what `import longhaul` offers.

    result = longhaul.train("ppo", env="my_env:Corridor", total_steps=200_000)
    policy = longhaul.load(result.folder)
    action = policy(observation)

A run is the same as one of `longhaul train`: the same folder, the same numbers, to be resumed by either.
"""

from __future__ import annotations

import difflib
import functools
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from longhaul.algorithms import external, registry
from longhaul.algorithms.run_context import RunContext
from longhaul.config import aliases, files, recipes
from longhaul.config.resolve import changed, named, resolve, typed
from longhaul.config.run import Driving, Named, Run
from longhaul.envs import registry as environments
from longhaul.envs import suite_adapters
from longhaul.envs.host import registry as host
from longhaul.envs.host.vector import HostVector
from longhaul.reasoning.config import Reasoning
from longhaul.runtime import config_fields, partition
from longhaul.runtime.devices import MeshShape
from longhaul.runtime.errors import RunError, did_you_mean
from longhaul.runtime.files import expanded
from longhaul.runtime.mesh import identity
from longhaul.runtime.provenance import provenance
from longhaul.telemetry import pages, sinks, tracking
from longhaul.training import drawing, evaluate_driving, hub, init_from, loop, members, publish, reasoning_setup, store
from longhaul.training import evaluate as evaluation
from longhaul.training import runs as folder_runs
from longhaul.training.checkpoint.resume import continued, policy_of, restore_policy
from longhaul.training.confidence import Estimate, bootstrap
from longhaul.training.data import feed, spec
from longhaul.training.evaluate import Scores
from longhaul.training.language_model import LanguageModel, is_model_folder, of_files, of_run
from longhaul.training.loop import Callback, Outcome
from longhaul.training.run_dir import (
    RUNS,
    find_folder,
    find_or_fetch,
    load_run,
    new_folder,
    read_result,
    read_run,
    save_run,
)
from longhaul.training.runs import Summary
from longhaul.types import Environment, Key, Params, PyTree

BEFORE = {"run.json", "run.json.partial", "publish.json", store.MARK, *(f"{name}.json" for name in tracking.KINDS)}
"""Files of a run that has not begun."""

NO_RUN = "the run is a {}; give its name, its folder or the Result of its training"
"""Error for what is no run, with its type."""


def begin(
    run: Run,
    runs_dir: Path,
    *,
    name: str | None = None,
    suffix: str | None = None,
    asked: Mapping[str, Any],
    prepare: Callable[[Path], None] = lambda folder: None,
    callback: Callback | None = None,
    sole: bool = False,
) -> tuple[Path, Outcome]:
    """(folder, outcome) of a new run, trained to its end. Whoever has read the folder's name can resume the run.

    `asked` are the settings that its user gave; `prepare` is called with the folder before anything else is there. A
    run that is refused before it began (by a damaged log, say) leaves no folder. `sole` is as in `loop.train`.
    """
    task = run.environment
    if isinstance(task, Named):
        if suite_adapters.is_suite(task.env):  # importing a suite may start JAX, as Brax does
            loop.prepare_devices(run.shown_devices, run.threads)
        named(task)  # an unknown or missing environment is reported before anything is made
    loop.prepare_devices(run.shown_devices, run.threads)
    if isinstance(task, Reasoning):
        reasoning_setup.check_task(run)
    if external.is_own(type(run.algorithm)):
        external.check(run.algorithm, spec(run), RunContext(updates=1, mean=identity))
    if isinstance(task, Driving) or run.model > 1:  # elsewhere nothing expensive precedes the training's own check
        algorithm = registry.make(spec(run), run.algorithm, RunContext(updates=1, mean=identity))
        partition.check(jax.eval_shape(algorithm.init, jax.random.key(0)), run.mesh)
    source = feed(run) if _reads(run) else None
    about = provenance() | {"data": source.about if source else None, "asked": asked}
    folder = new_folder(runs_dir, run, name, suffix)
    try:
        prepare(folder)
        save_run(folder, run, about)
        print(store.shown(folder), flush=True)
        return folder, loop.train(run, folder, resumed=False, source=source, callback=callback, sole=sole)
    except (ValueError, OSError):
        if {path.name for path in folder.iterdir()} <= BEFORE:
            shutil.rmtree(folder)
        raise


def _reads(run: Run) -> bool:
    """True for a run in data that may be damaged or missing, which is read before its folder is there."""
    task = run.environment
    if isinstance(task, Driving):
        return bool(task.data)
    expert = registry.recorded(run.algorithm) or registry.guidance(run.algorithm) is not None
    return isinstance(task, Named) and bool(expert)


# ------------------------------------------------------------------------------------------------------------ training


class Curve:
    """Curves of metrics, one below the other, which a notebook shows as a picture."""

    def __init__(self, titles: Sequence[str], metrics: Mapping[str, np.ndarray]) -> None:
        x = metrics["agent_steps"]
        self._title = ", ".join(titles)
        self._figure = "".join(
            pages.figure(title, [pages.Series(title, x, metrics[title])], "agent steps") for title in titles
        )

    def _repr_html_(self) -> str:
        return f"<style>{pages.asset('curves.css')}</style>{self._figure}"

    def save(self, path: str | Path) -> Path:
        """Page that any browser shows, an .html, whose missing folders are made. RunError for another suffix."""
        file = expanded(path)
        if file.suffix.lower() not in (".html", ".htm"):
            raise RunError(f"the curve's file is {str(path)!r}; it is a page, so name it .html")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            pages.page(
                self._title,
                self._figure,
                styles=[pages.asset("page.css"), pages.asset("curves.css")],
                scripts=[pages.asset("curves.js")],
            ),
            "utf-8",
        )
        return file


@dataclass(frozen=True)
class Result:
    """Result of a training run, finished or stopped."""

    folder: Path
    run: Run
    stopped: bool  # by a signal, Ctrl-C or the callback, after saving; `resume` goes on
    evaluation: dict[str, dict[str, float]]  # policy -> metric -> mean; empty where the run was stopped
    summary: dict[str, Any]  # the run's result.json: steps, seconds, params_sha256; empty where it was stopped

    @functools.cached_property
    def metrics(self) -> Metrics:
        """Metrics by name, float64 [records] each; NaN in a record that lacks one."""
        return read_metrics(self.folder)

    @functools.cached_property
    def members(self) -> Metrics:
        """Metrics of each run that `seeds` or `sweep` trained, float64 [records, runs]; NaN where one is not finite.

        Raises RunError for a single run.
        """
        if not self.run.many:
            raise RunError(f"{self.folder.name} is one run, whose metrics are in result.metrics")
        return read_metrics(self.folder, members.FILE)

    @functools.cached_property
    def policy(self) -> Policy:
        """The trained policy, from the newest checkpoint."""
        return load(self.folder)

    def plot(self, metric: str = "episode/return", *more: str) -> Curve:
        """Curve of a metric over agent steps, and of `more` metrics below it."""
        return Curve((metric, *more), self.metrics)

    def __repr__(self) -> str:
        scores = {name: round(value, 4) for name, value in self.evaluation.get("trained", {}).items()}
        return f"Result({str(self.folder)!r}, {'stopped' if self.stopped else scores})"


class Metrics(dict[str, np.ndarray]):
    """Metrics by name, float64 [records] each; a KeyError has the nearest names."""

    def __missing__(self, name: str) -> np.ndarray:
        last = {known.rpartition("/")[2]: known for known in self}
        near = [known for known in self if name in known][:3] or difflib.get_close_matches(name, list(self), n=3)
        near = near or [last[each] for each in difflib.get_close_matches(name, last, n=3)]
        hint = did_you_mean(near, f"there are {', '.join(self)}")
        raise KeyError(f"no metric is named {name!r}; {hint}")


def read_metrics(folder: str | Path, file: str = "metrics.jsonl") -> Metrics:
    """Metrics of a run's folder, or of each of its runs; NaN in a record that lacks one. Texts are left out."""
    path = expanded(folder) / file
    records = sinks.read(path) if path.exists() else []
    names = {name: None for record in records for name, value in record.items() if not isinstance(value, str)}
    return Metrics((name, _column([record.get(name) for record in records])) for name in names)


def _column(values: list[Any]) -> np.ndarray:
    """Values of a metric, numbers or equally long lists of them, with NaN for None."""
    many = next((len(value) for value in values if isinstance(value, list)), None)
    nothing = np.nan if many is None else [np.nan] * many
    return np.array([nothing if value is None else value for value in values], np.float64)


def train(
    recipe: str | Run | None = None,
    *,
    env: str | Callable[..., Any] | None = None,
    algorithm: Any = None,
    seed: int | None = None,
    config: str | Path | None = None,
    runs_dir: str | Path = RUNS,
    run_name: str | None = None,
    callback: Callback | None = None,
    **settings: Any,
) -> Result:
    """Result of a new training run: of a recipe's name (`longhaul recipes` lists them; "ppo" if none is given, with
    `env`), or of a Run.

    `env` is an environment's name, or the class or function that makes the user's own. `algorithm` is one in the
    recipe's place: a name, or the class of the user's own (docs/add-an-algorithm.md). `settings` are the flags of
    `longhaul train RECIPE` with underscores: `num_envs=64, lr=3e-4`; they go before those of the file `config` (YAML,
    TOML, JSON or a run.json). A function stands for its name: `torso=network`, `check=verify`, `reward=careful`. Those
    of trackers and publication are among them: `track=["mlflow"], publish=["run"]`.
    `callback(metrics)` is called with each record between compiled calls, and changes no number; where it returns true,
    the run saves and stops, as it does on Ctrl-C.

    Raises RunError, one line with value, bound and remedy, before anything is compiled.
    """
    _check_callback(callback)
    if isinstance(config, Mapping):
        raise RunError("config is a dict; give a file's path, or its settings as keywords: train(RECIPE, **settings)")
    stored = {} if config is None else files.load(expanded(config))
    name = recipe or stored.get("recipe") or "ppo"
    chosen = name if isinstance(name, Run) else recipes.recipe(name)
    if (other := algorithm or files.algorithm(stored)) is not None:
        chosen = recipes.with_algorithm(chosen, other)
    given = {} if config is None else files.read(stored, chosen, expanded(config))
    beside, settings = _split_settings(settings)
    prepare = _prepared(beside, chosen.recipe)
    given |= aliases.canonical(chosen, settings) | ({} if seed is None else {"seed": seed})
    if env is not None:
        if not isinstance(chosen.environment, Named):
            raise RunError(f"env is {env!r}, and recipe {chosen.recipe} has none to choose; take the recipe ppo, say")
        given["env"] = env if isinstance(env, str) else _importable("env", env)
    if isinstance(given.get("init_from"), str | Path):
        given["init_from"] = init_from.located(str(given["init_from"]), expanded(runs_dir))
    given = _as_run_values(chosen, given)
    if name in recipes.NO_ENV and config is None and not {"env", "recorded"} & given.keys():
        raise RunError(f"recipe {name} is for any environment; give env=NAME (longhaul envs lists them), or a class")
    run = resolve(changed(chosen, given))
    asked = {name: str(value) if isinstance(value, MeshShape) else value for name, value in given.items()}
    folder, outcome = begin(run, expanded(runs_dir), name=run_name, asked=asked, prepare=prepare, callback=callback)
    return _result(folder, run, outcome)


def resume(
    run: str | Path | Result, *, runs_dir: str | Path = RUNS, callback: Callback | None = None,
    take_edits: bool = False, **settings: Any,
) -> Result:  # fmt: skip
    """Result of a run that goes on from its newest intact checkpoint, bit for bit as if it had never stopped.

    `settings` are those that `longhaul train RECIPE --resume RUN` takes; with a larger `total_steps` a run that is
    finished trains on, and its annealed schedules go on to the new end. With `take_edits` a run.json that was edited
    by hand is taken. Raises RunError, one line, where there is no such run, it has no intact checkpoint, a setting
    can't be changed any more, or run.json was edited.
    """
    _check_callback(callback)
    beside, settings = _split_settings(settings)
    where = beside.get("project"), beside.get("entity")
    if not isinstance(run, str | Path | Result):
        raise RunError(NO_RUN.format(type(run).__name__))
    folder = run.folder if isinstance(run, Result) else find_or_fetch(expanded(runs_dir), str(run), "", *where)
    before = load_run(folder)
    settings = aliases.canonical(before, settings)
    settings |= _as_run_values(
        before, {name: settings[name] for name in settings.keys() & config_fields.values(before).keys()}
    )
    stored = resolve(continued(folder, before, settings))
    _prepared(beside, stored.recipe, folder)(folder)
    outcome = loop.train(stored, folder, resumed=True, asked=settings, callback=callback, edited=take_edits)
    return _result(folder, stored, outcome)


def result(run: str | Path | Result, *, runs_dir: str | Path = RUNS) -> Result:
    """Result of a run that is there, by its name or folder: its metrics, curves and scores as its files have them now.

    `stopped` is true where the run has not ended, be it that it trains. Raises RunError where there is none.
    """
    folder = _folder(run, runs_dir)
    summary = read_result(folder) if (folder / "result.json").is_file() else {}
    return Result(folder, read_run(folder), not summary, summary.get("evaluation", {}), summary)


def runs(runs_dir: str | Path = RUNS) -> list[Summary]:
    """Summaries of the runs in a folder, newest first, as `longhaul runs` lists them: name, status, steps, value (the
    last known return), trained (that of the final evaluation) and more. `pandas.DataFrame` takes them as rows."""
    return folder_runs.summaries(folder_runs.local(expanded(runs_dir)))


def _check_callback(callback: Any) -> None:
    if callback is not None and not callable(callback):
        raise RunError(f"callback is {callback!r}; give a function of one argument, a record's metrics")


def _split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(flags of trackers and publication by their names, settings of the run)."""
    flags = {flag.replace("-", "_"): flag for flag in (*tracking.FLAGS, *publish.FLAGS)}
    beside = {flags[name]: value for name, value in settings.items() if name in flags}
    return beside, {name: value for name, value in settings.items() if name not in flags}


def _prepared(beside: Mapping[str, Any], recipe: str, folder: Path | None = None) -> Callable[[Path], None]:
    """Function that saves the trackers and the publication that flags ask for, after those in `folder`.

    Raises TrackingError or RunError, one line, before anything is made.
    """
    many = {flag: (beside[flag],) for flag in ("track", "publish") if isinstance(beside.get(flag), str)}
    values, explicit = {**beside, **many}, frozenset(beside)
    tracked = tracking.chosen(values, explicit, recipe, tracking.load_all(folder) if folder else None)
    published = publish.chosen(values, explicit, publish.load(folder) if folder else None)
    for line in tracking.idle(explicit | {"resume"} if folder else explicit, tracked):
        print(line, file=sys.stderr, flush=True)

    def prepare(new: Path) -> None:
        tracking.save(new, tracked)
        publish.save(new, published)

    return prepare


def _as_run_values(run: Run, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as a Run holds them: a function of the user's own by its name, 2 or "data=2" as a mesh, and
    {"lr": [1e-3, 1e-4]} as a sweep."""
    numbers = {leaf.name for leaf in config_fields.walk(run) if isinstance(leaf.value, int | float)}
    if wrong := [name for name, value in given.items() if callable(value) and name in numbers]:
        hint = "; with anneal=True it falls to 0" if wrong[0] == "lr" else ""
        raise RunError(f"{wrong[0]} is {given[wrong[0]]!r}; it must be a number, no function{hint}")
    importable = {name: _importable(name, value) if callable(value) else value for name, value in given.items()}
    if isinstance(importable.get("mesh"), int | str):
        importable["mesh"] = files.mesh(importable["mesh"])
    if isinstance(swept := importable.get("sweep"), Mapping):
        importable["sweep"] = files.sweep(swept)
    return typed(run, importable)


def _importable(setting: str, value: Any) -> str:
    """Name "module:path" of a class or function, by which a run that goes on finds it again."""
    name = getattr(value, "__qualname__", None)
    if not callable(value) or name is None or "<" in name:
        makes = ", that makes the environment" if setting == "env" else ""
        raise RunError(
            f"{setting} is {value!r:.100}; give the class, or a function with a name{makes}: a run that is resumed "
            "imports it again"
        )
    return f"{value.__module__}:{name}"


def _folder(run: str | Path | Result, runs_dir: str | Path) -> Path:
    if isinstance(run, Result):
        return run.folder
    if not isinstance(run, str | Path):
        raise RunError(NO_RUN.format(type(run).__name__))
    if hub.is_address(str(run)):
        return hub.folder_of(str(run))
    return find_folder(expanded(runs_dir), str(run))


def _result(folder: Path, run: Run, outcome: Outcome) -> Result:
    summary = outcome.result or {}
    return Result(folder, run, outcome.code != 0, summary.get("evaluation", {}), summary)


# -------------------------------------------------------------------------------------------------------------- policy


def _array(x: Any, dtype: Any = None) -> Any:
    """Array of NumPy, or of JAX where it is traced: a policy may stand within `jax.jit` and `jax.vmap`."""
    if isinstance(x, jax.core.Tracer):
        return x if dtype is None else x.astype(dtype)
    return np.asarray(x, dtype)


class Policy:
    """Trained policy that acts on observations, one or a batch of them.

    `policy(observation)` is its mode; with a `key` it samples. A policy with a memory (GRU, transformer) takes `memory`
    and returns (action, memory); `policy.memory(batch)` is that of an episode's start.
    """

    def __init__(self, run: Run, params: Params) -> None:
        self.run, self.params, self.spec = run, params, spec(run)
        algorithm = registry.make(self.spec, run.algorithm, RunContext(updates=1, mean=identity))
        self._memory = algorithm.memory
        self.recurrent = bool(jax.tree.leaves(jax.eval_shape(lambda: algorithm.memory(1))))
        self.act = lambda params, memory, seen, key: algorithm.act(params, memory, seen, key)[:2]
        self._act = jax.jit(self.act)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle of settings and arrays: for a copy, and for workers of multiprocessing, Ray or joblib."""
        return Policy, (self.run, jax.tree.map(np.asarray, self.params))

    def __repr__(self) -> str:
        weights = sum(np.size(leaf) for leaf in jax.tree.leaves(self.params))
        seen = jax.tree_util.tree_leaves_with_path(self.spec.observation)
        shapes = ", ".join(
            f"{jax.tree_util.keystr(path, simple=True)} {list(leaf.shape)}".strip() for path, leaf in seen
        )
        return f"Policy({self.run.recipe}, {weights:,} parameters: {shapes} -> {self.spec.action})"

    def memory(self, batch: int | None = None) -> PyTree:
        """Memory at an episode's start, of one observation (None) or a batch."""
        begun = self._memory(1 if batch is None else batch)
        return jax.tree.map(lambda x: x[0], begun) if batch is None else begun

    def __call__(self, observation: PyTree, key: Key | None = None, memory: PyTree | None = None) -> Any:
        """Action of an observation with the spec's shape, or actions [B, ...] of B. Raises ValueError for others."""
        if isinstance(self.spec.observation, jax.ShapeDtypeStruct):  # lists of numbers are taken, too
            if isinstance(observation, Mapping):
                parts, expected = ", ".join(map(str, observation)), list(self.spec.observation.shape)
                raise ValueError(f"the observation is a dict of {parts}; the policy takes an array {expected}")
            observation = _array(observation)
        if isinstance(key, int):
            raise ValueError(f"key is {key}; give jax.random.key({key})")
        single = self._is_single(observation)
        seen = jax.tree.map(lambda x, leaf: _array(x, leaf.dtype), observation, self.spec.observation)
        if single:
            seen = jax.tree.map(lambda x: x[None], seen)
        if memory is None:
            held = self._memory(len(jax.tree.leaves(seen)[0]))
        else:
            held = jax.tree.map(lambda x: x[None], memory) if single else memory
        action, after = self._act(self.params, held, seen, key)
        if single:
            action, after = jax.tree.map(lambda x: x[0], (action, after))
        return (action, after) if self.recurrent else action

    def act_numpy(self, observation: PyTree, memory: PyTree | None = None) -> Any:
        """Action as of a call, in NumPy arrays: what `env.step` of Gymnasium takes."""
        return jax.tree.map(np.asarray, self(observation, memory=memory))

    def averaged(self, other: Policy, share: float) -> Policy:
        """Policy whose parameters are the mean of these and of `other`'s, which count for `share`, 0 to 1.

        Of a policy and what was fine-tuned from it, the mean often keeps what the first could on data unlike the
        second's training (Wortsman et al., "Robust fine-tuning of zero-shot models", 2022, arXiv 2109.01903). A
        normaliser stays this policy's own. Raises RunError where the networks differ.
        """
        if not 0.0 <= share <= 1.0:
            raise RunError(f"the share of the other policy is {share}; it must lie in 0 to 1")
        own_shapes, other_shapes = (
            {name: list(leaf.shape) for name, leaf in init_from.names(policy.params.params, "params").items()}
            for policy in (self, other)
        )
        for name in sorted(own_shapes.keys() | other_shapes.keys()):
            own, found = own_shapes.get(name, "absent"), other_shapes.get(name, "absent")
            if own != found:
                raise RunError(
                    f"the policies' networks differ: {name} is {found} there and {own} here; average policies of "
                    "one network"
                )

        def mean(x: Any, y: Any) -> Any:
            return ((1.0 - share) * x + share * y).astype(x.dtype)

        mixed = jax.tree.map(mean, self.params.params, other.params.params)
        return Policy(self.run, self.params._replace(params=mixed))

    def export(self, folder: str | Path, to: str = "jax") -> list[Path]:
        """Files of the policy, written to `folder`.

        `to` is jax or onnx (a program that needs JAX or an ONNX runtime alone, checked in a process of its own),
        safetensors or npz.
        """
        from longhaul.training import export

        return export.save(self, to, expanded(folder))

    def _is_single(self, observation: PyTree) -> bool:
        """True for one observation, False for a batch."""
        expected, structure = jax.tree.structure(self.spec.observation), jax.tree.structure(observation)
        if bool(structure != expected):  # type: ignore[operator]  # JAX says nothing of their types
            raise ValueError(f"the observation is {structure}; the policy takes {expected}")
        shapes = [
            (np.shape(x), leaf.shape)
            for x, leaf in zip(jax.tree.leaves(observation), jax.tree.leaves(self.spec.observation), strict=True)
        ]
        if all(leaf_shape == shape for leaf_shape, shape in shapes):
            return True
        if all(leaf_shape[1:] == shape and leaf_shape for leaf_shape, shape in shapes):
            return False
        leaf_shape, shape = next(pair for pair in shapes if pair[0] not in (pair[1], (*pair[0][:1], *pair[1])))
        raise ValueError(f"the observation is {list(leaf_shape)}; the policy takes {list(shape)}, or a batch of such")


def load(
    run: str | Path | Result, *, runs_dir: str | Path = RUNS, member: int | None = None, step: int | None = None
) -> Policy:
    """Policy of a run's newest intact checkpoint, or that after `step` updates; or of `hf:USER/NAME[@REVISION]`.

    `member` chooses one of a run with several seeds.
    Raises RunError where there is no such run, or no checkpoint.
    """
    folder = _folder(run, runs_dir)
    stored, params, _ = restore_policy(folder, member, step)
    if isinstance(stored.environment, Reasoning):
        name = folder.name
        raise RunError(
            f"run {name} is a language model's; longhaul.language_model({name!r}) writes, longhaul reason {name} asks "
            f"it, and longhaul export {name} --to hf writes its files"
        )
    return Policy(stored, params)


def language_model(
    run: str | Path | Result, *, runs_dir: str | Path = RUNS, member: int | None = None, step: int | None = None
) -> LanguageModel:
    """Language model of a run's newest intact checkpoint, or that after `step` updates; or of a folder in Hugging
    Face's files, as `longhaul fetch smollm2-135m` writes one.

    Raises RunError where there is no such run or folder, or no checkpoint.
    """
    path = expanded(run) if isinstance(run, str | Path) else None
    if path is not None and is_model_folder(path):
        if (member, step) != (None, None):
            raise RunError(f"{path} is a model's folder, which has one version; leave member and step out")
        return LanguageModel(of_files(path))
    folder = _folder(run, runs_dir)
    stored, params, _ = restore_policy(folder, member, step)
    if not isinstance(stored.environment, Reasoning):
        raise RunError(f"run {folder.name} is no language model's; longhaul.load({folder.name!r}) gives its policy")
    return LanguageModel(of_run(folder.name, stored, params.params))


# ---------------------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Evaluation:
    """Scores of a policy on whole episodes."""

    scores: Scores  # a row an episode
    estimates: dict[str, Estimate]  # metric -> mean with its 95 % interval

    @property
    def mean(self) -> dict[str, float]:
        return {name: estimate.mean for name, estimate in self.estimates.items()}

    def __repr__(self) -> str:
        rows = (f"{name} {e.mean:.4g} ({e.low:.4g} to {e.high:.4g})" for name, e in self.estimates.items())
        return f"Evaluation({len(self.scores.names)} episodes: {', '.join(rows)})"


def evaluate(
    run: str | Path | Result | Policy,
    *,
    policy: str = "run",
    episodes: int | None = None,
    data: str | Path | Sequence[str | Path] = (),
    scenario: str | Sequence[str] = (),
    traffic: str | None = None,
    safety: bool | None = None,
    skip_bad_logs: bool | None = None,
    seed: int | None = None,
    runs_dir: str | Path = RUNS,
    member: int | None = None,
    step: int | None = None,
) -> Evaluation:
    """Scores of a run's policy by its mode, as `longhaul evaluate RUN` prints them; `run` may be "pretrained".

    `policy` is "run", or "untrained", the same before training; for driving also a driver beside which to compare it:
    "idm", "log", "constant". `member` and `step` are those of `load`.

    `seed` draws the episodes: by default those of the run's own evaluation; of driving the sample of scenarios that
    `episodes` takes. The others are driving's: `data` are logs (files, folders, globs) instead of the run's own
    scenarios, `scenario` ids of those to drive alone; `traffic` drives the others ("log", "idm", "constant", "self");
    `safety` says whether the safety check is on; with `skip_bad_logs` logs that can't be used are named on stderr and
    left out. Raises RunError, one line, before anything is compiled.
    """
    _check_drivers([policy], traffic)
    for name, number, least in (("episodes", episodes, 1), ("seed", seed, 0)):
        if number is not None and (not isinstance(number, int | np.integer) or number < least):
            raise RunError(f"{name} is {number!r}; it must be a whole number, {least} at least")
    learnt = policy in ("run", "untrained")
    if isinstance(run, Policy):
        _check_loaded([policy], member, step)
        stored, params = run.run, run.params if learnt else None
    else:
        stored, params = policy_of(_folder(run, runs_dir), policy, member, step)
    paths, ids = _texts(data), _texts(scenario)
    if ids and episodes is not None:
        raise RunError(f"episodes is {episodes}, and scenario names those to drive; leave one of them out")
    if not isinstance(stored.environment, Driving):
        if not learnt or paths or ids or (traffic, safety, skip_bad_logs) != (None, None, None):
            raise RunError(
                "data, scenario, traffic, safety, skip_bad_logs and the drivers idm, log and constant are driving's; "
                "leave them out"
            )
        count = episodes or stored.evaluation_episodes or 100
        scores, _ = evaluation.scorer(stored, count)(params, stored.seed if seed is None else int(seed))
    else:
        asked = {"safety": safety, "skip_bad_logs": skip_bad_logs}
        stored = config_fields.replaced(stored, **{name: bool(x) for name, x in asked.items() if x is not None})
        drives = evaluate_driving.drives(stored, paths, episodes, traffic, int(seed or 0)).named(ids)
        scores, _ = drives.play(params, "policy" if learnt else policy)
    return Evaluation(scores, bootstrap(scores.metrics, scores.groups()))


def render(
    run: str | Path | Result | Policy | None = None,
    out: str | Path = "drive.gif",
    *,
    policy: str | Sequence[str] = "run",
    data: str | Path | Sequence[str | Path] = (),
    scenario: str | Sequence[str] = (),
    episodes: int = 1,
    traffic: str | None = None,
    safety: bool | None = None,
    skip_bad_logs: bool | None = None,
    past_violations: bool = False,
    runs_dir: str | Path = RUNS,
    member: int | None = None,
    step: int | None = None,
) -> Path:
    """Picture of a run's policy as it acts, written to `out` as by `longhaul render`; -> its path.

    The suffix of `out` chooses: .gif, .mp4, .html (a page with a player) or .png (a film strip). Several policies are
    drawn side by side: `policy=["run", "idm"]`. `run` may be "pretrained"; without it the drivers "idm", "log" and
    "constant" drive. `scenario` are ids of scenarios, else the first `episodes` are drawn. `data`, `traffic`, `safety`
    and `skip_bad_logs` are those of `evaluate`, and with `past_violations` an episode goes on after a collision. Raises
    RunError, one line, before anything is compiled.
    """
    out, who, ids, paths = expanded(out), _texts(policy), _texts(scenario), _texts(data)
    _check_drivers(who or [""], traffic)
    if not isinstance(episodes, int | np.integer) or episodes < 1:
        raise RunError(f"episodes is {episodes!r}; it must be a whole number, 1 at least")
    drawing.check_file(out)
    of, acting, title = _acting(run, who, runs_dir, member, step)
    drawing.draw(
        of, title, who, acting, out, data=paths, scenarios=ids, episodes=int(episodes), traffic=traffic, safety=safety,
        skip_bad_logs=skip_bad_logs, past_violations=past_violations,
    )  # fmt: skip
    return out


def _acting(
    run: str | Path | Result | Policy | None, who: Sequence[str], runs_dir: str | Path, member: int | None,
    step: int | None,
) -> tuple[Run, drawing.Acting, str]:  # fmt: skip
    """(a run, its policies by name, its own name)."""
    if not isinstance(run, Policy):
        folder = None if run is None else _folder(run, runs_dir)
        return *drawing.of_run(folder, who, member, step), "" if folder is None else folder.name
    _check_loaded(who, member, step)
    return run.run, lambda each: (run.run, run.params if each == "run" else None), run.run.recipe


def _check_drivers(policies: Sequence[str], traffic: str | None) -> None:
    """Raises RunError for a word that names no policy, or no traffic; None is the run's own."""
    asked: list[tuple[str, str, Sequence[str]]] = [("policy", each, evaluation.POLICIES) for each in policies]
    asked += [] if traffic is None else [("traffic", traffic, evaluation.TRAFFICS)]
    for name, word, words in asked:
        if word not in words:
            own = f"; {word} is a run of its own: give it as run" if (name, word) == ("policy", hub.PRETRAINED) else ""
            raise RunError(f"{name} is {word!r}; it must be one of {', '.join(words)}{own}")


def _check_loaded(policies: Sequence[str], member: int | None, step: int | None) -> None:
    """Raises RunError where a loaded Policy is asked for another one of its run's."""
    if "untrained" in policies or (member, step) != (None, None):
        raise RunError("a loaded Policy is one policy; give the run's name or folder with policy, member and step")


def _texts(values: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(each) for each in ([values] if isinstance(values, str | Path) else values)]


def make(
    env: str | Callable[..., Any], *, num_envs: int = 1, seed: int = 0, **options: Any
) -> Environment | HostVector:
    """Environment by its name (`longhaul envs` lists them), class or function.

    One that computes on the device is a `types.Environment`; one on the host is a vector of `num_envs` worlds.
    """
    from longhaul.envs import external

    name = external.canonical(env if isinstance(env, str) else _importable("env", env))
    if host.is_hosted(name):
        return host.make(host.describe(name, **options), num_envs, seed)
    return environments.make(name, **options)

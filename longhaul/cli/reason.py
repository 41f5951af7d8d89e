"""The command `reason`: a run's policy thinks about a problem, and shows its chains, their votes and the answer.

With `--curve`: about many problems held out, and shows what more steps and more samples are worth, and what an early
stop saves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from longhaul.algorithms.config import Reasoner
from longhaul.cli import flags, tables
from longhaul.cli.flags import DEBUG, FLOAT, INT, OUTPUT, TEXT, Flag, FlagError, choice
from longhaul.cli.run_flags import RUN, RUNS_DIR, folder_of
from longhaul.config.run import Run
from longhaul.reasoning import problem_sets, sampler, test_time_compute
from longhaul.reasoning.config import Reasoning
from longhaul.reasoning.sampler import UNBOUNDED, Sampling, bank
from longhaul.reasoning.tasks import Problem
from longhaul.reasoning.test_time_compute import Solution, drawing
from longhaul.reasoning.tokenizer import Budget
from longhaul.runtime.errors import FieldError, RunError
from longhaul.training import reasoning_setup
from longhaul.training.checkpoint.resume import restore_policy
from longhaul.training.run_dir import load_run

PROBLEM = Flag("PROBLEM", TEXT, (), 'as "3+4-2=" is one; without, a problem that no run trained on', many=True)

GROUPS = {
    "": [
        RUN,
        PROBLEM,
        Flag("samples", INT, 16, "chains of a problem, at most"),
        Flag("wave", INT, 4, "chains that are drawn before votes are counted"),
        Flag("lead", FLOAT, 2.0, "votes ahead at which it stops; 0: never early"),
        Flag("select", choice(test_time_compute.SELECTIONS), "majority", "rule that selects the answer"),
        Flag("steps", INT, None, "most steps of a chain, after which it must answer", shown="any", least=0),
        Flag("step-mark", TEXT, "", "text that ends a step of --steps, for a model in words; \\n is a newline"),
        Flag("answer-mark", TEXT, "", "text that is put behind the last step, such as ####"),
        Flag("temperature", FLOAT, None, "of sampling; 0: always the likeliest token", shown="the run's"),
        Flag("top-k", INT, None, "most tokens to draw from, the likeliest; 0: all", shown="the run's"),
        Flag(
            "top-p",
            FLOAT,
            None,
            "probability of the likeliest tokens, from which alone one is drawn",
            shown="the run's",
        ),
        Flag(
            "min-p", FLOAT, None, "least probability of a token, as a share of the likeliest one's", shown="the run's"
        ),
        Flag("seed", INT, 0, "of sampling"),
        Flag("curve", INT, None, "instead: accuracy by steps and by samples, on so many problems held out", least=1),
        Flag("json", OUTPUT, None, "write the solutions, or the curve, to this file; - is stdout"),
        RUNS_DIR,
        DEBUG,
    ]
}


def reason(argv: Sequence[str]) -> int:
    """`longhaul reason RUN "3+4-2=" [--samples N] [--select ...] [--steps N] ...`."""
    parsed = flags.parse("reason", "A run's policy thinks about problems.", GROUPS, argv).values
    settings = test_time_compute.Config(parsed["samples"], parsed["wave"], parsed["lead"], parsed["select"])
    try:
        test_time_compute.check(settings)
    except ValueError as error:
        raise FlagError(f"--{error}") from error
    try:
        sampler.check(Sampling(**_changes(parsed)))
    except FieldError as error:
        raise error.of_flag() from error
    folder = folder_of(parsed, 'longhaul reason RUN "3+4-2="')
    task = load_run(folder).environment
    if not isinstance(task, Reasoning):
        raise RunError(f"run {folder.name} is no language model's; name one of a recipe reasoning-...")
    if parsed["curve"] is not None:
        return _curve(folder, task, parsed, settings)
    held_out = problem_sets.held_out_task(task)
    problems: list[str | Problem] = [*parsed["PROBLEM"]] or [problem_sets.held_out_problems(task, 1)[0]]
    if held_out.posed is not None:
        for prompt in parsed["PROBLEM"]:
            held_out.posed(prompt)  # a text that is no problem is reported before anything is loaded
    steps, budget = parsed["steps"], _budget(task, parsed)
    run, policy, _ = restore_policy(folder)
    draw = drawing(
        _model(run).model, policy.params, _sampling(run, parsed), seed=parsed["seed"],
        max_reasoning_steps=UNBOUNDED if steps is None or budget else steps,
        tokeniser=reasoning_setup.tokeniser(run, budget),
    )  # fmt: skip
    solutions = test_time_compute.ReasoningOptimizer(held_out, draw, settings).solve(problems)

    def show() -> None:
        for each, solution in zip(problems, solutions, strict=True):
            known = isinstance(each, Problem) or held_out.posed is None or held_out.posed(each).answer != ""
            _show(solution, known=known)

    tables.report(parsed["json"], [_plain(solution) for solution in solutions], show)
    return 0


def _budget(task: Reasoning, parsed: dict[str, Any]) -> Budget | None:
    """Budget of --steps of a model in words; None for a vocabulary that has the marks, or without --steps."""
    steps, marks = parsed["steps"], [problem_sets.plain(parsed[f"{name}-mark"]) for name in ("step", "answer")]
    if steps is None or not task.in_words:
        if any(marks):
            raise FlagError("--step-mark and --answer-mark are for --steps of a model in words; leave them out")
        return None
    if steps < 1:
        raise FlagError(f"--steps is {steps}; of a model in words it must be at least 1")
    if not all(marks):
        raise FlagError(f"--steps is {steps}, and text has no mark of a step; give --step-mark and --answer-mark")
    return Budget(steps, *marks)


def _model(run: Run) -> Reasoner:
    assert isinstance(run.algorithm, Reasoner)
    return run.algorithm


RULE = ("temperature", "top-k", "top-p", "min-p")
"""Flags of the draw of a token, whose default is the run's."""


def _sampling(run: Run, parsed: dict[str, Any], group: int | None = None) -> Sampling:
    """Settings of the run's sampling, changed by flags."""
    return dataclasses.replace(reasoning_setup.sampling(run, group), **_changes(parsed))


def _changes(parsed: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): parsed[name] for name in RULE if parsed[name] is not None}


def _curve(folder: Path, task: Reasoning, parsed: dict[str, Any], settings: test_time_compute.Config) -> int:
    """Gain of a run's policy from more thinking, on problems that it never trained on."""
    if parsed["PROBLEM"]:
        raise FlagError("--curve is of problems held out; leave PROBLEM out")
    if parsed["steps"] is not None:
        raise FlagError(f"--steps is {parsed['steps']}, and --curve goes through all budgets; leave --steps out")
    run, policy, _ = restore_policy(folder)
    held_out, problems = problem_sets.held_out_task(task), problem_sets.held_out_problems(task, parsed["curve"])
    tokeniser = reasoning_setup.tokeniser(run)
    posed = bank(held_out, problems, np.random.default_rng(problem_sets.HELD_OUT), run.num_steps, tokeniser)
    sampling = _sampling(run, parsed, settings.samples)
    curve = test_time_compute.think(
        held_out, problems, posed, policy.params, jax.random.key(parsed["seed"]), config=_model(run).model,
        sampling=sampling, settings=settings, tokeniser=tokeniser,
    )  # fmt: skip
    if parsed["json"] != "-":
        for rows in (curve.budgets, curve.samples):
            if rows:
                tables.table(list(rows[0]._fields), [[tables.number(value) for value in row] for row in rows])
                print()
        stop = curve.stop
        print(f"early stop: {stop.drawn:.3g} of {settings.samples} samples a problem ({stop.share:.0%}), "
              f"{stop.accuracy:.3f} right; all samples: {stop.full:.3f}")  # fmt: skip
    if parsed["json"] is not None:
        tables.write_json(parsed["json"], curve.plain())
    return 0


def _show(solution: Solution, *, known: bool) -> None:
    """`known`: what the right answer is."""
    header = ["chain", "answer", "soundness", "log p", "right"]
    rows = [
        [chain.text, "-" if chain.answer is None else chain.answer, tables.number(chain.soundness),
         tables.number(chain.log_prob), "?" if not known else "yes" if chain.reward == 1.0 else "no"]
        for chain in solution.chains
    ]  # fmt: skip
    print(solution.prompt)
    tables.table(header, rows)
    votes = ", ".join(f"{answer}: {count:g}" for answer, count in solution.votes.items()) or "none"
    print(f"votes: {votes}{'; settled early' if solution.settled else ''}")
    print(f"answer: {'-' if solution.answer is None else solution.answer}\n")


def _plain(solution: Solution) -> dict[str, Any]:
    """Value in a form that JSON can hold."""
    chain = None if solution.chain is None else solution.chain._asdict()
    return solution._asdict() | {"chain": chain, "chains": [chain._asdict() for chain in solution.chains]}

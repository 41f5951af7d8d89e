"""The command `reason`: a run's policy thinks about a problem, and shows its chains, their votes and the answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longhaul import flags, learners, printing, training
from longhaul.flags import DEBUG, FLOAT, INT, PATH, TEXT, Flag, FlagError, choice
from longhaul.folders import find_folder, load_run
from longhaul.reasoning import optimiser, problems
from longhaul.reasoning.drawing import drawing
from longhaul.reasoning.optimiser import Solution
from longhaul.reasoning.sampling import UNBOUNDED
from longhaul.run import Reasoning, RunError
from longhaul.settings import RUNS_DIR

RUN = Flag("RUN", TEXT, None, "a run's name or folder", shown="")
PROBLEM = Flag("PROBLEM", TEXT, (), 'as "3+4-2=" is one; without, a problem that no run trained on', True, "")

GROUPS = {
    "": [
        RUN,
        PROBLEM,
        Flag("samples", INT, 16, "chains of a problem, at most"),
        Flag("wave", INT, 4, "chains that are drawn before votes are counted"),
        Flag("lead", FLOAT, 2.0, "votes ahead at which it stops; 0: never early"),
        Flag("select", choice(optimiser.SELECTIONS), "majority", "which chain's answer is given"),
        Flag("steps", INT, None, "most steps of a chain, after which it must answer", shown="any"),
        Flag("temperature", FLOAT, None, "of sampling; 0: always the likeliest token", shown="the run's"),
        Flag("seed", INT, 0, "of sampling"),
        Flag("json", PATH, None, "write the solutions to this file; - is stdout", shown=""),
        RUNS_DIR,
        DEBUG,
    ]
}


def reason(words: Sequence[str]) -> int:
    """`longhaul reason RUN "3+4-2=" [--samples N] [--select ...] [--steps N] ...`."""
    parsed = flags.parse("reason", "A run's policy thinks about problems.", GROUPS, words).values
    if parsed["RUN"] is None:
        raise FlagError('which run? longhaul reason RUN "3+4-2="')
    printing.check_json(parsed["json"])
    settings = optimiser.Config(parsed["samples"], parsed["wave"], parsed["lead"], parsed["select"])
    try:
        optimiser.check(settings)
    except ValueError as error:
        raise FlagError(f"--{error}") from error
    folder = find_folder(Path(parsed["runs-dir"]), parsed["RUN"])
    task = load_run(folder).environment
    if not isinstance(task, Reasoning):
        raise RunError(f"run {folder.name} is no language model's; name one of a recipe reasoning-...")
    made = problems.task(task)
    asked = list(parsed["PROBLEM"]) or [problems.held_out(task, 1)[0].prompt]
    if made.posed is not None:
        for prompt in asked:
            made.posed(prompt)  # what is no problem is said before anything is loaded
    run, policy, _ = training.restore_policy(folder)
    config = run.algorithm
    assert isinstance(config, learners.Reasoner)
    draw = drawing(
        config.model, policy.params, length=run.num_steps, seed=parsed["seed"],
        temperature=config.temperature if parsed["temperature"] is None else parsed["temperature"],
        max_reasoning_steps=UNBOUNDED if parsed["steps"] is None else parsed["steps"],
    )  # fmt: skip
    found = optimiser.ReasoningOptimizer(made, draw, settings).solve(asked)
    if parsed["json"] != "-":
        for solution in found:
            _show(solution)
    if parsed["json"] is not None:
        printing.write_json(parsed["json"], [_plain(solution) for solution in found])
    return 0


def _show(solution: Solution) -> None:
    header = ["chain", "answer", "soundness", "log p", "right"]
    rows = [
        [chain.text, "-" if chain.answer is None else chain.answer, printing.number(chain.soundness),
         printing.number(chain.log_prob), "yes" if chain.reward == 1.0 else "no"]
        for chain in solution.chains
    ]  # fmt: skip
    print(solution.prompt)
    printing.table(header, rows)
    votes = ", ".join(f"{answer}: {count:g}" for answer, count in solution.votes.items()) or "none"
    print(f"votes: {votes}{'; settled early' if solution.settled else ''}")
    print(f"answer: {'-' if solution.answer is None else solution.answer}\n")


def _plain(solution: Solution) -> dict[str, Any]:
    """As JSON can hold it."""
    plain = solution._asdict()
    plain["chain"] = None if solution.chain is None else solution.chain._asdict()
    plain["chains"] = [chain._asdict() for chain in solution.chains]
    return plain

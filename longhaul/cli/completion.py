"""The command `completion`: scripts for bash, zsh and fish that complete commands, recipes, flags and runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longhaul.cli import flags, run_flags
from longhaul.cli.flags import DEBUG, TEXT, Flag, FlagError
from longhaul.config import recipes
from longhaul.training.run_dir import RUNS

SCRIPTS = {
    "bash": """\
_longhaul() {
  local IFS=$'\\n'
  COMPREPLY=($(longhaul completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _longhaul longhaul""",
    "zsh": """\
#compdef longhaul
_longhaul() {
  local -a found
  found=("${(@f)$(longhaul completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  compadd -a found
}
compdef _longhaul longhaul""",
    "fish": """\
complete -c longhaul -f -a '(longhaul completion --words (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'""",
}
"""Shell -> script. The last word is the one that is being written."""

OF_RUNS = ("evaluate", "render", "export", "push", "serve", "status", "doctor", "reason", "report")
"""Commands whose first word is a run."""

OF_MANY = ("compare", "rm")
"""Commands whose words are runs."""

OF_RECIPES = ("train", "doctor", "plan", "profile")
"""Commands whose first word is a recipe."""


def completion(argv: Sequence[str]) -> int:
    """`longhaul completion bash|zsh|fish`: prints the script. `--words WORD...`: prints what completes the last one."""
    if argv and argv[0] == "--words":
        print(*candidates(list(argv[1:])), sep="\n")
        return 0
    shell = Flag("SHELL", TEXT, None, "bash, zsh or fish")
    about = 'Completion of commands, recipes, flags and runs: eval "$(longhaul completion bash)" in ~/.bashrc.'
    name = flags.parse("completion", about, {"": [shell, DEBUG]}, argv).values["SHELL"]
    if name not in SCRIPTS:
        raise FlagError(f"SHELL is {name or 'not given'}; choose one of {', '.join(SCRIPTS)}")
    print(SCRIPTS[name])
    return 0


def candidates(argv: list[str]) -> list[str]:
    """Completions of the last word of a command line behind `longhaul`."""
    from longhaul.cli.main import COMMANDS

    *before, last = argv or [""]
    if before and before[-1] in ("--resume", "--init-from"):
        choices = runs()
    elif last.startswith("-"):
        choices = flags_of(before)
    elif not before:
        choices = list(dict.fromkeys(command.split()[0] for command in COMMANDS))
    elif before[0] in OF_MANY:
        choices = [name for name in runs() if name not in before]
    elif len(before) == 1:
        choices = [command.split()[1] for command in COMMANDS if command.startswith(f"{before[0]} ")]
        choices += runs() if before[0] in OF_RUNS else []
        choices += [name for name, _ in recipes.described()] if before[0] in OF_RECIPES else []
    else:
        choices = []
    return [word for word in choices if word.startswith(last)]


def flags_of(before: Sequence[str]) -> list[str]:
    """Flags of `longhaul train RECIPE`; of other commands the one that every command has."""
    if len(before) >= 2 and before[0] == "train":
        try:
            recipe = recipes.recipe(before[1])
        except ValueError:
            return ["--help"]
        table = run_flags.table(recipe)
        return ["--help", "--dry-run", "--config", "--print-config", *(
            f"--{flag.name}" for group in table.values() for flag in group
        )]  # fmt: skip
    return ["--help"]


def runs() -> list[str]:
    """Names of the runs in the folder `runs`, newest first."""
    folders = [path.parent for path in Path(RUNS).glob("*/run.json")]
    return [folder.name for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True)]

"""The command `push`: a run's policy on the hub of Hugging Face, with a model card."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from longhaul.cli import flags
from longhaul.cli.evaluate import MEMBER, STEP
from longhaul.cli.export import AVERAGE, averaged_policy
from longhaul.cli.flags import DEBUG, SWITCH, TEXT, Flag, FlagError
from longhaul.cli.run_flags import RUN, RUNS_DIR, folder_of
from longhaul.training import hub, model_card

USAGE = "longhaul push RUN hf:USER/NAME"

FLAGS = (
    RUN,
    Flag("ADDRESS", TEXT, None, "hf:USER/NAME, or hf:USER/NAME@BRANCH"),
    Flag("private", SWITCH, False, "make the repository private, where it is new"),
    Flag("message", TEXT, None, "of the commit", shown="the run's name"),
    Flag("licence", TEXT, None, "of the policy, as the hub calls it: mit, cc-by-nc-4.0, ...", aliases=("license",)),
    AVERAGE,
    STEP,
    MEMBER,
    RUNS_DIR,
    DEBUG,
)


def push(argv: Sequence[str]) -> int:
    """`longhaul push RUN hf:USER/NAME [--private] [--message TEXT] [--licence NAME] [--step N]`."""
    about = "A run's policy on the hub of Hugging Face: arrays, program, settings and a model card."
    parsed = flags.parse("push", about, {"": FLAGS}, argv).values
    folder = folder_of(parsed, USAGE)
    if parsed["ADDRESS"] is None:
        raise FlagError(f"where to? {USAGE}")
    address = hub.parse(parsed["ADDRESS"])
    hub.check_token(address)
    policy = averaged_policy(parsed, folder)
    with tempfile.TemporaryDirectory() as scratch:
        model_card.write(policy, folder, Path(scratch), address, parsed["licence"])
        message = parsed["message"] or f"Policy of run {folder.name}"
        print(hub.upload(address, Path(scratch), private=parsed["private"], message=message))
    return 0

"""Other words for settings mean the same as flags, keywords and in files; errors use the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longhaul.config import aliases, files, recipes
from longhaul.config.resolve import changed
from longhaul.runtime.errors import RunError


def test_other_words_are_the_settings_own() -> None:
    run = recipes.recipe("cartpole")
    given = aliases.canonical(run, {"learning_rate": 1e-3, "n_envs": 16, "n_steps": 8, "total_timesteps": 512})
    assert given == {"lr": 1e-3, "num_envs": 16, "num_steps": 8, "total_steps": 512}
    assert aliases.canonical(run, {"lr": 1e-3, "learning_rate": 1e-3}) == {"lr": 1e-3}
    with pytest.raises(RunError, match=r"^lr is 0\.001 and 0\.002, under two names of one setting; give one of them$"):
        aliases.canonical(run, {"lr": 1e-3, "learning_rate": 2e-3})


def test_a_word_that_is_a_setting_of_its_own_stays_one() -> None:
    sac = recipes.with_algorithm(recipes.recipe("pendulum"), "sac")
    assert "batch_size" in aliases.canonical(sac, {"batch_size": 64, "buffer_size": 100})
    assert aliases.canonical(sac, {"buffer_size": 100}) == {"replay_size": 100}


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ({"learning_rate": 1e-3, "n_envs": 16}, {"lr": 1e-3, "num_envs": 16}),
        ({"algorithm": {"learning_rate": 1e-3}}, {"lr": 1e-3}),
        ({"lr": 1e-3, "learning_rate": 2e-3}, "lr is 0.001 and 0.002, under two names of one setting"),
        ({"batch_size": 64}, "batch_size is no setting of recipe cartpole; a batch is num_envs x num_steps, of which"),
        ({"num_env": 64}, "num_env is no setting of recipe cartpole; did you mean num_envs"),
    ],
)
def test_a_file_of_settings_has_them_too(content: dict[str, Any], wanted: Any) -> None:
    run = recipes.recipe("cartpole")
    if isinstance(wanted, dict):
        assert files.read(content, run, Path("a.yaml")) == wanted
        return
    with pytest.raises(RunError, match=wanted):
        files.read(content, run, Path("a.yaml"))


def test_a_keyword_that_is_no_setting_is_answered() -> None:
    with pytest.raises(RunError, match="no setting 'batch_size'; a batch is num_envs x num_steps"):
        changed(recipes.recipe("cartpole"), {"batch_size": 64})


@pytest.mark.parametrize(
    ("words", "text", "said"),
    [
        ("--learning-rate 0", "--lr is 0.0; it must be above 0", "--learning-rate is 0.0; it must be above 0"),
        ("--learning_rate=0", "--lr is 0.0", "--learning_rate is 0.0"),
        ("--num_envs 3", "--num-envs is 3", "--num_envs is 3"),
        ("--n-envs 3 --num-envs 3", "--num-envs is 3", "--num-envs is 3"),
        ("--n_envs 3", "--num-envs-more, --num-steps", "--num-envs-more, --num-steps"),
        ("", "--lr is 0.0", "--lr is 0.0"),
    ],
)
def test_errors_name_flags_as_they_are_typed(words: str, text: str, said: str) -> None:
    assert aliases.as_typed(text, words.split()) == said

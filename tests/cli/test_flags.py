"""Words become values. Other words for a flag mean the same wherever they stand, and two that disagree are an error."""

from __future__ import annotations

from typing import Any

import pytest

from longhaul.cli import flags, run_flags

FLAGS = {"": [flags.Flag("count", flags.INT, 1, "how many", aliases=("total-count", "n"), least=1), run_flags.RUNS_DIR]}

KINDS = {
    "one": flags.Flag("one", flags.INT, 1, "a number"),
    "maybe": flags.Flag("maybe", flags.optional(flags.FLOAT), None, "a number or none"),
    "many": flags.Flag("many", flags.choice(["red", "blue"]), ("red",), "colours", many=True),
    "on": flags.Flag("on", flags.SWITCH, True, "a pair"),
    "FILE": flags.Flag("FILE", flags.PATH, None, "where"),
}


@pytest.mark.parametrize(
    ("words", "values", "given"),
    [
        ("", {}, ""),
        ("x", {"FILE": "x"}, ""),
        ("--one 5 x", {"one": 5, "FILE": "x"}, "one"),
        ("x --one=-5", {"one": -5, "FILE": "x"}, "one"),
        ("--one 1e3", {"one": 1000}, "one"),
        ("--one 1 --one 2", {"one": 2}, "one"),
        ("--maybe .5", {"maybe": 0.5}, "maybe"),
        ("--maybe -1e-3 x", {"maybe": -0.001, "FILE": "x"}, "maybe"),
        ("--many red --on x", {"many": ("red",), "FILE": "x"}, "many on"),
        ("--maybe none", {}, "maybe"),
        ("--many blue red --no-on", {"many": ("blue", "red"), "on": False}, "many on"),
        ("--on", {}, "on"),
        ("-", {"FILE": "-"}, ""),
    ],
)
def test_words_become_values(words: str, values: dict[str, Any], given: str) -> None:
    parsed = flags.parse("try", "Tries.", {"": list(KINDS.values())}, words.split())
    assert parsed.values == {name: flag.default for name, flag in KINDS.items()} | values
    assert parsed.given == set(given.split())


def test_the_nearest_names_come_first_by_their_beginning() -> None:
    names = ["--total-steps", "--num-steps", "--kl-stop"]
    assert flags.nearest("--total", names) == ["--total-steps"]
    assert flags.nearest("--num-stpes", names)[0] == "--num-steps"
    assert flags.nearest("--wandering", names) == []


@pytest.mark.parametrize("words", ["--count 7", "--total-count 7", "--total_count=7", "--n 7 --count 7", "--n=7 --n 7"])
def test_each_name_means_the_same(words: str) -> None:
    parsed = flags.parse("try", "Tries.", FLAGS, words.split())
    assert parsed.values == {"count": 7, "runs-dir": "runs"}
    assert parsed.given == {"count"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--count 7 --n 8", "--count is 7 and --n, another word for it, is 8; give one of them"),
        ("--n=8 --total-count 7", "--n is 8 and --total-count, another word for it, is 7; give one of them"),
        ("--total_count x", "--total_count is 'x'; it must be a whole number"),
        ("--total-count", "--total-count has no value; it must be a whole number"),
        ("--count=", "--count has no value; it must be a whole number"),
        ("--count 0", "--count is 0; it must be at least 1"),
        ("x", "'x' is one word too many; see longhaul try --help"),
        ("count=3", "'count=3' is one word too many; write --count 3"),
        ("trial.total_count=3", "'trial.total_count=3' is one word too many; write --count 3"),
        ("--trial.count 3", "longhaul try has no flag --trial.count; did you mean --count"),
        ("--total_cuont 3", "longhaul try has no flag --total_cuont; did you mean --total-count"),
        ("--other_name 3", "longhaul try has no flag --other_name; give --count"),
    ],
)
def test_wrong_words_are_one_line_with_a_remedy(words: str, message: str) -> None:
    with pytest.raises(flags.FlagError) as raised:
        flags.parse("try", "Tries.", FLAGS, words.split(), answers={"other-name": "give --count"})
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)

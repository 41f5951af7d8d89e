"""Lines of errors."""

from __future__ import annotations

import pytest

from longhaul.runtime.errors import first_line, last_line, one_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("shape (3,) is not (4,)\ndetails follow"), "shape (3,) is not (4,)"),
        (OSError("\n\n  no space  \n"), "no space"),
        (EOFError(), "EOFError"),  # as zipfile and NumPy raise it
        (MemoryError("  \n"), "MemoryError"),
    ],
)
def test_the_first_line_of_an_error_is_its_text_or_its_kind(error: Exception, line: str) -> None:
    assert first_line(error) == line


def test_one_line_joins_all_and_is_cut() -> None:
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(ValueError("x" * 300)) == "x" * 200
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_the_last_line_of_a_failed_program_is_that_of_its_traceback() -> None:
    assert last_line("Traceback (most recent call last):\n  File ...\nValueError: no\n\n") == "ValueError: no"
    note = f"{'-' * 20}\nFor simplicity, JAX has removed its internal frames from the traceback of the following ...\n"
    assert last_line(f"Traceback (most recent call last):\n  File ...\nValueError: no\n{note}") == "ValueError: no"
    assert last_line(" \n") == "it said nothing"
    assert last_line("x" * 300) == "x" * 200

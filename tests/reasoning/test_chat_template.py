"""Chat templates as strangers' programs: what they may take, and one line where they fail."""

from __future__ import annotations

import pytest

from longhaul.reasoning import chat_template
from longhaul.runtime import worker_pool

ASKED = [{"role": "user", "content": "2 + 3?"}]


def test_a_template_is_filled_in() -> None:
    source = "{{ bos_token }}{% for turn in messages %}[{{ turn.role }}] {{ turn.content }}{% endfor %}"
    assert chat_template.fill(source, {"bos_token": "<s>"}, ASKED) == "<s>[user] 2 + 3?"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        pytest.param(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 512 MB or 2 s",
            marks=pytest.mark.slow,
        ),
        ("{{ 'a' * 999999999 }}", "more than 512 MB or 2 s"),
        ("(" * 9 + "{{ " + "(" * 50_000, "."),
        ("{{ ().__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)  # fmt: skip
def test_a_hostile_template_is_one_line(source: str, words: str) -> None:
    """In a worker, as limits hold where JAX is not loaded."""
    with worker_pool.ending(worker_pool.pool(1)) as pool, pytest.raises(ValueError, match=words) as raised:
        pool.submit(chat_template.fill, source, {}, ASKED).result()
    assert "\n" not in str(raised.value)

"""Descriptions of settings: their bounds are kept, and nested configs are walked with their prefixes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from longhaul.runtime.config_fields import check as checked
from longhaul.runtime.config_fields import nested, replaced, setting, values
from longhaul.runtime.config_fields import walk as walked
from longhaul.runtime.errors import FieldError


@dataclass(frozen=True)
class Inner:
    share: float = setting(0.5, "of all", least=0, most=1)
    colour: str = setting("red", "of it", choices=("red", "blue"))


@dataclass(frozen=True)
class Outer:
    count: int | None = setting(3, "how many", least=1, why=": fewer are none")
    rate: float = setting(1.0, "how fast", above=0, flag="speed")
    noise: tuple[float, ...] = setting((0.0, 1.0), "deviations", least=0)
    inner: Inner = nested(Inner(), "inner_")
    other: Inner = nested(Inner(0.25), "other_", without=("share",))
    hidden: int = 0


def test_nested_fields_have_their_prefix_and_undescribed_ones_are_left_out() -> None:
    leaves = {leaf.name: (leaf.path, leaf.value, leaf.owner) for leaf in walked(Outer(count=None))}
    assert leaves == {
        "count": (("count",), None, Outer),
        "speed": (("rate",), 1.0, Outer),
        "noise": (("noise",), (0.0, 1.0), Outer),
        "inner_share": (("inner", "share"), 0.5, Inner),
        "inner_colour": (("inner", "colour"), "red", Inner),
        "other_colour": (("other", "colour"), "red", Inner),
    }


def test_values_are_replaced_at_any_depth_by_the_names_of_their_flags() -> None:
    changed = replaced(Outer(), speed=2.0, inner_share=0.75)
    assert changed == Outer(rate=2.0, inner=Inner(0.75))
    assert {name: value for name, value in values(changed).items() if value != values(Outer())[name]} == {
        "speed": 2.0, "inner_share": 0.75,
    }  # fmt: skip
    with pytest.raises(KeyError):
        replaced(Outer(), other_share=0.5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Outer(count=0), "count is 0; it must be at least 1: fewer are none"),
        (Outer(rate=0.0), "speed is 0.0; it must be above 0"),
        (Outer(rate=math.inf), "speed is inf; it must be finite"),
        (Outer(noise=(0.0, -1.0)), "noise is -1.0; it must be at least 0"),
        (Outer(inner=Inner(share=1.5)), "inner_share is 1.5; it must lie in 0 to 1"),
        (Outer(inner=Inner(share=math.nan)), "inner_share is nan; it must be finite"),
        (Outer(other=Inner(0.5)), "share is 0.5; Outer takes 0.25 alone"),
        (Outer(inner=Inner(colour="green")), "inner_colour is 'green'; it must be one of red, blue"),
    ],
)
def test_a_value_out_of_bounds_is_named_with_its_bound(config: Any, message: str) -> None:
    checked(Outer(count=None))
    with pytest.raises(FieldError) as raised:
        checked(config)
    assert str(raised.value) == message
    assert (
        str(raised.value.of_flag())
        == "--" + message.partition(" ")[0].replace("_", "-") + message[message.index(" ") :]
    )

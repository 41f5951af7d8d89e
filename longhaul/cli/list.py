"""The commands `recipes` and `envs`."""

from __future__ import annotations

from collections.abc import Sequence

from longhaul.cli import flags, tables
from longhaul.cli.flags import DEBUG, TEXT, Flag
from longhaul.config import recipes


def show_recipes(words: Sequence[str]) -> int:
    """`longhaul recipes`."""
    flags.parse("recipes", "The recipes of longhaul train.", {"": [DEBUG]}, words)
    tables.listing(recipes.described())
    return 0


def show_envs(words: Sequence[str]) -> int:
    """`longhaul envs [SUITE]`."""
    from longhaul.envs import registry, suites
    from longhaul.envs.host import registry as host_registry

    suite = Flag("SUITE", TEXT, None, "list all environments of this suite", shown="")
    asked = flags.parse(
        "envs", "The environments of longhaul train ppo --env NAME.", {"": [suite, DEBUG]}, words
    ).values
    if asked["SUITE"] is not None:
        for name in suites.names(asked["SUITE"]):
            print(name)
        return 0
    tables.listing([*registry.names(), ("driving", "the recipe driving: generated scenarios, or logs by --data")])
    print("\nOf other libraries, on the device:")
    tables.listing(suites.rows())
    print("\nOn the host, for actors:")
    tables.listing(host_registry.names())
    return 0

"""`longhaul actor`: environments on this machine for a run's inference server on another. Starts without JAX."""

from __future__ import annotations

from collections.abc import Sequence

from longhaul.cli import flags, tables
from longhaul.cli.flags import DEBUG, FLOAT, INT, PATH, TEXT, Flag, FlagError
from longhaul.envs.host import registry
from longhaul.runtime import credentials
from longhaul.runtime.errors import FAILED
from longhaul.topologies.inference_server import actor as client
from longhaul.topologies.inference_server.config import check_installed
from longhaul.topologies.inference_server.wire import ANY, WireError

ABOUT = "Steps environments for a run elsewhere: longhaul train ... --topology central --lane grpc --bind HOST:PORT."

FLAGS = [
    Flag("connect", TEXT, None, "HOST:PORT of the run's server"),
    Flag("env", TEXT, None, "the run's environment: its --env"),
    Flag("worlds", INT, None, "worlds of a group: the run's num-envs over actors and slots; the run says it", least=1),
    Flag("slots", INT, 2, "groups of worlds: the run's --slots", least=1),
    Flag("number", INT, None, "which of the run's actors this is", shown="one that is missing"),
    Flag("token-file", flags.optional(PATH), None, "a file with the run's token"),
    Flag("tls-ca", flags.optional(PATH), None, "the certificate (PEM) by which to know the server"),
    Flag("patience", FLOAT, client.PATIENCE, "seconds to look for the server, again and again, before giving up"),
]


def actor(argv: Sequence[str]) -> int:
    """The command. It ends when the server is away for longer than its patience."""
    values = flags.parse("actor", ABOUT, {"": [*FLAGS, DEBUG]}, argv).values
    for name in ("connect", "env", "worlds"):
        if values[name] is None:
            raise FlagError(f"--{name} is missing; longhaul actor --connect HOST:PORT --env NAME --worlds N")
    check_installed()
    credentials.split(values["connect"])
    name = values["env"]
    description = registry.describe(name if name.partition("/")[0] in registry.KINDS else f"jax/{name}")
    held = credentials.load(values["token-file"], tls_ca=values["tls-ca"])
    number = ANY if values["number"] is None else values["number"]
    tables.progress(f"{description} for {values['connect']}")
    client.prepare(description)
    try:
        client.remote(
            values["connect"], description, values["worlds"], values["slots"], actor=number, credentials=held,
            patience=values["patience"],
        )  # fmt: skip
    except WireError as error:
        raise FlagError(str(error)) from error
    except ConnectionError as error:
        return tables.say(str(error), FAILED)
    return 0

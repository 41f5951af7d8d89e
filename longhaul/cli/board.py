"""The command `board`: a web page of the runs in a folder, which lives while they train. Without JAX."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from longhaul.cli import flags, tables
from longhaul.cli.flags import DEBUG, INT, PATH, TEXT, Flag, FlagError
from longhaul.runtime import credentials, object_store

FLAGS = (
    Flag("FOLDER", PATH, "runs", "the folder of runs, or a store's address"),
    Flag("host", TEXT, "127.0.0.1", "the address to listen at; beyond loopback, pages need a token"),
    Flag("port", INT, 8008, "the port to listen at; 0 finds a free one", least=0, most=65535),
    Flag("token-file", flags.optional(PATH), None, "a file with the token to ask for", shown="a new one, if needed"),
    DEBUG,
)


def board(argv: Sequence[str]) -> int:
    """`longhaul board [FOLDER]`."""
    values = flags.parse("board", "A web page of the runs in a folder.", {"": FLAGS}, argv).values
    try:
        import uvicorn  # noqa: F401

        from longhaul.training import board
    except ImportError as error:
        raise FlagError(f"the board needs {error.name}: pip install 'longhaul-rl[board]'") from error
    host, port, folder = values["host"], values["port"], values["FOLDER"]
    if object_store.address(folder) is None and not Path(folder).is_dir():
        raise FlagError(f"there is no folder {folder}; give the folder of runs, which train has as --runs-dir")
    token = credentials.load(values["token-file"]).token
    if token is None and host not in board.LOOPBACK:
        token = secrets.token_urlsafe(16)
    app = board.application(folder, token)
    listener = bound(host, port)
    name = f"[{host}]" if listener.family == socket.AF_INET6 else host
    query = f"?token={token}" if token else ""
    print(f"http://{name}:{listener.getsockname()[1]}/{query}", flush=True)
    tables.progress(f"shows the runs in {folder}; Ctrl-C ends it")
    with contextlib.suppress(KeyboardInterrupt):
        board.server(app).run(sockets=[listener])
    return 0


def bound(host: str, port: int) -> socket.socket:
    """Socket at the address, which does not listen yet. Raises FlagError where the address is taken or unknown."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise FlagError(f"--host {host} --port {port}: {error.strerror}; give another, 0 finds a free port") from error
    return listener

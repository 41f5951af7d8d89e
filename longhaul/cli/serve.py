"""The command `serve`: a run's policy behind HTTP, with weights that follow the run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from longhaul.cli import flags, tables
from longhaul.cli.board import bound
from longhaul.cli.evaluate import MEMBER, STEP
from longhaul.cli.flags import DEBUG, FLOAT, INT, PATH, TEXT, Flag, FlagError
from longhaul.cli.run_flags import RUN, RUNS_DIR
from longhaul.reasoning.config import Reasoning
from longhaul.runtime import credentials, files
from longhaul.runtime.credentials import Credentials
from longhaul.training import board, language_model
from longhaul.training.api import Policy
from longhaul.training.checkpoint.resume import restore_policy
from longhaul.training.run_dir import find_folder
from longhaul.training.serving import actions, completions, connections, http, live_weights
from longhaul.training.serving.completions import Limits

MOST_TOKENS = 512
"""Most tokens of a prompt, or of a completion, by default."""

BACKLOG = 2048
"""Connections that wait to be accepted, at most."""

FLAGS = (
    RUN._replace(help="a run's name or folder; or the folder of a language model in Hugging Face's files"),
    MEMBER,
    STEP,
    Flag("host", TEXT, "127.0.0.1", "the address to listen at; beyond loopback only with TLS, and a token or --tls-ca"),
    Flag("port", INT, 8009, "the port to listen at; 0 finds a free one", least=0, most=65535),
    Flag("token-file", flags.optional(PATH), None, "a file with the token to ask for", shown="LONGHAUL_TOKEN, if set"),
    Flag("tls-cert", flags.optional(PATH), None, "the server's certificate, PEM"),
    Flag("tls-key", flags.optional(PATH), None, "its key, PEM"),
    Flag("tls-ca", flags.optional(PATH), None, "certificates, PEM, that a client's must be signed by (mutual TLS)"),
    Flag("follow", flags.optional(TEXT), None, "serve newer weights as they come: run (the run's versions or "
         "checkpoints), or an address that it publishes at"),
    Flag("follow-token-file", flags.optional(PATH), None, "a file with the token of that address"),
    Flag("rows", INT, 64, "completions that are decoded together, or observations of a batch", least=1, most=4096),
    Flag("prompt-tokens", INT, None, "most tokens of a prompt", least=1, shown="half the context, at most 512"),
    Flag("max-tokens", INT, None, "most tokens of a completion", least=1, shown="the run's, or as of a prompt"),
    Flag("queue", INT, 512, "completions or observations that may wait; others are answered 429", least=1),
    Flag("programs", INT, completions.PROGRAMS, "compiled programs of a language model that are kept", least=4),
    Flag("deadline", FLOAT, 60.0, "seconds until a request is answered 504", least=0.1, most=86_400),
    Flag("body-kb", INT, 1024, "most kilobytes of a request's body", least=1, most=1 << 20),
    Flag("connections", INT, connections.MOST, "most connections at once", least=1, most=65_535),
    Flag("grace", FLOAT, 30.0, "seconds that requests under way have to end after SIGTERM or Ctrl-C", least=0),
    RUNS_DIR,
    DEBUG,
)  # fmt: skip

ANSWERS = {
    "model": "the run, or the model's folder, is the first word: longhaul serve RUN",
    "api-key": "the token to ask for is in --token-file FILE or in LONGHAUL_TOKEN",
}
"""Flags of other servers -> what to give."""


def serve(argv: Sequence[str]) -> int:
    """`longhaul serve RUN`."""
    values = flags.parse("serve", "A run's policy behind HTTP.", {"": FLAGS}, argv, answers=ANSWERS).values
    try:
        import uvicorn
    except ImportError as error:
        raise FlagError(f"serve needs {error.name}: pip install 'longhaul-rl[board]'") from error
    known = _credentials(values)
    if values["RUN"] is None:
        raise FlagError("which run? longhaul serve RUN")
    listener = bound(values["host"], values["port"])
    try:
        bounds = http.Bounds(values["body-kb"] << 10, values["deadline"])
        name, answers, follow = _served(values, bounds)
        with contextlib.ExitStack() as closed:
            closed.callback(answers.engine.queue.close)
            if values["follow"] is not None:
                closed.callback(follow(answers.engine.offer).close)
            hosts = board.LOOPBACK if known.token is None and credentials.is_loopback(values["host"]) else ()
            app = http.application(answers, known.token, hosts, bounds, {"model": name})
            config = uvicorn.Config(
                app, log_config=None, log_level="error", access_log=False, lifespan="off", ws="none",
                http=connections.protocol(values["connections"]), server_header=False,
                timeout_graceful_shutdown=max(1, int(values["grace"])), ssl_certfile=values["tls-cert"],
                ssl_keyfile=values["tls-key"], ssl_ca_certs=values["tls-ca"],
                ssl_cert_reqs=ssl.CERT_REQUIRED if values["tls-ca"] else ssl.CERT_NONE,
            )  # fmt: skip
            _run(uvicorn.Server(config), listener, values)
    finally:
        listener.close()
    return 0


def _credentials(values: Mapping[str, Any]) -> Credentials:
    """Token and TLS. Raises FlagError where the address may not be listened at without more of them."""
    given = (values["token-file"], values["tls-cert"], values["tls-key"], values["tls-ca"])
    known = credentials.load(*given, environment=True)
    if values["tls-ca"] is not None and values["tls-cert"] is None:
        raise FlagError("--tls-ca needs the server's own certificate; give --tls-cert and --tls-key")
    if not credentials.is_loopback(values["host"]):
        lacking = [] if known.certificate else ["--tls-cert and --tls-key"]
        lacking += [] if known.token or known.authority else ["--token-file or --tls-ca"]
        if lacking:
            raise FlagError(
                f"--host is {values['host']}, which other machines can reach: give {' and '.join(lacking)}, "
                "or listen at 127.0.0.1"
            )
    return known


Follow = Callable[[live_weights.Take], Any]


def _served(values: Mapping[str, Any], bounds: http.Bounds) -> tuple[str, http.Texts | http.Actions, Follow]:
    """(name, answers, function that begins to follow newer weights) of the run or model that is named."""
    path = Path(values["RUN"])
    if language_model.is_model_folder(path):
        return _model_texts(path, values, bounds)
    folder = find_folder(Path(values["runs-dir"]), values["RUN"])
    follow = _follower(values, folder)
    steps = files.checkpoint_steps(folder)
    version = str(steps[-1] if steps else 0) if values["step"] is None else str(values["step"])
    if values["follow"] is not None and (values["member"], values["step"]) != (None, None):
        raise FlagError("--follow serves the newest weights of a single run; leave --member and --step out")
    run, params, _ = restore_policy(folder, values["member"], values["step"])
    if not isinstance(run.environment, Reasoning):
        policy = Policy(run, params)
        engine = actions.Engine(policy, values["rows"], values["queue"], version)
        return folder.name, http.Actions(engine, bounds), follow(live_weights.like(params))
    algorithm: Any = run.algorithm
    texts = _texts(language_model.of_run(folder.name, run, params.params), values, bounds, version)
    return folder.name, texts, follow(live_weights.language_model(algorithm.model, params.params))


def _model_texts(folder: Path, values: Mapping[str, Any], bounds: http.Bounds) -> tuple[str, http.Texts, Follow]:
    """Answers of a language model in Hugging Face's files, which belongs to no run."""
    follow = _follower(values, folder)
    opened = language_model.of_files(folder)
    texts = _texts(opened, values, bounds, "0")
    return opened.name, texts, follow(live_weights.language_model(opened.config, opened.params))


def _texts(opened: language_model.Opened, values: Mapping[str, Any], bounds: http.Bounds, version: str) -> http.Texts:
    """Answers of a language model, from an engine that has begun."""
    limits = _limits(values, opened.config.context, opened.length)
    engine = completions.Engine(opened.config, opened.params, opened.tokeniser, limits, version)
    return http.Texts(engine, opened.tokeniser, opened.name, bounds, stop=opened.stop, chat=opened.chat)


def _follower(values: Mapping[str, Any], folder: Path) -> Callable[[Callable[[Any], Any]], Follow]:
    """Function from the conversion of weights to the one that begins to follow newer weights, of --follow's address."""
    where, token = "", None
    if values["follow"] is not None:
        token = credentials.load(token_file=values["follow-token-file"], environment=True).token
        where = live_weights.address(values["follow"], folder)
        live_weights.check_reachable(where, token)
    return lambda convert: lambda take: live_weights.follow(where, token, convert, take, tables.progress)


def _limits(values: Mapping[str, Any], context: int, length: int | None) -> Limits:
    usual = max(1, min(context // 2, MOST_TOKENS))
    prompt, tokens = values["prompt-tokens"] or usual, values["max-tokens"] or length or usual
    if prompt + tokens > context:
        raise FlagError(
            f"--prompt-tokens {prompt} and --max-tokens {tokens} are more than the model's context of {context}; "
            "give fewer"
        )
    return Limits(prompt, tokens, values["rows"], values["queue"], values["programs"])


def _run(server: Any, listener: socket.socket, values: Mapping[str, Any]) -> None:
    """Serves until SIGTERM or Ctrl-C, and lets requests under way end."""
    host, scheme = values["host"], "https" if values["tls-cert"] else "http"
    name = f"[{host}]" if ":" in host else host
    listener.listen(BACKLOG)  # who reads the address may connect
    print(f"{scheme}://{name}:{listener.getsockname()[1]}", flush=True)
    tables.progress("serves; Ctrl-C ends it")
    if threading.current_thread() is threading.main_thread():  # uvicorn raises the signal again at its end
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
    with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=connections.Loop) as runner:
        runner.run(server.serve(sockets=[listener]))

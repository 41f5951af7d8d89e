"""Stand-in for the hub of Hugging Face: the HTTP requests that its library makes to push and to download a model.

Safetensors and programs go by git LFS, as on the real one; other files stand in the commit. It keeps every byte that it
was given.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_of_the_test"


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, tuple[bytes, bool]]] = field(default_factory=dict)  # commit -> path -> content, LFS
    messages: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        return list(self.commits)[-1]


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.address = f"http://127.0.0.1:{self.server_port}"


class Refusal(Exception):
    def __init__(self, status: int, code: str) -> None:
        self.status, self.code = status, code


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        self.server.requests.append(f"{self.command} {self.path}")

    def answer(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            for method, pattern, function in ROUTES:
                found = re.fullmatch(pattern, self.path.partition("?")[0])
                if found and self.command in method:
                    return function(self, body, *found.groups())
            raise Refusal(404, "EntryNotFound")
        except Refusal as refusal:
            self.answer(b'{"error": "refused"}', refusal.status, X_Error_Code=refusal.code)

    do_GET = do_POST = do_PUT = do_HEAD = handle_request

    def signed_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def tell(self, value: Any, status: int = 200) -> None:
        self.answer(json.dumps(value).encode(), status, Content_Type="application/json")

    def repository(self, name: str, *, write: bool = False) -> Repository:
        found = self.server.repositories.get(name)
        if found is None or (found.private and not self.signed_in()):
            raise Refusal(404 if self.signed_in() else 401, "RepoNotFound")
        if write and not self.signed_in():
            raise Refusal(401, "")
        return found

    def commit_of(self, name: str, revision: str | None) -> tuple[str, dict[str, tuple[bytes, bool]]]:
        repository = self.repository(name)
        commit = repository.head if revision in (None, "main") else revision
        if commit not in repository.commits:
            raise Refusal(404, "RevisionNotFound")
        return commit, repository.commits[commit]

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        if not self.signed_in():
            raise Refusal(401, "")
        name = f"{asked['organization']}/{asked['name']}"
        there = name in self.server.repositories
        if not there:
            self.server.repositories[name] = Repository(asked.get("visibility") == "private")
        self.tell({"url": f"{self.server.address}/{name}", "name": name}, 409 if there else 200)

    def validate(self, body: bytes) -> None:
        _, front, _ = json.loads(body)["content"].split("---\n", 2)
        self.tell({"errors": [] if isinstance(yaml.safe_load(front), dict) else ["none"], "warnings": []})

    def preupload(self, body: bytes, name: str) -> None:
        self.repository(name, write=True)
        modes, large = {True: "lfs", False: "regular"}, (".safetensors", ".onnx", ".jax")
        files = [each["path"] for each in json.loads(body)["files"]]
        self.tell(
            {"files": [{"path": p, "uploadMode": modes[p.endswith(large)], "shouldIgnore": False}
                       for p in files]}
        )  # fmt: skip

    def batch(self, body: bytes, name: str) -> None:
        self.repository(name, write=True)
        asked = json.loads(body)["objects"]
        objects = [
            each | {"actions": {"upload": {"href": f"{self.server.address}/lfs/{each['oid']}"}}} for each in asked
        ]
        self.tell({"transfer": "basic", "objects": objects})

    def put(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.objects[oid] = body
        self.answer(b"")

    def commit(self, body: bytes, name: str) -> None:
        repository = self.repository(name, write=True)
        lines = [json.loads(line) for line in body.splitlines()]
        files = dict(repository.commits[repository.head]) if repository.commits else {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"]), False
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]], True
            else:
                repository.messages.append(value["summary"])
        commit = hashlib.sha1(body).hexdigest()
        repository.commits[commit] = files
        self.tell({"commitUrl": f"{self.server.address}/{name}/commit/{commit}", "commitOid": commit})

    def about(self, body: bytes, name: str, revision: str | None) -> None:
        commit, files = self.commit_of(name, revision)
        self.tell({"id": name, "sha": commit, "siblings": [{"rfilename": path} for path in files]})

    def tree(self, body: bytes, name: str, revision: str) -> None:
        _, files = self.commit_of(name, revision)
        rows = []
        for path, (content, large) in files.items():
            lfs = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            row = {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            rows.append(row | ({"lfs": lfs} if large else {}))
        self.tell(rows)

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        commit, files = self.commit_of(name, revision)
        if path not in files:
            raise Refusal(404, "EntryNotFound")
        content, large = files[path]
        tag = (hashlib.sha256 if large else hashlib.sha1)(content).hexdigest()
        linked = {"X_Linked_Etag": f'"{tag}"', "X_Linked_Size": str(len(content))} if large else {}
        self.answer(content, X_Repo_Commit=commit, ETag=f'"{tag}"', **linked)


NAME = r"([\w.-]+/[\w.-]+)"

ROUTES: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate),
    ("POST", rf"/api/models/{NAME}/preupload/main", Handler.preupload),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", Handler.batch),
    ("POST", rf"/api/models/{NAME}/commit/main", Handler.commit),
    ("GET", rf"/api/models/{NAME}(?:/revision/([^/]+))?", Handler.about),
    ("GET", rf"/api/models/{NAME}/tree/([^/]+)", Handler.tree),
    ("GET HEAD", rf"/{NAME}/resolve/([^/]+)/(.+)", Handler.resolve),
    ("PUT", r"/lfs/(\w+)", Handler.put),
)


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()

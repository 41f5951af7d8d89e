"""Azure's blob store on this machine: Azurite, the publisher's own emulator (npm install azurite)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

from tests.helpers.weight_sync_transports import free_address

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Name and key that each Azurite has; they are public."""


@contextmanager
def serving(command: str, bucket: str, folder: Path) -> Iterator[dict[str, str]]:
    """Environment of the clients of a server with an empty container; `command` is Azurite's program."""
    address = free_address()
    words = [command, "--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry"]
    words += ["--blobHost", "127.0.0.1", "--blobPort", address.rpartition(":")[2]]
    with open(folder / "azurite.log", "wb") as log:
        process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log)
    try:
        _make(f"http://{address}/{ACCOUNT}", bucket)
        yield {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": f"http://{address}"}
    finally:
        process.kill()
        process.wait()


def _make(url: str, bucket: str) -> None:
    """Make a container by a signed request, once the server is there."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items())]
    text = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/{bucket}", "restype:container"])
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
    headers |= {"Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Type": ""}
    request = urllib.request.Request(f"{url}/{bucket}?restype=container", b"", headers, method="PUT")
    deadline = time.monotonic() + 30.0
    while True:
        try:
            urllib.request.urlopen(request).close()
            return
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError) or time.monotonic() > deadline:
                raise
            time.sleep(0.1)

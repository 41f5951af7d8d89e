"""Objects of a store below an address: S3, Google Cloud Storage and Azure by obstore, any other by fsspec.

obstore takes the credentials of each cloud's usual environment variables (AWS_ENDPOINT_URL for a server of one's own).
"""

from __future__ import annotations

import datetime as dt
import difflib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from longhaul.runtime.errors import RunError, first_line

CLOUDS = ("s3", "s3a", "gs", "az", "abfs", "abfss")
"""Schemes that obstore serves."""

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS to the file of a service account's key",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""Variables that a store's credentials are read from, by scheme."""

WHOLE = 8 << 20
"""Bytes above which a file is sent in parts instead of through memory."""


def address(path: str | os.PathLike[str]) -> str | None:
    """Address of a store that `path` stands for, also where a `Path` has folded its slashes; None for a folder."""
    match = re.fullmatch(r"([a-z][a-z0-9+.-]+):(?:/+(.*?)/*)?", str(path))
    return None if match is None else f"{match[1]}://{'/' * (match[1] in ('file', 'local'))}{match[2] or ''}"


class Unreachable(OSError):
    """A store that gives no answer, or refuses; the message is one line."""


class Store:
    """Objects below an address, by name. Every method raises Unreachable, or FileNotFoundError."""

    def __init__(self, url: str) -> None:
        """RunError where the scheme is unknown or its library missing; nothing is contacted."""
        self.url = url
        self._objects: Objects = Cloud(url) if url.partition(":")[0] in CLOUDS else Fsspec(url)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of each object whose name begins with the folder `prefix`, by name.

        Those whose name as a path leads out of its folder are left out.
        """
        with self._asking():
            sizes = self._objects.sizes(prefix)
        return {name: size for name, size in sizes.items() if not {"", ".", ".."} & set(name.split("/"))}

    def has(self, name: str) -> bool:
        with self._asking():
            return self._objects.has(name)

    def put(self, name: str, path: Path, size: int) -> None:
        with self._asking():
            uploaded = self._objects.put(name, path, size)
        if uploaded < size:
            raise Unreachable(f"{self.url}/{name} has {uploaded} bytes, and {size} were sent")

    def get(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.partial")
        with self._asking():
            self._objects.get(name, beside)
        os.replace(beside, path)

    def remove(self, name: str) -> None:
        with self._asking():
            self._objects.remove(name)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Context in which a library's own error becomes Unreachable."""
        try:
            yield
        except Exception as error:  # each library has errors of its own
            if isinstance(error, RunError) or (
                isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error)
            ):
                raise
            raise Unreachable(_reason(self.url, error)) from error


class Objects(Protocol):
    """A library's objects below an address, by name. Errors are its own, and FileNotFoundError."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of each object whose name begins with the folder `prefix`."""
        ...

    def has(self, name: str) -> bool: ...

    def put(self, name: str, path: Path, size: int) -> int:
        """Bytes of the object that gets the first `size` bytes of a file, more where it has grown."""
        ...

    def get(self, name: str, path: Path) -> None: ...

    def remove(self, name: str) -> None: ...


class Cloud:
    """Objects of S3, Google Cloud Storage or Azure, by obstore."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
        except ImportError as error:
            raise RunError(f"{url} needs obstore: pip install 'longhaul-rl[stores]'") from error
        from obstore.exceptions import NotFoundError

        scheme, _, path = url.partition("://")
        if not path.split("/")[0]:
            raise RunError(f"{url} names no bucket; give {scheme}://BUCKET/FOLDER")
        self._obstore, self._missing = obstore, (FileNotFoundError, NotFoundError)
        try:
            self._store = obstore.store.from_url(
                url,
                client_options={"allow_http": True, "timeout": "60s", "connect_timeout": "5s"},
                retry_config={"max_retries": 2, "retry_timeout": dt.timedelta(seconds=20)},
            )
        except Exception as error:  # an account or a setting that is missing
            raise RunError(
                f"{url}: {first_line(error)[:200]}; set {CREDENTIALS.get(scheme, CREDENTIALS['s3'])}"
            ) from error

    def sizes(self, prefix: str) -> dict[str, int]:
        pages = self._obstore.list(self._store, prefix or None)
        return {entry["path"]: int(entry["size"]) for page in pages for entry in page}

    def has(self, name: str) -> bool:
        try:
            self._obstore.head(self._store, name)
        except self._missing:
            return False
        return True

    def put(self, name: str, path: Path, size: int) -> int:
        with open(path, "rb") as file:  # a large file goes in parts
            self._obstore.put(self._store, name, file.read(size) if size <= WHOLE else file)
        return int(self._obstore.head(self._store, name)["size"])

    def get(self, name: str, path: Path) -> None:
        try:
            with open(path, "wb") as file:
                for part in self._obstore.get(self._store, name).stream(min_chunk_size=WHOLE):
                    file.write(part)
        except self._missing as error:
            raise FileNotFoundError(name) from error

    def remove(self, name: str) -> None:
        self._obstore.delete(self._store, name)


class Fsspec:
    """Objects of any other address, by fsspec."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise RunError(f"{url} needs fsspec: pip install 'longhaul-rl[stores]'") from error
        scheme = url.partition(":")[0]
        known = sorted({*CLOUDS, *fsspec.available_protocols()})
        if scheme not in known:
            near = difflib.get_close_matches(scheme, known, n=3) or ["s3", "gs", "az"]
            raise RunError(f"{url}: no store has the scheme {scheme!r}; did you mean {' or '.join(near)}?")
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError, TypeError, OSError) as error:
            raise RunError(
                f"{url} can't be opened ({first_line(error)[:200]}); install what it needs, or give another"
            ) from error
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        self._fs.invalidate_cache()
        return f"{self._root}/{name}".rstrip("/")

    def sizes(self, prefix: str) -> dict[str, int]:
        try:
            found = self._fs.find(self._path(prefix), detail=True)
        except FileNotFoundError:  # a folder that nobody has made
            return {}
        begin = len(self._root.lstrip("/")) + 1
        return {name.lstrip("/")[begin:]: int(about["size"]) for name, about in found.items()}

    def has(self, name: str) -> bool:
        return bool(self._fs.exists(self._path(name)))

    def put(self, name: str, path: Path, size: int) -> int:
        target = self._path(name)
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        if size > WHOLE:
            self._fs.put_file(str(path), target)
        else:
            with open(path, "rb") as file:
                self._fs.pipe_file(target, file.read(size))
        return int(self._fs.info(self._path(name))["size"])

    def get(self, name: str, path: Path) -> None:
        self._fs.get_file(self._path(name), str(path))

    def remove(self, name: str) -> None:
        self._fs.rm_file(self._path(name))


def _reason(url: str, error: Exception) -> str:
    """One line on why a store did not answer, with the remedy where it is known."""
    text = str(error)
    if "NoSuchBucket" in text:
        return f"{url}: there is no such bucket; make it, or give another address"
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        scheme = url.partition("://")[0]
        return f"{url}: no credentials are set; set {CREDENTIALS.get(scheme, CREDENTIALS['s3'])}"
    if any(word in text for word in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403 Forbidden")):
        return f"{url}: the credentials that are set are refused; give others, or ask for the right to read and write"
    return f"{url} is out of reach ({first_line(error)[:200]}); see to the network and the address"

"""Addresses of policies without their run: on the hub of Hugging Face, by its own library, and in the package.

    hf:USER/NAME, hf:USER/NAME@REVISION, hf://USER/NAME
    pretrained: the driving policy that the package ships, in `driving/pretrained`

What is downloaded stays in the library's cache. Of a repository only JSON and safetensors are taken, never a pickle.
`HF_ENDPOINT` names another hub, `HF_TOKEN` the user.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import longhaul.driving
from longhaul.runtime.errors import RunError, first_line

ADDRESS = re.compile(r"hf:(?://)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.][\w./-]*))?")

POLICY = "policy.safetensors"
"""File of a policy's arrays; a folder that has it and no checkpoints is a policy without its run."""

FILES = (POLICY, "policy.json", "run.json")
"""Files that a policy is made of."""

PRETRAINED = "pretrained"
"""Address of the policy that the package ships."""

EARLY = "early"
"""Name of the other policy that it ships, a checkpoint of early training: a partner of `--cross-play`, and no
address."""

SHIPPED = {PRETRAINED: (PRETRAINED,), EARLY: (PRETRAINED, EARLY)}
"""Folders of the policies that the package ships, below `longhaul.driving`."""


class Address(NamedTuple):
    repository: str  # USER/NAME
    revision: str | None = None  # a branch, a tag or a commit; None: the newest

    def __str__(self) -> str:
        return f"hf:{self.repository}" + (f"@{self.revision}" if self.revision else "")


def is_address(word: str) -> bool:
    return word == PRETRAINED or word.startswith("hf:")


def folder_of(word: str) -> Path:
    """Folder with the files of the policy at an address, or of one that is shipped. Raises RunError, one line, where
    there is none."""
    if word not in SHIPPED:
        return download(parse(word))
    folder = Path(longhaul.driving.__file__).parent.joinpath(*SHIPPED[word])
    lacking = [name for name in FILES if not (folder / name).is_file()]
    if lacking:
        raise RunError(f"{folder} lacks {', '.join(lacking)}; install longhaul-rl again")
    return folder


def parse(word: str) -> Address:
    """Address in a word. Raises RunError where it is none."""
    match = ADDRESS.fullmatch(word)
    if match is None:
        raise RunError(f"{word!r} is no address of a policy; write hf:USER/NAME or hf:USER/NAME@REVISION")
    return Address(match[1], match[2])


def download(address: Address) -> Path:
    """Folder with the files of a policy, called like its commit; from the library's cache where it is there.

    Raises RunError, one line, where there is no such policy or no contact.
    """
    with _as_run_errors(address):
        from huggingface_hub import snapshot_download

        where = snapshot_download(
            address.repository, revision=address.revision, allow_patterns=list(FILES), endpoint=_endpoint()
        )
    folder = Path(where)
    lacking = [name for name in FILES if not (folder / name).is_file()]
    if lacking:
        raise RunError(
            f"{address} holds no policy of Longhaul: it lacks {', '.join(lacking)}; longhaul push writes one"
        )
    return folder


def pinned(word: str) -> str:
    """Address of the same policy by its commit, which never changes."""
    return word if word == PRETRAINED else str(parse(word)._replace(revision=download(parse(word)).name))


def check_token(address: Address) -> None:
    """Raises RunError where no user is signed in."""
    with _as_run_errors(address):
        from huggingface_hub import get_token

        if get_token() is None:
            raise RunError("there is no token of Hugging Face; run `hf auth login`, or set HF_TOKEN")


def upload(address: Address, folder: Path, *, private: bool, message: str) -> str:
    """Commits all files of `folder`, which are one policy, to a repository, made where there is none; -> its address on
    the web."""
    with _as_run_errors(address):
        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi(endpoint=_endpoint(), library_name="longhaul")
        url = api.create_repo(address.repository, private=private or None, exist_ok=True)
        operations = [CommitOperationAdd(file.name, file) for file in sorted(folder.iterdir())]
        api.create_commit(address.repository, operations, commit_message=message, revision=address.revision)
    return str(url)


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


@contextmanager
def _as_run_errors(address: Address) -> Iterator[None]:
    """Errors of the library and of the network as one line."""
    try:
        from huggingface_hub import errors
        from huggingface_hub.utils import disable_progress_bars
    except ImportError as error:
        raise RunError(f"{address} needs huggingface_hub; pip install 'longhaul-rl[hub]'") from error
    disable_progress_bars()
    try:
        yield
    except RunError:
        raise
    except errors.RevisionNotFoundError as error:
        raise RunError(f"{address}: there is no such revision; leave it out for the newest") from error
    except errors.RepositoryNotFoundError as error:
        raise RunError(f"{address}: there is no such repository, or your token may not see it") from error
    except errors.HFValidationError as error:
        raise RunError(
            f"{address} is no name of a repository: {first_line(error)[:200]}; write hf:USER/NAME"
        ) from error
    except errors.HfHubHTTPError as error:
        raise RunError(f"{address}: {_refusal(error)}") from error
    except RuntimeError as error:  # of an upload, with the cause behind it
        raise RunError(f"{address}: {first_line(error)} ({first_line(error.__cause__ or error)[:200]})") from error
    except (OSError, _transport_error()) as error:  # among the first: nothing in the cache, or HF_HUB_OFFLINE
        raise RunError(
            f"{address}: no contact with {_endpoint() or 'huggingface.co'}, and it is not in the cache; try again"
        ) from error


def _transport_error() -> type[Exception]:
    """Error of the HTTP client that the library uses: of httpx, or since its version 2 of httpx2."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(each for each in HfHubHTTPError.__mro__ if each.__name__ == "HTTPError")


def _refusal(error: Any) -> str:
    status = getattr(error.response, "status_code", None)
    if status in (401, 403):
        return f"your token is refused ({status}); give one that may write there: `hf auth login`, or HF_TOKEN"
    return f"the hub answers {status}: {first_line(error)[:200]}"

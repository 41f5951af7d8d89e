"""Object stores: their addresses, and errors of one line that name what to set."""

from __future__ import annotations

from pathlib import Path

import pytest

from longhaul.runtime import object_store
from longhaul.runtime.errors import RunError
from longhaul.runtime.object_store import Store, Unreachable


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3://bucket/runs", "s3://bucket/runs"),
        (Path("s3://bucket/runs/"), "s3://bucket/runs"),
        (Path("file:///tmp/runs"), "file:///tmp/runs"),
        ("s3://", "s3://"),
        ("runs", None),
        ("/tmp/runs", None),
        ("hf:user/name", None),
    ],
)
def test_an_address_of_a_store_is_told_from_a_folder(path: str | Path, url: str | None) -> None:
    assert object_store.address(path) == url


def test_a_store_without_credentials_says_which_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asks_the_cloud(name: str) -> bool:
        raise OSError("Error performing PUT http://169.254.169.254/latest/api/token")

    store = Store(f"file://{tmp_path}")
    store.url = "s3://bucket/runs"
    monkeypatch.setattr(store._objects, "has", asks_the_cloud)
    with pytest.raises(Unreachable, match="no credentials are set; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        store.has("run.json")


def test_an_account_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(RunError, match=r"Account must be specified.*; set AZURE_STORAGE_ACCOUNT_NAME and"):
        object_store.Cloud("az://box/runs")

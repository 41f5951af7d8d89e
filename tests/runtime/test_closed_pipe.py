"""Output goes on in a file once its reader has gone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from longhaul.runtime import closed_pipe


def test_output_goes_on_in_a_file_when_nobody_reads_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, writes = os.pipe()
    monkeypatch.setattr(sys, "stdout", stream := open(writes, "w"))  # noqa: SIM115
    with closed_pipe.outlasting(tmp_path):
        print("one", flush=True)
        assert os.read(reads, 10) == b"one\n"
        assert not (tmp_path / closed_pipe.OUTPUT).exists()
        os.close(reads)
        print("two", flush=True)
        print("three")
    print("four", flush=True)  # by the stream that stood there before, too
    stream.close()
    said, *others = (tmp_path / closed_pipe.OUTPUT).read_text().splitlines()
    assert said.endswith("nobody reads the output any more; the run goes on")
    assert others == ["two", "three", "four"]

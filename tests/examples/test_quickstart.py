"""The notebook of the quickstart runs in a real kernel: it trains, plots, acts and goes on, with a bar for each run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"
SOLVED = 475.0
"""Mean return from which CartPole-v1 counts as solved; it reaches 500 or a little less, by the machine's rounding."""


def outputs(notebook, kind: str) -> list[str]:  # type: ignore[no-untyped-def]
    """All outputs of a MIME type, in order."""
    return [
        output.data[kind]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if kind in output.get("data", ())
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the kernel's libraries
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    notebook = nbformat.read(NOTEBOOK, 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # stored without
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    trained, curve, score, corridor, steps = (cell.outputs for cell in notebook.cells if cell.cell_type == "code")
    assert ast.literal_eval(trained[-1].data["text/plain"])["return"] >= SOLVED
    assert "<svg" in curve[-1].data["text/html"]
    assert float(score[-1].data["text/plain"]) >= SOLVED
    assert "'length': 5." in corridor[-1].data["text/plain"]
    assert int(steps[-1].data["text/plain"]) > 190_000
    bars = [text for text in outputs(notebook, "text/html") if "<progress" in text]
    assert len(bars) == 3 and all('value="1.0000"' in bar and "agent steps" in bar for bar in bars)
    assert len(list((tmp_path / "runs").iterdir())) == 2

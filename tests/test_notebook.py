"""The notebook of docs runs in a Jupyter kernel, as it stands but for the number of steps."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.monitor import load_run

nbformat = pytest.importorskip("nbformat")
NotebookClient = pytest.importorskip("nbclient").NotebookClient
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[1]
PATH = ROOT / "docs" / "notebooks" / "train.ipynb"
STEPS = 40


def test_the_file_is_as_jupyter_writes_it_and_has_no_outputs():
    book = nbformat.read(PATH, as_version=nbformat.NO_CONVERT)
    nbformat.validate(book)
    assert PATH.read_text() == nbformat.writes(book) + "\n"
    assert book.metadata.kernelspec.name == "python3"
    assert book.metadata.language_info == {"name": "python"}
    assert all(re.fullmatch("[a-z]+", cell.id) for cell in book.cells)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [(cell.execution_count, cell.outputs) for cell in code] == [(None, [])] * len(code)
    assert not any(cell.metadata for cell in book.cells)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Return what each cell shows, by its id, and the folder that the notebook ran in."""
    folder = tmp_path_factory.mktemp("notebook")
    book = nbformat.read(PATH, as_version=nbformat.NO_CONVERT)
    task = next(cell for cell in book.cells if cell.id == "task")
    task.source, found = re.subn(r"^STEPS = \d+$", f"STEPS = {STEPS}", task.source, flags=re.M)
    assert found == 1
    environment = os.environ | {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(folder / ".ipython")}
    client = NotebookClient(book, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    return {cell.id: cell.get("outputs", []) for cell in book.cells}, folder


def shown(outputs: list[Any], kind: str = "text/html") -> str:
    return "\n".join(part.data.get(kind, "") for part in outputs if "data" in part)


def printed(outputs: list[Any], name: str = "stdout") -> str:
    return "".join(part.text for part in outputs if part.get("name") == name)


@pytest.mark.long
def test_both_runs_learn_and_every_cell_shows_what_it_is_for(ran):
    outputs, folder = ran
    for name in ("dapo", "soft_clip"):
        run = load_run(folder / "runs" / name)
        first, last = (row["eval_reward"] for row in run.history if "eval_reward" in row)
        assert last > first + 0.25
        assert run.recipe["loss_type"] == run.settings["loss_type"] == name
    assert run.recipe["loss_source"] == "this notebook"
    assert run.settings["loss_kwargs"] == {"width": 0.3}
    warned = [name for name, parts in outputs.items() if printed(parts, "stderr")]
    assert set(warned) <= {"task"}  # tqdm warns there, without ipywidgets
    table = shown(outputs["train"])
    assert "<th>reward</th>" in table and f"<td>{STEPS}</td>" in table and "None" not in table
    compared = shown(outputs["completions"])
    assert ">before</th>" in compared and ">after</th>" in compared
    assert "&lt;h1&gt;dapo&lt;/h1&gt;" in shown(outputs["report"])
    assert "&lt;h1&gt;dapo / soft_clip&lt;/h1&gt;" in shown(outputs["own"])
    said = printed(outputs["explain"])
    assert re.search(r"^schedule  one_pass", said, re.M)
    assert re.search(r"^ours, one_pass .* GiB .* fits\r?$", said, re.M)

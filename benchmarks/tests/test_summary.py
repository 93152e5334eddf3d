"""What ``pytest benchmarks/ --benchmark-only`` says: how long it takes, and one table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.providers import PROVIDERS
from benchmarks.tables.summary import summary
from benchmarks.tests.stored import ERRORS, device, memory, row, rows, run, table

_SHOWN = """\
            fp32:time  x bare   MiB  loss  grad  bf16:time  x bare  MiB  loss  grad
bare-gemms     2.00 s    1.00   150                 500 ms    1.00
ours           2.20 s    1.10   200  1e-9  9e-7      wrong               3e-1
ours-input                                          600 ms    1.20   77  1e-9  9e-7
eager          2.60 s    1.30  1300  1e-9  9e-7
trl            4.00 s    2.00  1000  1e-9  9e-7
cce             wrong                      2e-1
"""


def test_one_table_has_time_memory_and_errors_by_provider(tmp_path: Path) -> None:
    same = "the same as ours: nothing is rounded"
    narrow = [
        row("bare-gemms", [0.5]),
        row("ours", failure="error of loss 3e-1; allowed 5e-2", errors={"loss": 0.3}),
        row("ours-input", [0.6], errors=ERRORS, memory=memory(77)),
        row("quack", absent="needs a GPU"),
    ]
    cases = [table([*rows(), row("ours-input", unable=same)]), table(narrow, dtype="bf16")]
    said = summary(device(tmp_path, run(cases)).tables)
    assert _SHOWN in said
    flat = " ".join(said.split())
    assert "T = 1024; Test CPU, 2 threads" in flat and "errors against float64" in flat
    assert "Not here: quack (needs a GPU). Not able: liger in fp32 (no softcap); ours-in" in flat
    assert "Wrong: cce in fp32 (error of dweight 2e-1; a|b); ours in bf16 (error of loss" in flat
    assert max(map(len, said.splitlines())) <= 100


def _benchmarks(*words: str, path: Path = ROOT) -> list[str]:
    """Return the lines of ``pytest benchmarks/ --benchmark-only``."""
    command = [sys.executable, "-m", "pytest", "benchmarks/", "--benchmark-only", *words]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    options = ["-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def test_without_options_the_heads_are_measured() -> None:
    """Of ours the defaults, and every peer."""
    tests = [line for line in _benchmarks("--collect-only") if "::" in line]
    assert all(line.startswith("benchmarks/test_heads.py::test_head[dapo-") for line in tests)
    left_out = {"ours-one-pass", "ours-two-pass", "ours-chunked", "ours-reference"}
    assert len(tests) == 2 * len(PROVIDERS.keys() - left_out)


def test_one_table_is_all_that_is_printed(tmp_path: Path) -> None:
    """How long it takes is said before it begins."""
    (tmp_path / "tiny.py").write_text(
        "from benchmarks.suites import SUITES, entry\n"
        "SUITES['quick'] = lambda: [entry('dapo', 'tiny', 32, 'fp32')]\n"
    )
    lines = _benchmarks("-p", "tiny", "-k", "bare-gemms or ours or cce", path=tmp_path)
    assert all(word in " ".join(lines[:3]) for word in ("five minutes", "--full", "--results"))
    starts = [line.split()[0] for line in lines if line.strip()]
    assert starts.index("bare-gemms") + 1 == starts.index("ours") and "Not" in starts
    assert max(map(len, lines)) <= 100 and not any("Rounds" in line for line in lines)

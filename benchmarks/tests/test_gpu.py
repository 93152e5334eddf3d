"""``make gpu`` outlives steps that fail or hang, and says in one screen what there is."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.environment import ROOT
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import job as jobs
from benchmarks.gpu import plan, steps
from benchmarks.gpu.job import Job, Step, finish, summary
from benchmarks.gpu.plan import PARTS
from benchmarks.gpu.steps import install_wheels, run_part, run_tests


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(jobs, "_GRACE", 0.5)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    log = tmp_path / "log.txt"
    return Job(out=tmp_path, log=log, scratch=scratch, end=time.monotonic() + 300)


def test_a_step_is_noted_with_its_last_line(job: Job) -> None:
    job.step("good", ["-c", "print('one'); print('größer')"], 60)
    job.step("bad", ["-c", "import sys; print('that is why'); sys.exit(3)"], 60)
    assert [(x.state, x.note) for x in job.steps] == [("ok", "größer"), ("failed", "that is why")]
    assert job.log.read_text() == "one\ngrößer\nthat is why\n"


def interrupt_once(monkeypatch: pytest.MonkeyPatch, ready: Callable[[], bool]) -> None:
    """Let the time of the next process be up as soon as it is ready."""

    def until_ready(process: subprocess.Popen[bytes], limit: float) -> int | None:
        while not ready():
            time.sleep(0.02)
        return finish(process, 0.0)

    monkeypatch.setattr(jobs, "finish", until_ready)


def test_what_hangs_is_ended_with_its_children(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignores the interrupt; the child that it started ends too."""
    numbers = tmp_path / "pids"
    code = f"""
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(numbers)!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""
    interrupt_once(monkeypatch, lambda: numbers.exists() and len(numbers.read_text().split()) == 2)
    assert job.python(["-c", code], 60)[0] is None
    for pid in map(int, numbers.read_text().split()):
        while Path(f"/proc/{pid}").exists() and "(zombie)" not in _status(pid):
            time.sleep(0.02)


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "(zombie)"


def test_what_is_interrupted_may_still_report(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_GRACE", 60.0)
    code = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
try:
    print("started", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("what I had")
"""
    interrupt_once(monkeypatch, lambda: "started" in job.log.read_text())
    assert job.python(["-c", code], 60)[0] is None
    assert job.log.read_text() == "started\nwhat I had\n"


TEST_FILE = """
import os, time
import pytest

pytestmark = pytest.mark.gpu

def test_good(): pass
def test_wrong(): assert 1 + 1 == 3
@pytest.mark.skip
def test_skipped(): pass
@pytest.fixture
def broken(): raise RuntimeError("no fixture")
def test_in_setup(broken): pass
"""


def test_results_of_the_tests(job: Job, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TEST_FILE)
    (tmp_path / "test_other.py").write_text("def test_on_the_cpu(): assert False\n")
    (tmp_path / "test_syntax.py").write_text("this is no Python\n")
    run_tests(job, [str(tmp_path)])
    (step,) = job.steps
    assert step.state == "failed"
    assert step.note.startswith("1 failed, 1 passed, 1 skipped, ")
    assert "2 errors" in step.note
    said = "\n".join(step.lines)
    assert "::test_wrong - assert (1 + 1) == 3" in said and "no fixture" in said
    assert "test_syntax.py" in said and "test_good" not in said


def test_a_test_that_crashes_is_named(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "test_some.py").write_text(TEST_FILE.replace("assert 1 + 1 == 3", "os._exit(17)"))
    run_tests(job, [str(tmp_path)])
    (step,) = job.steps
    assert step.state == "failed" and "1 failed, 1 passed" in step.note
    assert any("test_some.py::test_wrong" in line for line in step.lines)


def test_without_what_reads_the_results_there_is_no_report(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be made elsewhere, from the files; so it is no failure."""
    monkeypatch.setattr(steps.importlib.util, "find_spec", lambda name: None)
    steps.report(job)
    assert [(step.name, step.state) for step in job.steps] == [("report", "ok")]
    assert job.steps[0].note.startswith("left out: msgspec is not installed")


def test_no_test_at_all_is_a_failure(job: Job, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_on_the_cpu(): pass\n")
    run_tests(job, [str(tmp_path)])
    assert job.steps[0].state == "failed"


def test_all_files_with_gpu_tests_are_run() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"\btargets\(|device: torch\.device|mark\.gpu\b", path.read_text())
    }
    assert marked and all(path.startswith(steps.TESTS) for path in marked), marked
    assert all((ROOT / path).exists() for path in steps.TESTS)


def write_wheel(folder: Path, name: str, tag: str) -> None:
    facts = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as file:
        file.writestr(f"{name}.py", "here = True\n")
        file.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{facts}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        file.writestr(f"{facts}/RECORD", f"{name}.py,,\n{facts}/METADATA,,\n{facts}/WHEEL,,\n")


def test_a_wheel_of_another_machine_does_not_stop_the_others(job: Job, tmp_path: Path) -> None:
    write_wheel(tmp_path, "good_one", "py3-none-any")
    write_wheel(tmp_path, "elsewhere", "cp39-cp39-win_amd64")
    write_wheel(tmp_path, "good_two", "py3-none-any")
    install_wheels(job, tmp_path)
    assert [step.state for step in job.steps] == ["ok"]
    assert len(list((job.scratch / "site").glob("good_*.py"))) == 2
    assert job.python(["-c", "import good_one"], 60)[0] == 0


def test_the_summary_is_one_screen(job: Job, tmp_path: Path) -> None:
    lines = [f"tests/test_x.py::test_{i}: wrong" for i in range(300)]
    for name in ("tests", "benchmarks"):
        job.steps.append(Step(name=name, state="failed", seconds=3.0, note="why", lines=lines))
    files = [tmp_path / f"plot-{index}.png" for index in range(4)]
    said = list(summary("a GPU", job, files))
    assert len(said) < 40 and said[0] == "a GPU"
    assert said[1] == "tests      failed      3 s  why" and "    ... and 292 more" in said
    assert said[-1].startswith("4 files in") and "plot-3.png" in said[-1]


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu, "_LOOK", "raise SystemExit('none is here')")
    assert gpu.main([]) == 2
    assert capsys.readouterr().out == "no GPU to measure on: none is here\n"


def test_a_gpu_is_found_under_any_distribution(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image may have Triton by another name; that it is there is for the parts to find out."""
    one, memory = torch.ones(1), SimpleNamespace(total_memory=141 << 30)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: one)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    found = [
        SimpleNamespace(name="torch", version="2.11.0"),
        SimpleNamespace(name=None, version=""),
    ]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
    exec(gpu._LOOK, {})
    said = (
        "NVIDIA H200, 141 GiB, torch 2.11.0, triton (not found), transformers (not found), python "
    )
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_job_ends_with_its_summary(
    interrupted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(job: Job, small: bool) -> None:
        (job.out / "2026-01-02-abc.json").write_text("{}")
        if interrupted:
            raise KeyboardInterrupt
        job.step("benchmarks", ["-c", "print('5 passed')"], 60)

    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu, "_LOOK", "print('a GPU')")
    monkeypatch.setattr(gpu, "run", run)
    (tmp_path / plan.FILE).write_text("of an earlier job")
    assert gpu.main([]) == (1 if interrupted else 0)
    printed = capsys.readouterr().out
    assert "a GPU\n" in printed and "2026-01-02-abc.json" in printed
    assert ("interrupted" in printed) == interrupted
    assert (tmp_path / "gpu-log.txt").read_text().splitlines()[-1] == printed.splitlines()[-1]
    assert not (tmp_path / plan.FILE).exists()


def test_the_steps_are_those_of_the_plan_and_fit_into_nine_minutes(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if each takes all of its time, some is left for the benchmarks."""
    taken: list[tuple[str, float]] = []

    def step(self: Job, name: str, words: list[str], limit: float) -> str:
        self.end -= limit
        self.steps.append(Step(name=name, state="ok", seconds=limit))
        taken.append((name, limit))
        return ""

    monkeypatch.setattr(Job, "step", step)
    job.end = time.monotonic() + plan.LIMIT
    gpu.run(job, small=False)
    names = [name for name, _ in taken]
    assert names == [*(part.name for part in PARTS), "benchmarks", "report", "tests"]
    benchmarks = dict(taken)["benchmarks"]
    assert plan.LIMIT <= 530 and benchmarks - steps._AROUND > 0
    assert all(part.seconds > steps._START for part in PARTS if part.function)


def test_a_part_runs_in_a_process_and_its_failures_are_shown(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does one that asks for a GPU where there is none: it says so."""
    waiting = next(part for part in PARTS if part.name == "waiting")
    run_part(job, waiting, small=True)
    (step,) = job.steps
    assert (step.state, step.note) == ("ok", "waiting needs a GPU")
    said = (
        "ok     a: expected 1, got 1\n* 5 TFLOP/s\nFAILED b: expected 1, got 2\n2 checks, 1 failed"
    )
    monkeypatch.setattr(Job, "python", lambda self, words, limit: (1, said))
    run_part(job, waiting, small=True)
    assert job.steps[1].state == "failed" and job.steps[1].note == "2 checks, 1 failed"
    assert list(job.steps[1].lines) == ["FAILED b: expected 1, got 2", "* 5 TFLOP/s"]

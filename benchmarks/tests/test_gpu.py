"""``make gpu``: which jobs run, how they end, the record, and ``make gpu-status``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.child import ChildError, ask_each
from benchmarks.gpu import model, record
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.jobs import JOBS, Command, Job, choose
from benchmarks.gpu.runner import Runner
from benchmarks.results import ROOT, load
from benchmarks.tests.test_suites import INTERPRETED
from benchmarks.traces import CALL, timelines

CARD = {
    "environment": {
        "date": "2026-01-01T00:00:00+00:00",
        "commit": "abc",
        "modified": False,
        "device": "a card",
        "versions": {"torch": "0"},
    },
    "workers": 3,
}
HANGING = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ours x 1.05", flush=True)
time.sleep(60)
"""


def make_job(name: str, code: str, seconds: int = 30) -> Job:
    command = Command(("-c", code))
    return Job(name=name, decides="all", seconds=seconds, command=command, dry=command)


GOOD = make_job("good", "print('== 3 passed in 0.1s ==')")
CRASHING = make_job("crashing", "import os; print('FAILED one', flush=True); os.abort()")
HANGS = make_job("hanging", HANGING, seconds=1)


def make_runner(out: Path, seconds: float = 60.0, device: str = "a card") -> Runner:
    machine = {**CARD, "environment": {**CARD["environment"], "device": device}}
    end = time.monotonic() + seconds
    return Runner(out=out, end=end, dry=False, variables=dict(os.environ), machine=machine)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.runner._GRACE", 0.3)


def states(out: Path) -> list[tuple[str, str]]:
    return [(line["job"], line["state"]) for line in record.read(out)]


def test_what_crashes_or_hangs_does_not_stop_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    after = replace(GOOD, name="after")
    jobs = [GOOD, CRASHING, HANGS, after]
    assert make_runner(tmp_path).run(jobs, again=False) == 1
    ended = [("good", "ok"), ("crashing", "failed"), ("hanging", "ended"), ("after", "ok")]
    assert states(tmp_path) == ended
    printed = capfd.readouterr().out
    assert "FAILED one" in printed and "ours x 1.05" in printed
    assert "good: ok after 0 s: 3 passed in 0.1s" in printed
    assert "failed: crashing, hanging\n" in printed
    assert "FAILED one" in (tmp_path / "gpu-logs/crashing.txt").read_text()


def test_a_line_says_on_which_card_and_of_what(tmp_path: Path) -> None:
    assert make_runner(tmp_path).run([GOOD], again=False) == 0
    (line,) = record.read(tmp_path)
    assert line["device"] == "a card" and line["versions"] == {"torch": "0"}
    assert line["commit"] == "abc" and line["sources"] == record.fingerprint(GOOD)
    assert line["said"] == "3 passed in 0.1s" and 0 <= line["seconds"] < 30
    assert line["date"] > CARD["environment"]["date"]  # of the job, not of the call


def test_a_second_call_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    """Failed jobs run after jobs that never ran, and named jobs always run."""
    jobs = [GOOD, CRASHING, replace(GOOD, name="last")]
    make_runner(tmp_path).run(jobs[:2], again=False)
    assert make_runner(tmp_path).run(jobs, again=False) == 1
    assert states(tmp_path)[2:] == [("last", "ok"), ("crashing", "failed")]
    assert make_runner(tmp_path).run(jobs[:1], again=False) == 0 and len(states(tmp_path)) == 4
    assert make_runner(tmp_path).run(jobs[:1], again=True) == 0 and len(states(tmp_path)) == 5
    # another card has no result
    assert make_runner(tmp_path, device="another").run(jobs[:1], again=False) == 0
    assert len(states(tmp_path)) == 6


def test_what_does_not_fit_waits_for_another_call(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first job gets all remaining time; a short job fits in before a long one."""
    long, short = replace(GOOD, name="long", seconds=90), replace(GOOD, name="short", seconds=2)
    jobs = [GOOD, long, short]
    assert make_runner(tmp_path, seconds=20).run(jobs, again=False) == 1
    assert states(tmp_path) == [("good", "ok"), ("short", "ok")]
    assert "no time for: long; call again" in capfd.readouterr().out
    assert make_runner(tmp_path, seconds=20).run(jobs, again=False) == 0
    assert states(tmp_path)[2:] == [("long", "ok")]


def test_the_status_says_none_current_and_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [GOOD, CRASHING]

    def results() -> list[str]:
        return [line[1] for line in record.status(jobs, record.read(tmp_path))[1:]]

    assert results() == ["none", "none"]
    make_runner(tmp_path).run(jobs, again=False)
    assert results() == ["current", "current, failed"]
    monkeypatch.setattr(record, "KERNELS", ("grpo_kernels/head/**/*.py",))
    assert results() == ["stale", "stale, failed"]
    make_runner(tmp_path, device="another").run([GOOD], again=False)
    assert results() == ["stale", "current", "stale, failed"]


def test_a_fingerprint_is_of_the_kernels_and_the_jobs_own_files(tmp_path: Path) -> None:
    job = replace(GOOD, sources=("benchmarks/test_good.py",))
    files = {"grpo_kernels/a/b.py": "1", "benchmarks/test_good.py": "1", "benchmarks/other.py": "1"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = record.fingerprint(job, tmp_path)
    (tmp_path / "benchmarks/other.py").write_text("2")
    assert record.fingerprint(job, tmp_path) == before
    for name in [*files][:2]:
        (tmp_path / name).write_text("2")
        assert record.fingerprint(job, tmp_path) != before
        before = record.fingerprint(job, tmp_path)


def test_jobs_are_chosen_by_name_and_by_the_first_part_of_it() -> None:
    assert choose([]) == list(JOBS)
    assert [job.name for job in choose(["accuracy", "tests"])] == [
        *(job.name for job in JOBS if job.name.startswith("tests-")),
        "accuracy",
    ]
    with pytest.raises(ValueError, match=r"^JOBS: expected some of tests-ops, .*; got heads1$"):
        choose(["bits", "heads1"])


def test_every_job_fits_into_one_call_and_has_its_files() -> None:
    assert len({job.name for job in JOBS}) == len(JOBS)
    for job in JOBS:
        assert job.seconds <= 275 and job.decides.endswith("?")
        assert job.sources and all([*ROOT.glob(path)] for path in job.sources), job.name


def test_all_gpu_tests_are_in_a_job() -> None:
    run = {path for job in JOBS for each in job.sources for path in ROOT.glob(each)}
    marked = {
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"\btargets\(|device: torch\.device|mark\.gpu\b", path.read_text())
    }
    assert marked and marked <= run, marked - run


def test_the_command_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["--out", str(tmp_path)]) == 2
    assert capfd.readouterr().out.startswith("no GPU to measure on: ")
    assert main(["nothing"]) == 1
    said = capfd.readouterr().err
    assert "got nothing" in said and "row_kernel" in said
    monkeypatch.setenv("OUT", str(tmp_path))
    assert main(["--status", "bits"]) == 0
    assert re.search(r"^bits +none +Are sums ", capfd.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_who_hangs_or_crashes_in_a_child_does_not_stop_the_others() -> None:
    texts = ["1 + 1", "__import__('os')._exit(3)", "__import__('time').sleep(600)", "2 + 2"]
    answers = ask_each(eval, [(text,) for text in texts], workers=2, timeout=12.0)
    assert answers[0] == 2 and answers[3] == 4
    assert all(isinstance(answer, ChildError) for answer in answers[1:3])


def test_a_timeline_says_what_the_device_waits_for() -> None:
    def kernel(name: str, start: float, length: float) -> dict[str, object]:
        return {"cat": "kernel", "name": name, "ts": start, "dur": length}

    def call(start: float) -> dict[str, object]:
        return {"cat": "user_annotation", "name": CALL, "ts": start, "dur": 1.0}

    events = [
        *(call(1000.0), kernel("fill", 1400.0, 10.0), kernel("nvjet_tst", 1500.0, 100.0)),
        *(kernel("row", 1602.0, 50.0), kernel("cutlass_gemm", 1700.0, 20.0)),
        *(call(3000.0), kernel("fill", 3100.0, 10.0)),  # no GEMM
    ]
    (found,) = timelines(events)
    assert found.first_gemm == pytest.approx(500e-6) and found.end == pytest.approx(720e-6)
    assert (found.launches, found.before_gemm) == (4, 1)
    assert found.idle == pytest.approx(48e-6)  # 2 us after the first GEMM are no gap
    assert [gap[1:] for gap in found.gaps] == [("row", "cutlass_gemm")]


def benchmarks_of(job: Job) -> list[str]:
    """Return the benchmarks that its dry command runs, on their smallest cases."""
    files = [Path(word) for word in job.dry.words if word.startswith("benchmarks/test_")]
    return [file.stem.removeprefix("test_") for file in files]


def test_a_dry_job_interprets_like_the_test_of_its_benchmark() -> None:
    for job in JOBS:
        if names := {*benchmarks_of(job)}:
            assert job.dry.interprets == bool(names & {*INTERPRETED}), job.name


@pytest.mark.long
def test_jobs_run_dry(tmp_path: Path) -> None:
    """A job of tests and a job of a benchmark; test_suites.py runs all benchmarks."""
    words = "--dry", "skipping", "bits", "--out", str(tmp_path), "--limit", "900"
    # with which pytest-benchmark measures nothing
    here = {name: x for name, x in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=here)
    logs = (path.read_text() for path in tmp_path.glob("gpu-logs/*"))
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    assert states(tmp_path) == [("bits", "ok"), ("skipping", "ok")]
    ((_, measured),) = load(tmp_path).items()
    assert {group.benchmark for group in measured} == {"skipping"}


def test_a_model_is_carried_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_PART", 40)
    monkeypatch.setattr(model.tempfile, "gettempdir", lambda: str(tmp_path))
    source, folder = tmp_path / "source.gguf", tmp_path / "parts"
    source.write_bytes(bytes(range(100)))
    join = model.joined.__wrapped__
    assert join(folder) is None
    model.pack(source, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "2"]
    found = join(folder)
    assert found is not None and found.name == "source.gguf"
    assert found.read_bytes() == source.read_bytes()
    (folder / "1" / "part").write_bytes(bytes(40))
    with pytest.raises(ValueError, match="expected the parts of source.gguf; the checksum differs"):
        join(folder)
    (folder / "1" / "part").unlink()  # not carried yet
    assert join(folder) is None

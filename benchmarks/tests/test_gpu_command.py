"""``make gpu`` outlives parts that fail, hang or print without end, and says so in one screen."""

from __future__ import annotations

import os
import re
import sys
import time
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import headline, job, tests
from benchmarks.gpu.job import ROOT, Job
from benchmarks.gpu.log import Log
from benchmarks.gpu.parts import Done, Outcome, Part, run_parts
from benchmarks.gpu.summary import summary
from benchmarks.gpu.tests import run_tests
from benchmarks.gpu.wheels import install_wheels
from benchmarks.plots import PLOTS
from benchmarks.tests import synthetic_results

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "log.txt")


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_GRACE", 0.5)


def python(code: str, limit: float, write=lambda text: None) -> job.Finished:
    with Job([sys.executable, "-c", code], ENVIRONMENT, write) as running:
        return running.wait(limit)


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + 30
    while (fields := job._stat(pid)) is not None and fields[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_job_passes_on_its_output_and_its_end() -> None:
    seen: list[str] = []
    good = python("print('one'); print('größer')", 60, seen.append)
    assert (good.state, good.code, good.last_line, good.why_not) == ("ok", 0, "größer", "")
    assert "".join(seen) == "one\ngrößer\n"
    bad = python("import sys; print('that is why'); sys.exit(3)", 60)
    assert (bad.state, bad.code, bad.why_not) == ("failed", 3, "that is why")


def test_a_job_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    """It ignores the interrupt; the child that it started ends too, and is no orphan that runs."""
    numbers = tmp_path / "pids"
    child = "import time; time.sleep(600)"
    code = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", {child!r}])
with open({str(numbers)!r}, "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""
    with Job([sys.executable, "-c", code], ENVIRONMENT, lambda text: None) as running:
        deadline = time.monotonic() + 60
        while not numbers.exists() or len(numbers.read_text().split()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        finished = running.wait(0.1)
    assert finished.state == "timeout" and finished.code is None
    assert finished.why_not.startswith("stopped after")
    for pid in numbers.read_text().split():
        assert_ends(int(pid))


def test_an_interrupted_job_may_still_report() -> None:
    code = """
import time
try:
    print("started", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("what I had")
"""
    with Job([sys.executable, "-c", code], ENVIRONMENT, lambda text: None) as running:
        while "started" not in running._tail:
            time.sleep(0.05)
        finished = running.wait(0.1)
    assert finished.state == "timeout" and finished.last_line == "what I had"


def test_the_log_stops_growing_but_keeps_the_end(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.txt", largest=1000)
    assert python("print('x' * 5_000_000)", 60, log.keep).state == "ok"
    log.end("the summary")
    text = log.path.read_text()
    assert len(text) < 1200 and "the log ends here" in text
    assert text.endswith("the summary\n")


def test_every_part_runs_whatever_the_others_do(log: Log) -> None:
    def flood(limit: float) -> Outcome:
        return Outcome(state=python("print('x\\n' * 10**6)", limit, log.keep).state)

    def hang(limit: float) -> Outcome:
        return Outcome(state=python("import time; time.sleep(600)", 1.0).state)

    def fail(limit: float) -> Outcome:
        raise ValueError("a defect in the part itself")

    bodies = {"flood": flood, "hang": hang, "fail": fail}
    bodies["last"] = lambda limit: Outcome(state="ok", note=f"{limit:.0f}")
    parts = [Part(name=name, body=body, limit=50.0) for name, body in bodies.items()]
    parts.append(Part(name="late", body=fail, limit=50.0, reserve=1e6))
    done = {part.name: part.outcome for part in run_parts(parts, time.monotonic() + 500, log)}
    states = {name: outcome.state for name, outcome in done.items()}
    assert states == dict(flood="ok", hang="timeout", fail="failed", last="ok", late="skipped")
    assert done["fail"].note == "ValueError: a defect in the part itself"
    assert done["last"].note == "50"
    assert "== last: ok" in log.path.read_text()


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


def test_results_of_the_tests(log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_some.py").write_text(TEST_FILE)
    (tmp_path / "test_other.py").write_text("def test_on_the_cpu(): assert False\n")
    (tmp_path / "test_syntax.py").write_text("this is no Python\n")
    monkeypatch.setattr(tests, "_MOST_SHARDS", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    outcome = run_tests(120, log, ENVIRONMENT, tmp_path, [str(tmp_path)])
    assert outcome.state == "failed"
    assert outcome.note.startswith("1 passed, 3 failed, 1 skipped")
    lines = {line.split("::")[-1].split(":")[0]: line for line in outcome.lines}
    assert "assert (1 + 1) == 3" in lines["test_wrong"]
    assert "no fixture" in lines["test_in_setup"]
    assert any("test_syntax.py" in line for line in outcome.lines)
    sampling_mask = (tmp_path / tests.TALLY).read_text()
    assert re.fullmatch(
        r'{"passed": 1, "failed": 3, "skipped": 1, "seconds": [\d.]+}', sampling_mask
    )


def test_a_test_that_crashes_is_named(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_some.py").write_text(TEST_FILE.replace("assert 1 + 1 == 3", "os._exit(17)"))
    monkeypatch.setattr(tests, "_MOST_SHARDS", 1)
    outcome = run_tests(120, log, ENVIRONMENT, tmp_path, [str(tmp_path)])
    assert outcome.state == "failed"
    assert outcome.note.startswith("1 passed, 1 failed, 0 skipped, 2 not run")
    assert len(outcome.lines) == 1
    assert "test_some.py::test_wrong: exit code 17" in outcome.lines[0]


def test_a_test_that_hangs_is_named(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    hang = f"open({str(started)!r}, 'w').close(); time.sleep(600)"
    (tmp_path / "test_some.py").write_text(TEST_FILE.replace("assert 1 + 1 == 3", hang))
    wait = Job.wait

    def until_it_hangs(self: Job, limit: float) -> job.Finished:
        end = time.monotonic() + 120
        while not started.exists() and time.monotonic() < end:
            time.sleep(0.05)
        return wait(self, 0.0)

    monkeypatch.setattr(Job, "wait", until_it_hangs)
    monkeypatch.setattr(tests, "_MOST_SHARDS", 1)
    outcome = run_tests(120, log, ENVIRONMENT, tmp_path, [str(tmp_path)])
    assert outcome.state == "timeout"
    assert outcome.note == "1 passed, 1 failed, 0 skipped, 2 not run"
    assert "test_some.py::test_wrong: did not finish" in outcome.lines[0]


def test_processes_that_hang_are_interrupted_together() -> None:
    """Each takes its grace to end, and they take it at the same time."""
    seen: list[str] = []

    class Hanging:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self, limit: float) -> job.Finished:
            seen.append(f"wait {self.name}")
            return job.Finished(code=None, seconds=1.0, tail="")

        def interrupt(self) -> None:
            seen.append(f"interrupt {self.name}")

    tests._wait([Hanging("a"), Hanging("b")], 0.0)  # type: ignore[list-item]
    assert seen.index("interrupt b") < seen.index("wait b")


def test_no_test_at_all_is_a_failure(log: Log, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_on_the_cpu(): pass\n")
    outcome = run_tests(120, log, ENVIRONMENT, tmp_path, [str(tmp_path)])
    assert outcome.state == "failed" and outcome.note == "0 passed, 0 failed, 0 skipped"


def test_all_files_with_gpu_tests_are_run() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"targets\(|device: torch\.device|mark\.gpu\b", path.read_text())
    } - {str(Path(__file__).relative_to(ROOT))}
    assert marked and all(path.startswith(tests.TESTS) for path in marked), marked
    assert all((ROOT / path).exists() for path in tests.TESTS)


def write_wheel(folder: Path, name: str, tag: str) -> Path:
    path = folder / f"{name}-1.0-{tag}.whl"
    facts = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "here = True\n")
        file.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{facts}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        file.writestr(f"{facts}/RECORD", f"{name}.py,,\n{facts}/METADATA,,\n{facts}/WHEEL,,\n")
    return path


def test_one_bad_wheel_does_not_stop_the_others(log: Log, tmp_path: Path) -> None:
    wheels = [
        write_wheel(tmp_path, "good_one", "py3-none-any"),
        write_wheel(tmp_path, "elsewhere", "cp39-cp39-win_amd64"),
        write_wheel(tmp_path, "good_two", "py3-none-any"),
    ]
    outcome = install_wheels(wheels, tmp_path / "site", 120, log, ENVIRONMENT)
    assert outcome.state == "failed" and outcome.note == "2 installed, 1 not"
    assert outcome.lines[0].startswith("elsewhere-1.0-cp39-cp39-win_amd64.whl: ")
    assert {path.name for path in (tmp_path / "site").glob("good_*.py")} == {
        "good_one.py",
        "good_two.py",
    }
    none = install_wheels([], tmp_path / "site", 120, log, ENVIRONMENT)
    assert none.state == "ok" and none.note.startswith("there are none")


def test_the_summary_is_one_screen(tmp_path: Path) -> None:
    lines = [f"tests/test_x.py::test_{i}: {'long ' * 100}" for i in range(300)]
    names = ("wheels", "tests", "benchmarks", "report")
    done = [
        Done(name=name, seconds=3.0, outcome=Outcome(state="failed", note="x" * 500, lines=lines))
        for name in names
    ]
    files = [tmp_path / f"plot-{index}.png" for index in range(40)]
    text = summary("a GPU", done, [f"case {index}" for index in range(100)], tmp_path, files)
    assert len(text.splitlines()) < 40
    assert all(len(line) <= 118 for line in text.splitlines())
    assert "... and 298 more" in text and "tests/test_x.py::test_0" in text and "case 0" in text
    assert "40 files in" in text and "plot-0.png" in text


def test_the_headline_of_a_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = synthetic_results.write(
        tmp_path, synthetic_results.run([synthetic_results.table(synthetic_results.rows())] * 20)
    )
    headline.main(path)
    first, case, *_, last = capsys.readouterr().out.splitlines()
    assert first == "medians: floor, ours over it, the fastest peers over ours"
    # medians 2.0, 2.2, 2.6 and 4.0 s
    assert case.endswith("| floor 2.00 s | ours 1.10x | eager 1.18x, trl 1.82x | FAILED: cce")
    assert last == "and 6 more cases in the report"


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(command, "_facts", lambda: {"why_not": "none is here", "line": ""})
    assert command.main() == 2
    assert capsys.readouterr().out == "no GPU to measure on: none is here\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("state, code", (("ok", 0), ("failed", 1), ("timeout", 1), ("skipped", 1)))
def test_the_run_ends_with_its_summary(
    state: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    outcome = Outcome(state=state, note="said in a line", lines=["a detail"])
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(command, "_facts", lambda: {"why_not": "", "line": "a GPU"})
    monkeypatch.setattr(
        command,
        "parts",
        lambda run: [Part(name="only", body=lambda limit: outcome, limit=9.0)],
    )
    assert command.main() == code
    printed = capsys.readouterr().out
    assert re.search(rf"only +{state} .*said in a line", printed)
    assert "a detail" in printed and "no result file was written" in printed
    (file,) = (tmp_path / "out").rglob("*")
    assert file.name == command.LOG and file.read_text() == printed


def test_the_parts_fit_into_nine_minutes(tmp_path: Path) -> None:
    run = command.Run(tmp_path / "out", tmp_path)
    parts = {part.name: part for part in command.parts(run)}
    assert list(parts) == ["wheels", "tests", "benchmarks", "report"]
    assert command._LIMIT <= 530
    # what comes first leaves the benchmarks more than they need around their cases
    before = command._LOOKING + parts["wheels"].limit + parts["tests"].limit
    left = command._LIMIT - before - parts["benchmarks"].reserve
    assert left > command._AROUND


def test_few_files_are_left() -> None:
    """The log, the result file and the report besides."""
    assert 3 + len(PLOTS) <= 8

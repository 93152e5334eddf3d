"""Options of the suites, and fixtures that all benchmarks share.

A benchmark is a file ``test_<name>.py`` with ``CASES`` by suite; ``NOTES``, or ``notes(case)``, the
rows of a case and what each runs; and ``measure(case, rows, session)``, which fills in all rows. A
case is measured when its first test runs, with all rows in turns.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import child, tables, text
from benchmarks.measure import Settings, device_is_lost, free
from benchmarks.providers.base import is_ours
from benchmarks.results import WHOLE_RUNS, Recorder, Row
from benchmarks.shapes import Case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SUITES = ("tiny", "quick", "cpu", "gpu", "gpu-full")
_ROUNDS = {"cpu": 5, "cuda": 10}
_WIDTH = 100
_HERE = Path(__file__).parent
_OURS = "table of "  # how the groups of pytest-benchmark begin that our tables show
_SAID = {
    "quick": "quick suite: one case in about five minutes on two free CPU cores, or small shapes "
    "of the files you name; --full runs all {count} benchmarks, for hours",
}
_SESSION = pytest.StashKey["Session"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("head benchmarks")
    group.addoption("--full", action="store_true", help="all cases of this device; runs for hours")
    group.addoption("--suite", choices=SUITES, help="name of a list of cases; default: quick")
    group.addoption("--results", type=Path, help="folder for a result file; default: no file")
    group.addoption("--deadline", type=float, help="start no case after so many seconds")


def suite(config: pytest.Config) -> str:
    """Return the name of the chosen suite."""
    full = "gpu-full" if DEVICE == "cuda" else "cpu"
    return config.getoption("--suite") or (full if config.getoption("--full") else "quick")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Say in the first line what runs, and for how long."""
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if config.getoption("--benchmark-only") and reporter is not None:
        name, count = suite(config), len([*_HERE.glob("test_*.py")])
        reporter.write_line(_SAID.get(name, "suite {name}").format(name=name, count=count))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out tests of the benchmarks, which put Triton into its interpreter, unless named.

    Without a suite, leave out all benchmarks except the heads.
    """
    if not config.getoption("--benchmark-only") or collection_path.parent != _HERE:
        return None
    name = collection_path.name
    wanted = name == "test_heads.py" if suite(config) == "quick" else name != "tests"
    return None if wanted else True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        cases = metafunc.module.CASES.get(suite(metafunc.config), [])
        pairs = [(case, name) for case in cases for name in notes(metafunc.module, case)]
        ids = [f"{case}-{name}" for case, name in pairs]
        metafunc.parametrize(("case", "name"), pairs, ids=ids)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "benchmark" in getattr(item, "fixturenames", ()):
            # a provider that is skipped has no samples
            item.add_marker(pytest.mark.filterwarnings("ignore:Benchmark fixture was not used"))


def pytest_collection_finish() -> None:
    """Keep everything imported so far out of garbage collections, which many steps trigger."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries that count objects at exit would warn


def notes(module: ModuleType, case: Any) -> dict[str, str]:
    """Return the rows of a case of a benchmark, and the note of each."""
    return module.notes(case) if hasattr(module, "notes") else module.NOTES


@pytest.hookimpl(wrapper=True)
def pytest_benchmark_group_stats() -> Generator[None, list, list]:
    """Leave pytest-benchmark's own tables to benchmarks without one of our tables."""
    groups = yield
    return [(name, found) for name, found in groups if not str(name).startswith(_OURS)]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    session = config.stash.get(_SESSION, None)
    groups = session.recorder.groups if session else []
    for benchmark in dict.fromkeys(group.benchmark for group in groups):
        found = tables.show(benchmark, groups, text.plain)
        terminalreporter.write_line(f"\n{text.filled(found, _WIDTH)}\n")


@dataclass(frozen=True)
class Session:
    """State that all benchmarks share."""

    suite: str
    selected: set[tuple[str, int, str]]  # module, case and name of the tests that run
    deadline: float  # by ``time.monotonic()``; no case starts after it
    recorder: Recorder
    capture: Any  # pytest's plugin
    device: str = DEVICE
    _rows: dict[tuple[str, int], dict[str, Row]] = field(default_factory=dict)

    @property
    def brief(self) -> bool:
        return self.suite in ("tiny", "quick")

    def rounds(self, usual: int | None = None) -> int:
        return 1 if self.suite == "tiny" else usual or _ROUNDS[self.device]

    def announce(self, case: Any, names: list[str]) -> None:
        """Say what is being measured: pytest prints nothing before the first test has passed."""
        some_minutes = ", a few minutes" * (self.suite == "quick")
        with self.capture.global_and_fixture_disabled():
            print(f"\nmeasuring {case}{some_minutes}: {', '.join(names)}", flush=True)

    def settings(self, case: Case, **changes: Any) -> Settings:
        """Return how thoroughly a case is measured."""
        patient = {"budget": float("inf")} if case.slow and not self.brief else {}
        return Settings(device=self.device, rounds=self.rounds(), **patient, **changes)

    def begin(self, case: Any = None) -> None:
        """Skip a case after the deadline, or one without enough memory or inputs."""
        if time.monotonic() > self.deadline:
            pytest.skip("not reached: the deadline had passed")
        if isinstance(case, Case) and (reason := case.unavailable(self.device)):
            pytest.skip(reason)

    def rows(self, module: ModuleType, case: Any) -> dict[str, Row]:
        """Measure all rows of a case whose tests run, once."""
        key = module.__name__, id(case)
        if key not in self._rows:
            self.begin(case)
            named = notes(module, case)
            benchmark = module.__name__.rpartition("test_")[2]
            chosen = [name for name in named if (*key, name) in self.selected]
            whole = benchmark in WHOLE_RUNS
            rows = {name: Row(name, named[name], whole_run=whole) for name in chosen}
            self.announce(case, [*rows])
            module.measure(case, [*rows.values()], self)
            free(self.device)
            gc.freeze()  # imports of the case
            about = getattr(module, "about", lambda *_: "")(case, self.device)
            if any(row.shown for row in rows.values()):  # or it would hide an earlier result
                self.recorder.add(benchmark, case.facts(), [*rows.values()], about)
            self._rows[key] = rows
            if device_is_lost(self.device):
                pytest.exit("a kernel faulted, so nothing else can run on the GPU", returncode=3)
        return self._rows[key]


@pytest.fixture(scope="session")
def session(request: pytest.FixtureRequest) -> Session:
    config = request.config
    tests: list[Any] = [test for test in request.session.items if hasattr(test, "callspec")]
    calls = [(test.module.__name__, test.callspec.params) for test in tests]
    selected = {(module, id(x["case"]), x["name"]) for module, x in calls if "case" in x}
    if suite(config) == "tiny":
        child.share_processes()
    seconds, folder = config.getoption("--deadline"), config.getoption("--results")
    end = time.monotonic() + seconds if seconds is not None else float("inf")
    capture = config.pluginmanager.getplugin("capturemanager")
    made = Session(suite(config), selected, end, Recorder(folder, DEVICE), capture)
    config.stash[_SESSION] = made
    return made


@pytest.fixture
def row(
    request: pytest.FixtureRequest, benchmark: Any, case: Any, name: str, session: Session
) -> Row:
    """Measure a provider in a case with all others, and pass its samples to pytest-benchmark.

    Its own loop finishes one test before the next, so a change of the machine's load would affect
    only some providers, and it doesn't support device events.
    """
    found = session.rows(request.module, case)[name]
    if not found.shown:
        pytest.skip(found.reason)
    if not found.runs:  # a failure of our code is a defect, and of another library a result
        (pytest.fail if is_ours(found.provider) else pytest.xfail)(found.reason)
    benchmark.group = f"{_OURS}{request.module.__name__} {case}"
    benchmark.extra_info |= {"errors": found.errors, **found.info}
    statistics = benchmark._make_stats(iterations=1)
    for seconds in found.seconds or [0.0]:
        statistics.update(seconds)
    return found


def check_row(row: Row) -> None:
    """Check that a row that runs has results: the test of every benchmark."""
    assert row.seconds or row.errors or row.info

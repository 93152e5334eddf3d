"""Options of the suite, and the measurements that its tests share."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.check import reference_dtype
from benchmarks.environment import environment
from benchmarks.figures import is_ours, is_quoted
from benchmarks.measure import Settings, device_is_lost, measure
from benchmarks.providers import PROVIDERS
from benchmarks.replay import clock
from benchmarks.results import Collector, Environment, Line, Row, Table
from benchmarks.results import Entry as Stored
from benchmarks.suites import ACCURACY, BACKWARDS, SAVINGS, SUITES, Entry
from benchmarks.tables.summary import summary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# what ends at a deadline ends in the last of these
_ORDER = (
    *("host", "accuracy", "savings", "head", "backwards", "sharded", "memory"),
    *("hosts", "training", "rollouts"),
)
_ROUNDS = {"cpu": 5, "cuda": 10}
_HERE = Path(__file__).parent
_QUICKLY = (
    "One case in two dtypes takes some five minutes on two free CPU cores; "
    "all dots of a dtype\ncome at once. --full measures everything, which takes hours."
)
_TABLES = pytest.StashKey[dict[str, Table]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("head benchmarks")
    group.addoption("--full", action="store_true", help="all cases of this device")
    group.addoption("--suite", choices=SUITES, help="a list of cases by name; default: quick")
    group.addoption("--results", type=Path, help="folder for the result file; default: none")
    group.addoption("--deadline", type=float, help="seconds after which nothing new is started")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out, unless they are named, our own tests, which put Triton into its interpreter.

    And without a suite all but the heads.
    """
    if not config.getoption("--benchmark-only") or collection_path.parent != _HERE:
        return None
    name = collection_path.name
    wanted = name == "test_heads.py" if suite(config) == "quick" else name != "tests"
    return None if wanted else True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.path.parent != _HERE:  # the harness's own tests
        return
    if "entry" in metafunc.fixturenames:
        entries = SUITES[suite(metafunc.config)]()
        metafunc.parametrize("entry", entries, ids=str, scope="session")
    of_suites = {
        "accuracy_entry": ACCURACY,
        "savings_entry": SAVINGS,
        "backwards_entry": BACKWARDS,
    }
    for name, entries in of_suites.items():
        if name in metafunc.fixturenames:
            of_suite = entries[suite(metafunc.config)]
            metafunc.parametrize(name, of_suite, ids=str, scope="session")
    if "provider_name" in metafunc.fixturenames:
        quick = suite(metafunc.config) == "quick"
        names = [name for name in PROVIDERS if is_quoted(name) or not quick]
        metafunc.parametrize("provider_name", names)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = [f"test_{name}" for name in _ORDER]
    items.sort(key=lambda item: [item.name.startswith(name) for name in reversed(names)])
    for item in items:
        if "benchmark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.benchmark(timer=clock))


def pytest_report_collectionfinish(
    config: pytest.Config, items: Sequence[pytest.Item]
) -> str | None:
    """Say how long the quick suite takes, and where its numbers go."""
    if suite(config) != "quick" or not any(item.path.name == "test_heads.py" for item in items):
        return None
    folder = config.getoption("--results")
    kept = f"to a file under {folder}" if folder else "to a file with --results DIR"
    return f"{_QUICKLY}\nThe numbers go to a table at the end, and {kept}."


@pytest.hookimpl(wrapper=True)
def pytest_benchmark_group_stats(config: pytest.Config) -> Generator[None, list, list]:
    """Leave to pytest-benchmark's own tables what the quick suite does not show in its one."""
    groups = yield
    shown = _summarised(config)
    return [(group, found) for group, found in groups if group not in shown]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if tables := _summarised(config):
        terminalreporter.write_line(f"\n{summary(list(tables.values()))}\n")


def _summarised(config: pytest.Config) -> dict[str, Table]:
    """Return the tables of the heads that the quick suite measured, by pytest-benchmark's group."""
    return config.stash.get(_TABLES, {}) if suite(config) == "quick" else {}


def suite(config: pytest.Config) -> str:
    """Return the name of the chosen suite."""
    full = "gpu-full" if DEVICE == "cuda" else "cpu"
    return config.getoption("--suite") or (full if config.getoption("--full") else "quick")


@dataclass(frozen=True)
class Session:
    """What all suites share."""

    config: pytest.Config
    deadline: float  # by ``time.monotonic()``; nothing is begun after it
    collector: Collector | None  # where the results go
    device: str = DEVICE

    @property
    def quick(self) -> bool:
        return suite(self.config) == "quick"

    def begin(self, entry: Entry | None = None) -> None:
        """Skip what there is no time or, for a case, no memory for."""
        if time.monotonic() > self.deadline:
            pytest.skip("not reached: the time was up")
        if entry is not None and (reason := entry.too_large(DEVICE)) is not None:
            pytest.skip(reason)

    def keep(self, kind: str, entry: Stored) -> None:
        """Add to the result file."""
        if self.collector is not None:
            self.collector.add(kind, entry)

    def judge(self, row: Line) -> None:
        """Skip who is not here, and fail who is wrong: ours is a defect, another's a result."""
        if (reason := row.absent or row.unable) is not None:
            pytest.skip(reason)
        if row.failure is not None:
            (pytest.fail if is_ours(row.provider) else pytest.xfail)(row.failure)


@pytest.fixture(scope="session")
def session(pytestconfig: pytest.Config) -> Session:
    seconds, folder = pytestconfig.getoption("--deadline"), pytestconfig.getoption("--results")
    end = time.monotonic() + seconds if seconds is not None else float("inf")
    return Session(pytestconfig, end, Collector(folder, DEVICE) if folder else None)


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest, entry: Entry, session: Session) -> dict[str, Row]:
    """Measure the rows of one case, by provider: of those that the command line selected."""
    session.begin(entry)
    wanted = {
        item.callspec.params["provider_name"]
        for item in request.session.items
        if getattr(item, "callspec", None) and item.callspec.params.get("entry") == entry
    }
    providers = [
        provider
        for name, provider in PROVIDERS.items()
        if name in wanted and (entry.slow or not (provider.slow_start or provider.timeout))
    ]
    settings = Settings(
        device=DEVICE,
        rounds=_ROUNDS[DEVICE],
        budget=float("inf") if entry.slow and not session.quick else 30.0,
        memory=entry.memory,
        deadline=session.deadline,
    )
    rows = measure(entry.case, providers, settings)
    exact = str(reference_dtype(entry.case, DEVICE)).removeprefix("torch.")
    facts = {**entry.case.facts(), "sequences": entry.case.sequences}
    where = Environment(**environment(DEVICE))
    found = Table(**facts, environment=where, reference=exact, rows=rows)
    session.keep("tables", found)
    session.config.stash.setdefault(_TABLES, {})[str(entry.case)] = found
    if device_is_lost(DEVICE):
        pytest.exit("a kernel faulted, and nothing more can run on the GPU", returncode=3)
    return {row.provider: row for row in rows}

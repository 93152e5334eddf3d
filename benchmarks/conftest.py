"""Options of the suite, and the measurements that its tests share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.check import reference_dtype
from benchmarks.measure import Settings, device_is_lost, measure
from benchmarks.providers import PROVIDERS
from benchmarks.replay import CLOCK
from benchmarks.results import Collector, Row, Table
from benchmarks.suites import ACCURACY, SAVINGS, SUITES, Entry

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_COLLECTOR = pytest.StashKey[Collector | None]()
# what ends at a deadline ends in the last of these
_SUITES = ("host", "accuracy", "savings", "head", "plan", "training_step", "rollouts")
_FILES = tuple(f"test_{name}" for name in _SUITES)
_ROUNDS = {"cpu": 5, "cuda": 10}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("head benchmarks")
    group.addoption("--full", action="store_true", help="all cases of this device")
    group.addoption("--suite", choices=SUITES, help="a list of cases by name; default: quick")
    group.addoption("--results", type=Path, help="folder for the result file; default: none")
    group.addoption("--deadline", type=float, help="seconds after which nothing new is started")


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--results")
    config.stash[_COLLECTOR] = Collector(folder, DEVICE) if folder else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the harness's own tests when measuring: they put Triton into its interpreter."""
    tests = (
        config.getoption("--benchmark-only") and collection_path == Path(__file__).parent / "tests"
    )
    return True if tests else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.path.parent != Path(__file__).parent:  # the harness's own tests
        return
    if "entry" in metafunc.fixturenames:
        entries = SUITES[suite(metafunc.config)]()
        metafunc.parametrize("entry", entries, ids=str, scope="session")
    for name, entries in (("accuracy_entry", ACCURACY), ("savings_entry", SAVINGS)):
        if name in metafunc.fixturenames:
            of_suite = entries[suite(metafunc.config)]
            metafunc.parametrize(name, of_suite, ids=str, scope="session")
    if "provider_name" in metafunc.fixturenames:
        metafunc.parametrize("provider_name", PROVIDERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _FILES.index(item.path.stem) if item.path.stem in _FILES else -1)
    for item in items:
        if "benchmark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.benchmark(timer=CLOCK.read))


def suite(config: pytest.Config) -> str:
    """Return the name of the chosen suite."""
    full = "gpu-full" if DEVICE == "cuda" else "cpu"
    return config.getoption("--suite") or (full if config.getoption("--full") else "quick")


def _budget(config: pytest.Config) -> float:
    """Return the seconds of timing for a case: the quick suite stops at the fewest rounds."""
    thorough = config.getoption("--full") or config.getoption("--suite") not in (None, "quick")
    return 30.0 if thorough else 1.0


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(scope="session")
def collector(pytestconfig: pytest.Config) -> Collector | None:
    return pytestconfig.stash[_COLLECTOR]


@pytest.fixture(scope="session")
def deadline(pytestconfig: pytest.Config) -> float:
    """Return the end by ``time.monotonic()``."""
    seconds = pytestconfig.getoption("--deadline")
    return time.monotonic() + seconds if seconds is not None else float("inf")


@pytest.fixture(scope="session")
def begin(deadline: float) -> Callable[..., None]:
    """Return a function that skips what there is no time or, for a case, no memory for."""

    def begin(entry: Entry | None = None) -> None:
        if time.monotonic() > deadline:
            pytest.skip("not reached: the time was up")
        if entry is not None and (reason := entry.too_large(DEVICE)) is not None:
            pytest.skip(reason)

    return begin


@pytest.fixture(scope="session")
def table(
    request: pytest.FixtureRequest,
    entry: Entry,
    collector: Collector | None,
    deadline: float,
    begin: Callable[..., None],
) -> dict[str, Row]:
    """Measure the rows of one case, by provider: of those that the command line selected."""
    begin(entry)
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
        budget=float("inf") if entry.slow else _budget(request.config),
        memory=entry.memory,
        deadline=deadline,
    )
    rows = measure(entry.case, providers, settings)
    if collector is not None:
        exact = str(reference_dtype(entry.case, DEVICE)).removeprefix("torch.")
        facts = {**entry.case.facts(), "sequences": entry.case.sequences}
        collector.add("tables", Table(**facts, reference=exact, rows=rows))
    if device_is_lost(DEVICE):
        pytest.exit("a kernel faulted, and nothing more can run on the GPU", returncode=3)
    return {row.provider: row for row in rows}

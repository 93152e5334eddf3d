"""A pytest plugin: runs every COUNTth test, and writes down each result as it comes.

``-p benchmarks.gpu.shard --shard INDEX/COUNT --report FILE``. Several such processes share the
work, most of which is compilation, and a test that crashes or hangs takes only its own along.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="0/1", help="INDEX/COUNT of the tests to run")
    parser.addoption("--report", type=Path, help="file for a line of JSON per event")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--report"):
        config.pluginmanager.register(_Reporter(config.getoption("--report")))


@pytest.hookimpl(trylast=True)  # after the selection by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    index, count = map(int, config.getoption("--shard").split("/"))
    items[:] = items[index::count]


class _Reporter:
    """Each line is complete when it is written: a kill loses none."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def _write(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}) + "\n")
        self._file.flush()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write("collected", count=len(session.items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write("result", test=report.nodeid, outcome="failed", message=_message(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("started", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            message = _message(report) if report.failed else ""
            self._write("result", test=report.nodeid, outcome=report.outcome, message=message)


def _message(report: pytest.CollectReport | pytest.TestReport) -> str:
    """One line that says what went wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).strip().splitlines()
    chosen = lines[:1] if crash else lines[-1:]
    return "".join(chosen)[:300]

"""``pytest -p tests.emulated.plugin``: Triton's kernels run in the emulator of an AMD GPU.

The report ends with what ran; with ``--every-kernel`` one of the package that did not is an error.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import pytest

from grpo_kernels.backends.triton.codegen.trace import KERNEL_NAME
from tests.backends.compile_gate import kernels
from tests.emulated import device

device.install(os.environ.get("EMULATED_ARCH", "gfx942"))

_ran: Counter[tuple[str, str]] = Counter()  # launches and instructions of waves, by kernel


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-kernel", action="store_true", help="or the session fails")


def pytest_testnodedown(node: Any, error: Any) -> None:
    """Add what a worker of xdist has run."""
    _ran.update(getattr(node, "workeroutput", {}).get("ran", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Add up what this process has run; hand it to the one that reports, or look at it all."""
    for launch in device.LAUNCHES:
        _ran[launch.kernel, "launches"] += 1
        _ran[launch.kernel, "instructions"] += launch.work.instructions.total()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["ran"] = dict(_ran)
    elif session.config.getoption("--every-kernel") and _missing():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    write = terminalreporter.write_line
    terminalreporter.section("executed, each launch forward and in reverse order")
    for name in sorted({name for name, _ in _ran}):
        count, instructions = _ran[name, "launches"], _ran[name, "instructions"]
        write(f"{name:<28}{count:>6} launches {instructions:>12} instructions of waves")
    for name in sorted(_missing()):
        write(f"{name:<28} NEVER RAN")


def _missing() -> set[str]:
    return {*kernels(), KERNEL_NAME} - {name for name, _ in _ran}

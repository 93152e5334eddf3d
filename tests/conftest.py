"""Shared fixtures. Without a GPU, Triton kernels run in its interpreter."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    from tests.support.interpreter import exact_dots, patch_once

    exact_dots()
    patch_once()

# a shell has what it starts in the background ignore Ctrl-C, the processes of tests included
signal.signal(signal.SIGINT, signal.default_int_handler)

# the same bodies run on a GPU, where they carry the marker
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU where there is none: no reader has to sort it from real skips."""
    left_out = [] if HAS_GPU else [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish() -> None:
    """Keep what is imported by now out of collections: transformers asks for one in each run."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries that count what is left at the end would warn


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say why tests were skipped, in a line for each reason; keep which took the longest."""
    skipped = terminalreporter.stats.get("skipped", [])
    for reason, count in Counter(report.longrepr[2] for report in skipped).most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
    _write_durations(terminalreporter.stats, config.rootpath / "build" / "durations.txt")


def _write_durations(stats: dict[str, list[Any]], path: Path) -> None:
    seconds: Counter[str] = Counter()
    for report in (report for reports in stats.values() for report in reports):
        seconds[getattr(report, "nodeid", "")] += getattr(report, "duration", 0.0)
    path.parent.mkdir(exist_ok=True)
    lines = (f"{time:8.2f} s  {name}" for name, time in seconds.most_common(30))
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def narrow_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a backward cut even a tiny vocabulary into slices."""
    from grpo_kernels.engine import gradients

    for name, columns in (("_MIN_COLUMNS", 16), ("_MAX_COLUMNS", 32), ("_ALIGNMENT", 16)):
        monkeypatch.setattr(gradients, name, columns)

"""Result files: which providers were measured in which case, and why others were not.

``results/<device>/<date>-<commit>.jsonl`` is one run on one machine. Its first line is the
environment, and each other line is a row, in the order of measurement. If several runs of a device
have the same case, the newest one counts, so a short run replaces only what it measured again.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.tools import cpu_name, device_memory, installed_version

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
_SOURCES = ("grpo_kernels", "grpo_trainer", "csrc", "setup.py", "benchmarks")
_NO_RESULTS = ":(exclude)benchmarks/results"
_PACKAGES = (
    *("torch", "triton", "transformers", "vllm", "trl", "liger-kernel", "cut-cross-entropy"),
    *("quack-kernels", "nvidia-cutlass-dsl"),
)
STATES = ("measured", "absent", "unable", "wrong")
# Slowest over fastest sample of a row. Beyond it the machine was busy, and no time is shown.
MOST_SPREAD = 1.5
# Benchmarks that record the steps of one run. Each step has its own tokens, so steps may differ.
WHOLE_RUNS = ("asynchronous", "curves", "lora", "real", "rollouts")


@dataclass
class Row:
    """One provider in one case: its measurements, or the reason why there are none."""

    provider: str
    note: str = ""  # what exactly runs
    # "absent": this machine lacks something; "unable": the provider lacks the work; "wrong": it
    # failed
    state: str = "measured"
    reason: str = ""
    seconds: list[float] = field(default_factory=list)  # a sample for each round
    errors: dict[str, float] = field(default_factory=dict)  # by output, against the reference
    info: dict[str, Any] = field(default_factory=dict)  # everything but times: bytes, bits, shares
    cells: dict[str, str] = field(default_factory=dict)  # the part that its table shows, by column
    whole_run: bool = False  # the samples are the steps of one run, which differ

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"state: expected one of {', '.join(STATES)}, got {self.state!r}")

    @property
    def runs(self) -> bool:
        return self.state == "measured"

    @property
    def shown(self) -> bool:
        """Whether a table has a line for it; if not, it is listed below, with its reason."""
        return self.state in ("measured", "wrong")

    @property
    def spread(self) -> float:
        """The slowest sample over the fastest one."""
        return max(self.seconds) / min(self.seconds) if self.seconds else 1.0

    @property
    def unsteady(self) -> bool:
        """Whether samples of the same call differ too much for their median to mean anything."""
        return not self.whole_run and self.spread > MOST_SPREAD

    @property
    def median(self) -> float | None:
        """The time of a row, None if it has none or if its samples are unsteady."""
        timed = self.seconds and self.runs and not self.unsteady
        return statistics.median(self.seconds) if timed else None

    @property
    def extra_bytes(self) -> int | None:
        """The peak of memory beyond inputs and outputs, if it was measured."""
        return self.info.get("extra_bytes")

    def worst(self, *outputs: str) -> float | None:
        """Return the largest error of some outputs, or None if there is none."""
        errors = (self.errors[name] for name in outputs if self.runs and name in self.errors)
        return max(errors, default=None)

    def leave_out(self, state: str, reason: str | None) -> None:
        """Set the reason why nothing is measured; None changes nothing."""
        if reason is not None and self.runs:
            self.state, self.reason = state, reason
            self.seconds.clear()


@dataclass
class Group:
    """All providers in one case, side by side in one run."""

    benchmark: str  # of the file ``test_<benchmark>.py``
    facts: dict[str, Any]  # what was measured
    rows: list[Row]
    environment: dict[str, Any]
    about: str = ""  # facts that are known once the case has been measured

    def __getitem__(self, provider: str) -> Row | None:
        return next((row for row in self.rows if row.provider == provider and row.shown), None)

    def ratio(self, row: Row | None, base: str | None) -> float | None:
        """Return a row's time over the time of the provider ``base``, if both are known."""
        beside = self[base] if base else None
        if row is None or beside is None or row.median is None or beside.median is None:
            return None
        return row.median / beside.median

    @property
    def where(self) -> str:
        """Name the device and, on a CPU, its instruction set and the number of threads."""
        facts = self.environment
        if facts["kind"] != "cpu":
            return str(facts["device"])
        threads = f"{facts['threads']} thread{'' if facts['threads'] == 1 else 's'}"
        return f"{facts['device']} ({facts['isa']}), {threads}"

    @property
    def source(self) -> str:
        """Name the date and the commit of the measurement."""
        facts = self.environment
        changed = " + changes" if facts["modified"] else ""
        return f"{facts['date'][:10]}, {facts['commit'][:12]}{changed}"


class Recorder:
    """One run's file: every case is on the disk as soon as it has been measured."""

    def __init__(self, folder: Path | None, device: str) -> None:
        self.environment, self.groups = environment(device), list[Group]()
        self._path: Path | None = None
        if folder is not None:
            date, commit = self.environment["date"][:10], self.environment["commit"][:12]
            ends = chain([""], map("-{}".format, count(2)))
            names = (f"{date}-{commit}{end}.jsonl" for end in ends)
            paths = (folder / slug(self.environment["device"]) / name for name in names)
            self._path = next(path for path in paths if not path.exists())  # else an earlier run's

    def add(
        self, benchmark: str, facts: dict[str, Any], rows: Sequence[Row], about: str = ""
    ) -> Group:
        """Keep a case, and append its rows to the file."""
        group = Group(benchmark, facts, list(rows), self.environment, about)
        self.groups.append(group)
        if self._path is not None:
            lines = [] if self._path.exists() else [self.environment]
            case = {"benchmark": benchmark, "facts": facts, "about": about}
            lines += [case | asdict(row) for row in rows]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.writelines(f"{json.dumps(line)}\n" for line in lines)
        return group


def load(folder: Path = RESULTS) -> dict[str, list[Group]]:
    """Load the newest group of each case, by the name of the device's folder."""
    found: dict[str, list[Group]] = {}
    for path in sorted(folder.glob("*/*.jsonl")):
        found.setdefault(path.parent.name, []).extend(load_run(path))
    return {
        name: list({
            json.dumps((group.benchmark, group.facts)): group
            for group in sorted(groups, key=lambda group: group.environment["date"])
        }.values())
        for name, groups in found.items()
    }  # fmt: skip


def load_run(path: Path) -> list[Group]:
    """Load one file.

    Raises:
        ValueError: a line is malformed; the message names it.
    """
    groups: dict[str, Group] = {}
    facts: dict[str, Any] = {}
    for number, text in enumerate(path.read_text().splitlines(), start=1):
        try:
            line = json.loads(text)
            if number == 1:
                facts = {name: line[name] for name in ("date", "commit", "device", "kind")} | line
                continue
            case, about = (line.pop("benchmark"), line.pop("facts")), line.pop("about")
            group = groups.setdefault(json.dumps(case), Group(*case, [], facts, about))
            group.rows.append(Row(**{"whole_run": case[0] in WHOLE_RUNS} | line))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {type(error).__name__}: {error}") from None
    return list(groups.values())


def environment(device: str) -> dict[str, Any]:
    """Return the facts needed to repeat a run on ``device``, "cpu" or "cuda"."""
    gpu = device == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # without a checkout, the environment variable names the commit of the sources
        "commit": os.environ.get("COMMIT") or _git("rev-parse", "HEAD") or "unknown",
        "modified": bool(_git("status", "--porcelain", "--", *_SOURCES, _NO_RESULTS)),
        "device": torch.cuda.get_device_name() if gpu else cpu_name(),
        "kind": device,
        "isa": None if gpu else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(device_memory(device) / 2**30, 1),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in _PACKAGES},
    }


def slug(name: str) -> str:
    """Return a device's name as the name of a folder."""
    plain = re.sub(r"\((R|TM)\)", "", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")


def _git(*arguments: str) -> str:
    try:
        return subprocess.check_output(["git", *arguments], cwd=ROOT, stderr=-3, text=True).strip()
    except (OSError, subprocess.CalledProcessError):  # not a checkout
        return ""

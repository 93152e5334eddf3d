"""Result files: raw measurements, and who has none for which reason. Nothing derived.

``results/<device>/<date>-<commit>.json`` is one run on one machine. Of a device's runs the newest
that has a case counts, so that a short run replaces only what it measured again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import environment, slug
from benchmarks.shapes import DTYPES
from benchmarks.work import WORKS

RESULTS = Path(__file__).parent / "results"
# the lists of a file
KINDS = (
    *("tables", "training", "accuracy", "savings", "backwards", "sharded"),
    *("hosts", "rollouts"),
)
# a list of numbers, which JSON with an indent spreads over as many lines
_NUMBERS = re.compile(r"\[(?:\s+(?:-?\d[-+.\de]*|-?Infinity|NaN),?)+\s+\]")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where and with what a run was made."""

    date: str  # ISO 8601
    commit: str
    modified: bool  # the sources had changes that are not in the commit
    device: str
    kind: str  # "cpu" | "cuda"
    isa: str | None
    threads: int
    memory_gib: float
    python: str
    load_average: float
    versions: dict[str, str | None]

    @property
    def day(self) -> str:
        return self.date[:10]

    @property
    def source(self) -> str:
        """Shorten the commit."""
        return f"{self.commit[:12]}{' + changes' if self.modified else ''}"

    @property
    def where(self) -> str:
        """Name the device, with what makes it that fast."""
        threads = f", {self.threads} thread{'' if self.threads == 1 else 's'}"
        return self.device + (threads if self.kind == "cpu" else "")


@dataclass
class Line:
    """One provider in any table: measurements, or the reason why there are none."""

    provider: str
    note: str
    absent: str | None = None  # what this machine lacks for it
    unable: str | None = None  # why it does not do this work
    failure: str | None = None  # stands in place of what was measured
    errors: dict[str, float] = field(default_factory=dict)  # by output, against the reference

    @property
    def runs(self) -> bool:
        return self.absent is None and self.unable is None and self.failure is None


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    extra: int  # from before the call to its peak, without what it returns
    returned: int  # gradients or log-probabilities that the caller keeps


@dataclass
class Row(Line):
    """The measurement of a case: time, memory, errors."""

    seconds: list[float] = field(default_factory=list)  # a sample for each round
    memory: Memory | None = None
    repeatable: bool | None = None  # a second run gives the same bits
    batch_invariant: bool | None = None  # half of the batch gives its rows the same bits
    alone: bool = False  # measured in a process of its own, not in turn with the others
    schedule: str | None = None  # of ours, which one ran; older files do not say


@dataclass
class AccuracyRow(Line):
    """A row of an accuracy table: the provider's value less the exact one, token by token.

    Without a gradient log-probabilities and entropies, of a loss the rest.
    """

    logprobs: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)  # empty where it has none
    dhidden: list[float] = field(default_factory=list)  # norms of the differences of the rows


@dataclass
class SavingsRow(Line):
    """A row of a savings table, where ``provider`` names a variant of ours."""

    base: str | None = None  # the variant whose time it is measured by
    seconds: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class BackwardsRow(Line):
    """One backward in one work."""

    work: str
    seconds: list[float] = field(default_factory=list)
    memory: Memory | None = None
    entries: list[int] = field(default_factory=list)  # kept of each row; -1: the row is exact


@dataclass
class ShardedRow(Line):
    """One step over several ranks."""

    seconds: list[float] = field(default_factory=list)  # until the last rank is done
    memory: int | None = None  # bytes by which the rank that grows most does
    sent: int | None = None  # bytes that a rank hands to collectives; None: nobody counted


@dataclass
class HostRow(Line):
    """One way to take a step of another trainer."""

    seconds: list[float] = field(default_factory=list)
    memory: int | None = None  # bytes by which a process grows


@dataclass
class TrainingRow(Line):
    """One trainer's optimizer steps."""

    seconds: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)  # seconds by phase
    memory: dict[str, int] | None = None  # peak bytes by phase
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)  # of each step, before clipping


@dataclass(kw_only=True)
class Entry:
    """Anything that a file has a list of."""

    environment: Environment | None = None  # of the run, once it is loaded
    model: str
    tokens: Any
    dtype: str

    def __post_init__(self) -> None:
        for name, known in (("work", WORKS), ("dtype", DTYPES)):
            if (value := getattr(self, name, None)) is not None and value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")

    @property
    def key(self) -> tuple[Any, ...]:
        """Return what two measurements of one thing have in common."""
        return getattr(self, "work", ""), self.model, self.tokens, self.dtype


@dataclass(kw_only=True)
class Table(Entry):
    """All providers in one case."""

    work: str
    tokens: int
    sequences: int
    hidden: int
    vocabulary: int
    softcap: float | None = None
    reference: str  # dtype of what the errors are against
    rows: list[Row]


@dataclass(kw_only=True)
class TrainingTable(Entry):
    """All trainers on one model."""

    tokens: int
    sequences: int
    prompt_tokens: int
    completion_tokens: int
    micro_batches: int
    optimizer: str
    reference: str
    rows: list[TrainingRow]


@dataclass(kw_only=True)
class AccuracyTable(Entry):
    """All providers on one policy's distributions, token by token."""

    work: str = "logprobs-entropy"
    tokens: int
    hidden: int
    vocabulary: int
    softcap: float | None = None
    reference: str
    logprobs: list[float]  # the exact ones
    entropy: list[float]  # likewise, empty for a loss
    dhidden: list[float] = field(default_factory=list)  # norms of the exact rows, of a loss only
    rows: list[AccuracyRow]

    @property
    def of_gradients(self) -> bool:
        return bool(self.dhidden)


@dataclass(kw_only=True)
class SavingsTable(Entry):
    """One op with more or less to do."""

    tokens: int
    hidden: int
    vocabulary: int
    reference: str
    rows: list[SavingsRow]


@dataclass(kw_only=True)
class BackwardsTable(Entry):
    """All backwards on one batch."""

    tokens: int
    hidden: int
    vocabulary: int
    inputs: str  # a name of SPREADS
    reference: str
    logprobs: list[float]  # the exact ones
    entropy: list[float]  # likewise
    rows: list[BackwardsRow]

    @property
    def key(self) -> tuple[Any, ...]:
        return *super().key, self.inputs


@dataclass(kw_only=True)
class ShardedTable(Entry):
    """One step in every wrapping, on as many ranks."""

    work: str
    tokens: int
    hidden: int
    vocabulary: int
    ranks: int
    reference: str
    rows: list[ShardedRow]

    @property
    def key(self) -> tuple[Any, ...]:
        return *super().key, self.ranks


@dataclass(kw_only=True)
class HostTable(Entry):
    """A step of another trainer, with its own head and with ours."""

    host: str  # a distribution
    version: str
    step: str  # whose, and of what
    tokens: int
    rows: list[HostRow]

    @property
    def key(self) -> tuple[Any, ...]:
        return *super().key, self.host, self.step


@dataclass(kw_only=True)
class RolloutsEntry(Entry):
    """Training steps with one engine on one model."""

    engine: str
    note: str
    sent: bool  # weights are sent to it
    sequences: int
    prompt_tokens: int
    completion_tokens: int
    failure: str | None = None
    parameters: int = 0
    weight_bytes: int = 0  # of an update
    tokens: list[float] = field(default_factory=list)  # generated in each step
    seconds: list[float] = field(default_factory=list)  # of each step
    phases: dict[str, list[float]] = field(default_factory=dict)  # seconds of each step by phase

    @property
    def key(self) -> tuple[Any, ...]:
        return self.engine, self.model


@dataclass(kw_only=True)
class Run:
    """One file."""

    environment: Environment
    tables: list[Table] = field(default_factory=list)
    training: list[TrainingTable] = field(default_factory=list)
    accuracy: list[AccuracyTable] = field(default_factory=list)
    savings: list[SavingsTable] = field(default_factory=list)
    backwards: list[BackwardsTable] = field(default_factory=list)
    sharded: list[ShardedTable] = field(default_factory=list)
    hosts: list[HostTable] = field(default_factory=list)
    rollouts: list[RolloutsEntry] = field(default_factory=list)


class Device:
    """The results of a device that count: of every case the newest."""

    tables: list[Table]
    training: list[TrainingTable]
    accuracy: list[AccuracyTable]
    savings: list[SavingsTable]
    backwards: list[BackwardsTable]
    sharded: list[ShardedTable]
    hosts: list[HostTable]
    rollouts: list[RolloutsEntry]

    def __init__(self, slug: str, runs: Iterable[Run]) -> None:
        self.slug, self.runs = slug, sorted(runs, key=lambda run: run.environment.date)
        self.environment = self.runs[-1].environment
        for kind in KINDS:
            newest = {entry.key: entry for run in self.runs for entry in getattr(run, kind)}
            setattr(self, kind, list(newest.values()))


def load(folder: Path = RESULTS) -> dict[str, Device]:
    """Load every device with results in ``folder``, by the name of its own folder."""
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*/????-??-??-*.json")):
        files.setdefault(path.parent.name, []).append(path)
    return {name: Device(name, map(load_run, paths)) for name, paths in files.items()}


def load_run(path: Path) -> Run:
    """Load one file.

    Raises:
        ValueError: it is not as expected, and where.
    """
    import msgspec

    try:
        # not msgspec's decoder, which refuses the NaN of a wrong result
        run = msgspec.convert(json.loads(path.read_text()), Run)
    except (json.JSONDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from None
    for kind in KINDS:
        for entry in getattr(run, kind):
            entry.environment = run.environment
    return run


class Collector:
    """One run's file, written again after every entry so that a kill loses little."""

    def __init__(self, folder: Path, device: str) -> None:
        facts = environment(device)
        self._data: dict[str, Any] = {"environment": facts, **{kind: [] for kind in KINDS}}
        base, name = folder / slug(facts["device"]), f"{facts['date'][:10]}-{facts['commit'][:12]}"
        self.path, count = base / f"{name}.json", 1
        while self.path.exists():  # an earlier run has it
            count += 1
            self.path = base / f"{name}-{count}.json"

    def add(self, kind: str, entry: Entry) -> None:
        """Append to one of the file's lists."""
        data = asdict(entry)
        del data["environment"]
        self._data[kind].append(data)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        text = json.dumps(self._data, indent=1)
        partial.write_text(_NUMBERS.sub(lambda x: f"[{' '.join(x[0][1:-1].split())}]", text) + "\n")
        partial.replace(self.path)

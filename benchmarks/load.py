"""Result files: what they hold, and which of them count.

``results/<device>/<date>-<commit>.json`` is one run on one machine. Of a device's runs the newest
that has a case counts, so that a short run replaces only what it measured again.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from benchmarks.row import AccuracyRow, Row, SavingsRow
from benchmarks.shapes import DTYPES, MODELS
from benchmarks.work import WORKS

RESULTS = Path(__file__).parent / "results"
_FILES = "????-??-??-*.json"


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
        """The commit, short."""
        return f"{self.commit[:12]}{' + changes' if self.modified else ''}"


@dataclass(frozen=True, kw_only=True)
class Table:
    """All providers in one case."""

    work: str
    model: str
    tokens: int
    sequences: int
    hidden: int
    vocabulary: int
    softcap: float | None
    dtype: str
    reference: str  # dtype of what the errors are against
    rows: list[Row]
    environment: Environment  # of the run

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.work, self.model, self.tokens, self.dtype


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """One trainer's optimizer steps."""

    provider: str
    note: str
    absent: str | None = None
    unable: str | None = None
    failure: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    seconds: list[float]
    phases: dict[str, list[float]] = field(default_factory=dict)  # seconds by phase
    memory: dict[str, int] | None = None  # peak bytes by phase
    grad_norm: list[float] = field(default_factory=list)  # of each step, before clipping


@dataclass(frozen=True, kw_only=True)
class TrainingTable:
    """All trainers on one model."""

    model: str
    tokens: int
    dtype: str
    rows: list[TrainingRow]
    facts: dict[str, Any]  # whatever else the file says about it
    environment: Environment

    @property
    def key(self) -> tuple[str, int, str]:
        return self.model, self.tokens, self.dtype


@dataclass(frozen=True, kw_only=True)
class AccuracyTable:
    """All providers on one policy's distributions, token by token."""

    model: str
    tokens: int
    hidden: int
    vocabulary: int
    softcap: float | None
    dtype: str
    reference: str  # dtype of what the errors are against
    logprobs: list[float]  # the exact ones
    entropy: list[float]  # likewise, empty for a loss
    rows: list[AccuracyRow]
    environment: Environment
    work: str = "logprobs-entropy"
    dhidden: list[float] = field(default_factory=list)  # norms of the exact rows, of a loss only

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.work, self.model, self.tokens, self.dtype


@dataclass(frozen=True, kw_only=True)
class SavingsTable:
    """One op with more or less to do."""

    model: str
    tokens: int
    hidden: int
    vocabulary: int
    dtype: str
    reference: str
    rows: list[SavingsRow]
    environment: Environment

    @property
    def key(self) -> tuple[str, int, str]:
        return self.model, self.tokens, self.dtype


@dataclass(frozen=True, kw_only=True)
class RolloutsEntry:
    """Training steps with one engine on one model."""

    engine: str
    note: str
    sent: bool  # weights are sent to it
    model: str
    dtype: str
    sequences: int
    prompt_tokens: int
    completion_tokens: int
    failure: str | None = None
    parameters: int = 0
    weight_bytes: int = 0  # of an update
    tokens: list[float] = field(default_factory=list)  # generated in each step
    seconds: list[float] = field(default_factory=list)  # of each step
    phases: dict[str, list[float]] = field(default_factory=dict)  # seconds of each step by phase
    environment: Environment

    @property
    def key(self) -> tuple[str, str]:
        return self.engine, self.model


@dataclass(frozen=True, kw_only=True)
class Tests:
    """What the test suite gave on the machine."""

    passed: int
    failed: int
    skipped: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One file."""

    environment: Environment
    tables: list[Table]
    training: list[TrainingTable]
    tests: Tests | None
    accuracy: list[AccuracyTable] = field(default_factory=list)
    savings: list[SavingsTable] = field(default_factory=list)
    rollouts: list[RolloutsEntry] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Device:
    """What counts of a device's runs."""

    slug: str
    runs: list[Run]  # oldest first; at least one

    @property
    def environment(self) -> Environment:
        return self.runs[-1].environment

    @property
    def tables(self) -> list[Table]:
        """The newest of each case."""
        return list({table.key: table for run in self.runs for table in run.tables}.values())

    @property
    def training(self) -> list[TrainingTable]:
        return list({table.key: table for run in self.runs for table in run.training}.values())

    @property
    def accuracy(self) -> list[AccuracyTable]:
        return list({table.key: table for run in self.runs for table in run.accuracy}.values())

    @property
    def savings(self) -> list[SavingsTable]:
        return list({table.key: table for run in self.runs for table in run.savings}.values())

    @property
    def rollouts(self) -> list[RolloutsEntry]:
        return list({each.key: each for run in self.runs for each in run.rollouts}.values())

    @property
    def tested(self) -> Run | None:
        """The newest run that knows what the tests gave."""
        return next((run for run in reversed(self.runs) if run.tests), None)


def load(folder: Path = RESULTS) -> dict[str, Device]:
    """Every device with results in ``folder``, by the name of its own folder."""
    devices = {}
    for place in sorted(path for path in folder.glob("*") if path.is_dir()):
        runs = [load_run(path) for path in sorted(place.glob(_FILES))]
        if runs:
            runs.sort(key=lambda run: run.environment.date)
            devices[place.name] = Device(slug=place.name, runs=runs)
    return devices


def load_run(path: Path) -> Run:
    """One file; a ``ValueError`` says what in it is not as expected."""
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from None
    keys = {"environment", "tables", "training", "tests"}
    if not isinstance(data, dict) or not keys <= data.keys():
        got = sorted(data) if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{path}: expected a result file with {sorted(keys)}, got {got}")
    environment = {"environment": data["environment"]}
    tables = [{**table, **environment} for table in data["tables"]]
    training = [{**_with_facts(entry), **environment} for entry in data["training"]]
    accuracy = [{**table, **environment} for table in data.get("accuracy", [])]
    savings = [{**table, **environment} for table in data.get("savings", [])]
    lists = {"tables": tables, "training": training, "accuracy": accuracy, "savings": savings}
    lists["rollouts"] = [{**entry, **environment} for entry in data.get("rollouts", [])]
    run = _build(Run, {**data, **lists}, f"{path}: run")
    for table in run.tables:
        _check_name("work", table.work, WORKS, path)
    for each in (*run.tables, *run.accuracy):
        _check_name("dtype", each.dtype, DTYPES, path)
    for measured in run.accuracy:
        _check_name("work", measured.work, WORKS, path)
        _check_name("model", measured.model, MODELS, path)
        _check_lengths(measured, path)
    return run


def _check_lengths(table: AccuracyTable, path: Path) -> None:
    """A value for every token, or none."""
    second = "dhidden" if WORKS[table.work].kind == "loss" else "entropy"
    exact = {"logprobs": table.logprobs, second: getattr(table, second)}
    for name, values in exact.items():
        if len(values) != table.tokens:
            raise ValueError(f"{path}: {name}: expected {table.tokens} values, got {len(values)}")
    for row in table.rows:
        for values in filter(None, (row.logprobs, row.entropy, row.dhidden)):
            if len(values) != table.tokens:
                raise ValueError(
                    f"{path}: {row.provider}: expected {table.tokens} values, got {len(values)}"
                )


def _check_name(field: str, name: str, known: Collection[str], path: Path) -> None:
    if name not in known:
        raise ValueError(f"{path}: {field}: expected one of {', '.join(known)}, got {name!r}")


def _with_facts(entry: dict[str, Any]) -> dict[str, Any]:
    known = {item.name for item in fields(TrainingTable)}
    return {**entry, "facts": {key: entry[key] for key in entry if key not in known}}


def _build(kind: Any, value: Any, where: str) -> Any:
    """``value``, as JSON gives it, as the type ``kind``."""
    if kind is Any:
        return value
    if get_origin(kind) is UnionType:
        (plain,) = (part for part in get_args(kind) if part is not NoneType)
        return None if value is None else _build(plain, value, where)
    if is_dataclass(kind):
        return _build_dataclass(kind, value, where)
    if get_origin(kind) is list:
        items = _expect(list, value, where)
        return [_build(get_args(kind)[0], x, f"{where}[{i}]") for i, x in enumerate(items)]
    if get_origin(kind) is dict:
        entries = _expect(dict, value, where)
        return {key: _build(get_args(kind)[1], x, f"{where}.{key}") for key, x in entries.items()}
    if kind is float and type(value) is int:
        return float(value)
    return _expect(kind, value, where)


def _build_dataclass(kind: Any, value: Any, where: str) -> Any:
    entries, hints = _expect(dict, value, where), get_type_hints(kind)
    arguments = {}
    for item in fields(kind):
        if item.name in entries:
            path = f"{where}.{item.name}"
            arguments[item.name] = _build(hints[item.name], entries[item.name], path)
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"{where}: expected a field {item.name!r}, got {sorted(entries)}")
    return kind(**arguments)


def _expect(kind: type, value: Any, where: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{where}: expected {kind.__name__}, got {value!r}"[:300])
    return value

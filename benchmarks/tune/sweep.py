"""All entries of the table for one device, measured; and the table that follows from it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.environment import environment
from benchmarks.measure import device_is_lost
from benchmarks.problem import make_problem
from benchmarks.shapes import Case, Model
from benchmarks.timing import make_timer
from benchmarks.tune import chunks
from benchmarks.tune.contest import Candidate, Timer, Trial, choose, gain, hold
from benchmarks.tune.table import Table
from benchmarks.work import WORKS
from grpo_kernels.backends.configs.linear import LINEAR_KERNELS, width_class
from grpo_kernels.backends.configs.rows import ROW_KERNELS, bits, device_class, vocabulary_class

CHUNK = "chunk"
# The head of each vocabulary class that stands for it, the commonest first.
_HEADS = (
    Model("medium", 2048, 151936),
    Model("large", 2560, 262144),
    Model("small", 2048, 32000),
)
# Of the forward without gradient: the hidden size counts, and what happens to a logit.
_LINEAR_HEADS = (
    Model("medium", 2048, 151936),
    Model("medium", 4096, 151936),
    Model("large", 2560, 262144),
    Model("large", 2304, 256000, softcap=30.0),
    Model("large", 4608, 256000, softcap=30.0),
    Model("small", 2048, 32000),
    Model("small", 4096, 32000),
)
_LINEAR_ROWS = 8192
_DTYPES = (torch.float32, torch.bfloat16)  # of the logits
_TOKENS = 16384  # two of the largest chunks


@dataclass(frozen=True)
class Setting:
    """One entry of the table."""

    kernel: str  # one of ROW_KERNELS or LINEAR_KERNELS, or CHUNK
    dtype: torch.dtype  # of the logits
    head: Model

    @property
    def width(self) -> str | None:
        """Class of the hidden size, where it counts."""
        return width_class(self.head.hidden) if self.kernel in LINEAR_KERNELS else None

    def __str__(self) -> str:
        width = f", {self.width}" if self.width else ""
        return f"{self.kernel}, {bits(self.dtype)}-bit logits, {self.head.name} vocabulary{width}"


@dataclass(kw_only=True)
class Entry:
    """What was measured for a setting."""

    kernel: str
    bits: int
    vocabulary: str
    columns: int
    width: str | None = None
    trials: list[Trial] = field(default_factory=list)
    skipped: str | None = None  # why it has no place in the table


def settings() -> list[Setting]:
    """Return the settings, most important first."""
    chosen = []
    for dtype in _DTYPES:
        for head in _LINEAR_HEADS:
            chosen.append(Setting(LINEAR_KERNELS[head.softcap is not None], dtype, head))
        kernels = (*ROW_KERNELS, CHUNK)
        chosen += [Setting(kernel, dtype, head) for head in _HEADS for kernel in kernels]
    return chosen


Maker = Callable[[Setting], list[Candidate]]


def sweep(
    chosen: Sequence[Setting], make: Maker, seconds: Timer, lost: Callable[[], bool], end: float
) -> Iterator[Entry]:
    """Yield a result for every setting; none begins after ``end``, by ``time.monotonic()``."""
    why: str | None = None
    for setting in chosen:
        entry = _entry(setting)
        if why is None and time.monotonic() > end:
            why = "not reached: the time was up"
        if why is None:
            try:
                entry.trials = hold(make(setting), seconds, lost)
                if (failure := entry.trials[0].failure) is not None:
                    entry.skipped = f"the default failed: {failure}"
            except Exception as error:  # of the default; the other settings can still be measured
                entry.skipped = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                if lost():
                    why = f"not reached: the device was lost at {setting}"
        entry.skipped = entry.skipped or why
        print(f"{setting}: {entry.skipped or _outcome(entry)}", flush=True)
        yield entry


def measure() -> tuple[Maker, Timer, Callable[[], bool]]:
    """Return the measuring functions for this machine's GPU."""
    gc.collect()
    gc.freeze()  # the timer collects before each sample: of what is new since then
    return gpu_candidates, make_timer("cuda"), lambda: device_is_lost("cuda")


def gpu_candidates(setting: Setting) -> list[Candidate]:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    if setting.kernel == CHUNK:
        case = Case(setting.head, _TOKENS, "bf16", WORKS["dapo"])
        return chunks.candidates(make_problem(case, "cuda"), chunks.precision_of(setting.dtype))
    from benchmarks.tune import linear, rows  # import Triton

    if setting.kernel in LINEAR_KERNELS:
        precision = chunks.precision_of(setting.dtype)
        forward = linear.make_forward(setting.head, _LINEAR_ROWS, precision, device, torch.bfloat16)
        return linear.candidates(forward, device_class(device))

    columns = setting.head.vocabulary
    count = rows.tile_rows(setting.dtype, columns, torch.cuda.mem_get_info(device)[0])
    return rows.candidates(setting.kernel, rows.make_tile(setting.dtype, columns, device, count))


def facts() -> dict[str, Any]:
    """Return the facts about where the entries come from."""
    device = torch.device("cuda", torch.cuda.current_device())
    return {"device_class": device_class(device), "environment": environment("cuda")}


def updated(table: Table, source: dict[str, Any], entries: Sequence[Entry]) -> Table:
    """Return ``table`` with the entries of one device."""
    made, known = [entry for entry in entries if not entry.skipped], source["environment"]
    versions = {name: str(known["versions"][name]) for name in ("torch", "triton")}
    told = {"device": known["device"], "date": known["date"][:10], "commit": known["commit"][:12]}
    return table.with_device(
        source["device_class"],
        {**told, **versions},
        {
            "row_configs": {
                (e.kernel, e.bits, e.vocabulary): choose(e.trials)
                for e in made
                if e.kernel in ROW_KERNELS
            },
            "linear_configs": {
                (e.kernel, e.bits, e.width, e.vocabulary): choose(e.trials)
                for e in made
                if e.kernel in LINEAR_KERNELS
            },
            "chunk_rows": {
                (e.bits, e.vocabulary): choose(e.trials)[0] for e in made if e.kernel == CHUNK
            },
        },
    )


def _entry(setting: Setting) -> Entry:
    columns = setting.head.vocabulary
    return Entry(
        kernel=setting.kernel,
        bits=bits(setting.dtype),
        vocabulary=vocabulary_class(columns),
        columns=columns,
        width=setting.width,
    )


def _outcome(entry: Entry) -> str:
    chosen, default = choose(entry.trials), entry.trials[0].value
    wrong = [trial for trial in entry.trials if trial.failure]
    text = f"{chosen} is {gain(entry.trials):.2f} times as fast as {default}"
    text = f"{default} stays" if chosen == default else text
    return f"{text}; {len(wrong)} of {len(entry.trials)} failed" if wrong else text

"""All entries of the table for one device, measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.measure import describe
from benchmarks.problem import make_problem
from benchmarks.shapes import Case, Model
from benchmarks.tune import chunks
from benchmarks.tune.contest import Candidate, Timer, Trial, choose, hold
from benchmarks.work import WORKS
from grpo_kernels.backends.configs.linear import LINEAR_KERNELS, width_class
from grpo_kernels.backends.configs.rows import ROW_KERNELS, bits, vocabulary_class

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
_TOKENS = 32768  # two of the largest chunks


@dataclass(frozen=True)
class Setting:
    """One entry of the table."""

    kernel: str  # one of ROW_KERNELS or LINEAR_KERNELS, or CHUNK
    dtype: torch.dtype  # of the logits
    head: Model

    @property
    def part(self) -> str:
        """The dictionary of the table."""
        if self.kernel == CHUNK:
            return "CHUNK_ROWS"
        return "LINEAR_CONFIGS" if self.kernel in LINEAR_KERNELS else "ROW_CONFIGS"

    @property
    def key(self) -> tuple[str | int, ...]:
        """The key in it, without the device."""
        size, vocabulary = bits(self.dtype), vocabulary_class(self.head.vocabulary)
        if self.kernel == CHUNK:
            return size, vocabulary
        width = (width_class(self.head.hidden),) if self.kernel in LINEAR_KERNELS else ()
        return self.kernel, size, *width, vocabulary

    @property
    def precision(self) -> str:
        """What keeps the logits of 16-bit inputs in ``dtype``."""
        return "fp32" if self.dtype == torch.float32 else "input"


@dataclass(kw_only=True)
class Entry:
    """What was measured for a setting."""

    part: str
    key: tuple[str | int, ...]
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


def sweep(
    chosen: Sequence[Setting],
    make: Callable[[Setting], list[Candidate]],
    seconds: Timer,
    lost: Callable[[], bool],
    end: float,
) -> Iterator[Entry]:
    """Yield a result for every setting; none begins after ``end``, by ``time.monotonic()``."""
    why: str | None = None
    for setting in chosen:
        entry = Entry(part=setting.part, key=setting.key)
        if why is None and time.monotonic() > end:
            why = "not reached: the time was up"
        if why is None:
            try:
                entry.trials = hold(make(setting), seconds, lost)
                if (failure := entry.trials[0].failure) is not None:
                    entry.skipped = f"the default failed: {failure}"
            except Exception as error:  # of the default; the other settings can still be measured
                entry.skipped = describe(error)
                if lost():
                    why = f"not reached: the device was lost at {setting.key}"
        entry.skipped = entry.skipped or why
        print(f"{entry.part} {entry.key}: {entry.skipped or choose(entry.trials)}", flush=True)
        yield entry


def gpu_candidates(setting: Setting) -> list[Candidate]:
    """Return the candidates on this machine's GPU."""
    device, head = torch.device("cuda", torch.cuda.current_device()), setting.head
    torch.cuda.empty_cache()
    if setting.kernel == CHUNK:
        problem = make_problem(Case(head, _TOKENS, "bf16", WORKS["dapo"]), "cuda")
        return chunks.candidates(problem, setting.precision)
    from benchmarks.tune import linear, rows  # import Triton

    if setting.kernel in LINEAR_KERNELS:
        return linear.candidates(head, _LINEAR_ROWS, setting.precision, device, torch.bfloat16)
    count = rows.tile_rows(setting.dtype, head.vocabulary, torch.cuda.mem_get_info(device)[0])
    return rows.candidates(setting.kernel, setting.dtype, count, head.vocabulary, device)


def updated(table: dict[str, Any], source: dict[str, Any], entries: Sequence[Entry]) -> Any:
    """Return ``table`` with all entries of one device replaced: what it is holds for each."""
    device, known = source["device_class"], source["environment"]
    versions = {name: str(known["versions"][name]) for name in ("torch", "triton")}
    told = {"device": known["device"], "date": known["date"][:10], "commit": known["commit"][:12]}
    new = {part: {k: v for k, v in old.items() if k[0] != device} for part, old in table.items()}
    new["MEASURED_ON"] = {**table["MEASURED_ON"], device: {**told, **versions}}
    for entry in entries:
        if not entry.skipped:
            value = choose(entry.trials)
            key = (device, *entry.key)
            new[entry.part][key] = value[0] if entry.part == "CHUNK_ROWS" else value
    return new

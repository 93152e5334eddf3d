"""Asks processes: times in one, in turns, and memory in one for each arm."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from benchmarks.child import ask
from benchmarks.hosts.work import NO_HEAD, HostWork
from benchmarks.providers.baselines import lacking
from benchmarks.results import HostRow, HostTable
from benchmarks.training.task import choose

_LONGEST = 1800.0  # seconds
_REQUIRES = ("peft", "transformers", "accelerate", "datasets")


def measure_host(work: HostWork, rounds: int, full: bool) -> HostTable:
    """Measure every arm of a step; their memory too if it is a full one."""
    words, config = ["full" if full else "quick", str(work)], choose("cpu", full)
    absent = lacking(work.host, *_REQUIRES)
    found = {} if absent else _ask(rounds, words)
    rows = []
    for arm in work.arms:
        fields = {"absent": absent} if absent else found if "failure" in found else found[arm]
        row = HostRow(arm, "", **fields)
        if row.runs and full and arm != NO_HEAD:
            row.memory = _ask(1, [*words, arm]).get("memory")
        rows.append(row)
    return HostTable(
        host=work.host,
        version="" if absent else version(work.host),
        step=work.name,
        model=str(config),
        tokens=config.micro_batch * (config.prompt_tokens + config.completion_tokens),
        dtype="fp32",
        rows=rows,
    )


def _ask(rounds: int, words: list[str]) -> dict[str, Any]:
    return ask("benchmarks.hosts.steps", [str(rounds), *words], _LONGEST)

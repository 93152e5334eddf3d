"""What the completions of a run say over its steps: their rewards, and samples of one prompt."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
from pyarrow import parquet

from grpo_trainer.monitor.completions import EVAL_PREFIX

logger = logging.getLogger(__name__)

_FILES = 200  # at most so many are read, evenly over the run
_COLUMNS = 5  # steps beside one another
_PROMPTS = 3
_PER_STEP = 3  # completions of a prompt: the best, the middle one and the worst


class Sample(NamedTuple):
    """A completion with its reward."""

    text: str
    reward: float


class Step(NamedTuple):
    """What one prompt got at one optimizer step, best first."""

    step: int
    samples: list[Sample]


class PromptSamples(NamedTuple):
    """One prompt over the run."""

    prompt: str
    steps: list[Step]


def rewards_by_step(folder: Path) -> tuple[list[int], list[list[float]]]:
    """Return steps, and the rewards of each step's completions; empty without files."""
    found = {}
    for file in _evenly(_files(folder, ""), _FILES):
        rows = _read(file, ["step", "reward"])
        rewards = [row["reward"] for row in rows if _is_number(row["reward"])]
        if rewards:
            found[int(rows[0]["step"])] = rewards
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def prompt_samples(folder: Path) -> list[PromptSamples]:
    """Return the prompts that came back most often, with samples from the first to the last time.

    They are all of evaluations, whose prompts are always the same, or all of training.
    """
    sources = []
    for prefix in (EVAL_PREFIX, ""):
        prompts = _by_prompt(_evenly(_files(folder, prefix), _FILES))
        often = sorted(prompts, key=lambda prompt: -len(prompts[prompt]))[:_PROMPTS]
        sources.append([_samples(prompt, prompts[prompt]) for prompt in often])
    return max(sources, key=lambda chosen: len(chosen[0].steps) if chosen else 0)


def _by_prompt(files: list[Path]) -> dict[str, dict[int, list[Sample]]]:
    prompts: dict[str, dict[int, list[Sample]]] = {}
    for row in _rows(files):
        reward = row["reward"] if _is_number(row["reward"]) else math.nan
        steps = prompts.setdefault(row["prompt"], {})
        steps.setdefault(int(row["step"]), []).append(Sample(row["completion"], reward))
    return prompts


def _samples(prompt: str, steps: dict[int, list[Sample]]) -> PromptSamples:
    chosen = []
    for step in _evenly(sorted(steps), _COLUMNS):
        ranked = sorted(steps[step], key=_rank)
        chosen.append(Step(step, _evenly(ranked, _PER_STEP)))
    return PromptSamples(prompt, chosen)


def _rank(sample: Sample) -> tuple[float, str]:
    return (math.inf if math.isnan(sample.reward) else -sample.reward, sample.text)


def _rows(files: list[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        yield from _read(file, ["step", "prompt", "completion", "reward"])


def _read(file: Path, columns: list[str]) -> list[dict[str, Any]]:
    """Read the rows; none of a damaged file: a run may have been killed while it wrote it."""
    try:
        return parquet.read_table(file, columns=columns).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        _warn(f"{file} cannot be read, so the report is without it: {error}")
        return []


@functools.cache  # the report is written again and again
def _warn(message: str) -> None:
    logger.warning("%s", message)


def _files(folder: Path, prefix: str) -> list[Path]:
    return sorted((folder / "completions").glob(f"{prefix}completions_*.parquet"))


def _evenly(items: list[Any], count: int) -> list[Any]:
    """Return at most ``count`` of them, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)

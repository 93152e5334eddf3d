"""What the completions of a run say over its steps: their rewards, and samples of one prompt."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from grpo_trainer.monitor import EVAL_PREFIX, IMAGES

logger = logging.getLogger(__name__)

_FILES = 200  # at most so many are read, evenly over the run
_COLUMNS = 5  # steps beside one another
_PROMPTS = 3
_PER_STEP = 3  # completions of a prompt: the best, the middle one and the worst


PromptContent = tuple[str, tuple[str, ...]]  # the text, and data URLs of its images
ScoredText = tuple[str, float]  # a completion and its reward, NaN if it has none
Steps = dict[int, list[ScoredText]]  # completions of one prompt, by optimizer step


def rewards_by_step(folder: Path) -> dict[int, list[float]]:
    """Return the rewards of each step's completions; empty without files."""
    rewards: dict[int, list[float]] = {}
    for row in _rows(folder, "", ["step", "reward"]):
        if not math.isnan(row["reward"]):
            rewards.setdefault(int(row["step"]), []).append(row["reward"])
    return dict(sorted(rewards.items()))


def prompt_samples(folder: Path) -> dict[PromptContent, Steps]:
    """Return the prompts that came back most often, with samples from the first to the last time.

    They are all of evaluations, whose prompts are always the same, or all of training. Of a step
    the samples come best first.
    """
    sources = []
    for prefix in (EVAL_PREFIX, ""):
        prompts: dict[PromptContent, Steps] = {}
        for row in _rows(folder, prefix, ["step", "prompt", IMAGES, "completion", "reward"]):
            steps = prompts.setdefault((row["prompt"], tuple(row.get(IMAGES) or ())), {})
            steps.setdefault(int(row["step"]), []).append((row["completion"], row["reward"]))
        most_frequent = sorted(prompts, key=lambda prompt: -len(prompts[prompt]))[:_PROMPTS]
        sources.append({prompt: _samples(prompts[prompt]) for prompt in most_frequent})
    return max(sources, key=lambda source: max(map(len, source.values()), default=0))


def _samples(steps: Steps) -> Steps:
    def rank(sample: ScoredText) -> tuple[float, str]:
        text, reward = sample
        return (math.inf if math.isnan(reward) else -reward, text)

    return {
        step: _evenly(sorted(steps[step], key=rank), _PER_STEP)
        for step in _evenly(sorted(steps), _COLUMNS)
    }


def _rows(folder: Path, prefix: str, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Read rows of the files of training, or of evaluation, images where there are any.

    None are of a damaged file: a run may have been killed while it wrote it.
    """
    files = sorted((folder / "completions").glob(f"{prefix}completions_*.parquet"))
    for file in _evenly(files, _FILES):
        try:
            missing = {IMAGES}.difference(parquet.read_schema(file).names)
            present = [name for name in columns if name not in missing]
            rows = parquet.read_table(file, columns=present).to_pylist()
        except (pyarrow.ArrowException, OSError) as error:
            _warn(f"{file} cannot be read, so the report is without it: {error}")
            continue
        for row in rows:
            value = row["reward"]
            is_number = isinstance(value, int | float) and math.isfinite(value)
            yield row | {"reward": value if is_number else math.nan}


@functools.cache  # the report is written again and again
def _warn(message: str) -> None:
    logger.warning("%s", message)


def _evenly(items: list[Any], count: int) -> list[Any]:
    """Return at most ``count`` of them, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]

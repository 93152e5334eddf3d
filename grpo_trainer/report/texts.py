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

from grpo_trainer.monitor import EVAL_PREFIX, IMAGES

logger = logging.getLogger(__name__)

_FILES = 200  # at most so many are read, evenly over the run
_COLUMNS = 5  # steps beside one another
_PROMPTS = 3
_PER_STEP = 3  # completions of a prompt: the best, the middle one and the worst


class Sample(NamedTuple):
    """A completion with its reward."""

    text: str
    reward: float  # NaN: it has none


class Asked(NamedTuple):
    """A prompt as it is shown."""

    text: str
    images: tuple[str, ...] = ()  # data URLs


Steps = dict[int, list[Sample]]  # what one prompt got, by optimizer step


def rewards_by_step(folder: Path) -> dict[int, list[float]]:
    """Return the rewards of each step's completions; empty without files."""
    rewards: dict[int, list[float]] = {}
    for row in _rows(folder, "", ["step", "reward"]):
        if not math.isnan(row["reward"]):
            rewards.setdefault(int(row["step"]), []).append(row["reward"])
    return dict(sorted(rewards.items()))


def prompt_samples(folder: Path) -> dict[Asked, Steps]:
    """Return the prompts that came back most often, with samples from the first to the last time.

    They are all of evaluations, whose prompts are always the same, or all of training. Of a step
    the samples come best first.
    """
    sources = []
    for prefix in (EVAL_PREFIX, ""):
        prompts: dict[Asked, Steps] = {}
        for row in _rows(folder, prefix, ["step", "prompt", IMAGES, "completion", "reward"]):
            steps = prompts.setdefault(Asked(row["prompt"], tuple(row.get(IMAGES) or ())), {})
            steps.setdefault(int(row["step"]), []).append(Sample(row["completion"], row["reward"]))
        often = sorted(prompts, key=lambda prompt: -len(prompts[prompt]))[:_PROMPTS]
        sources.append({prompt: _samples(prompts[prompt]) for prompt in often})
    return max(sources, key=lambda chosen: max(map(len, chosen.values()), default=0))


def _samples(steps: Steps) -> Steps:
    def rank(sample: Sample) -> tuple[float, str]:
        return (math.inf if math.isnan(sample.reward) else -sample.reward, sample.text)

    chosen = _evenly(sorted(steps), _COLUMNS)
    return {step: _evenly(sorted(steps[step], key=rank), _PER_STEP) for step in chosen}


def _rows(folder: Path, prefix: str, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Read rows of the files of training, or of evaluation, images where there are any.

    None are of a damaged file: a run may have been killed while it wrote it.
    """
    files = sorted((folder / "completions").glob(f"{prefix}completions_*.parquet"))
    for file in _evenly(files, _FILES):
        try:
            left_out = {IMAGES}.difference(parquet.read_schema(file).names)
            present = [name for name in columns if name not in left_out]
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

"""What the completions of a run say over its steps: their rewards, and samples of one prompt."""

from __future__ import annotations

import functools
import logging
import math
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
    reward: float


class Asked(NamedTuple):
    """A prompt as it is shown."""

    text: str
    images: tuple[str, ...] = ()  # data URLs


Steps = dict[int, list[Sample]]  # what one prompt got, by optimizer step


def rewards_by_step(folder: Path) -> dict[int, list[float]]:
    """Return the rewards of each step's completions; empty without files."""
    found = {}
    for file in _evenly(_files(folder, ""), _FILES):
        rows = _read(file, ["step", "reward"])
        rewards = [row["reward"] for row in rows if _is_number(row["reward"])]
        if rewards:
            found[int(rows[0]["step"])] = rewards
    return dict(sorted(found.items()))


def prompt_samples(folder: Path) -> dict[Asked, Steps]:
    """Return the prompts that came back most often, with samples from the first to the last time.

    They are all of evaluations, whose prompts are always the same, or all of training.
    """
    sources = []
    for prefix in (EVAL_PREFIX, ""):
        prompts = _by_prompt(_evenly(_files(folder, prefix), _FILES))
        often = sorted(prompts, key=lambda prompt: -len(prompts[prompt]))[:_PROMPTS]
        sources.append({prompt: _samples(prompts[prompt]) for prompt in often})
    return max(sources, key=lambda chosen: max(map(len, chosen.values()), default=0))


def _by_prompt(files: list[Path]) -> dict[Asked, Steps]:
    prompts: dict[Asked, Steps] = {}
    for file in files:
        for row in _read(file, ["step", "prompt", IMAGES, "completion", "reward"]):
            reward = row["reward"] if _is_number(row["reward"]) else math.nan
            asked = Asked(row["prompt"], tuple(row.get(IMAGES) or ()))
            steps = prompts.setdefault(asked, {})
            steps.setdefault(int(row["step"]), []).append(Sample(row["completion"], reward))
    return prompts


def _samples(steps: Steps) -> Steps:
    """Return some of the steps and of their completions, best first."""
    return {
        step: _evenly(sorted(steps[step], key=_rank), _PER_STEP)
        for step in _evenly(sorted(steps), _COLUMNS)
    }


def _rank(sample: Sample) -> tuple[float, str]:
    return (math.inf if math.isnan(sample.reward) else -sample.reward, sample.text)


def _read(file: Path, columns: list[str]) -> list[dict[str, Any]]:
    """Read the rows, images where there are any; none of a damaged file: a run may have been
    killed while it wrote it."""
    try:
        left_out = {IMAGES}.difference(parquet.read_schema(file).names)
        known = [name for name in columns if name not in left_out]
        return parquet.read_table(file, columns=known).to_pylist()
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

"""The completions behind the numbers: printed and written to parquet when metrics are logged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset

from grpo_trainer.scored import Rollout

_SHOWN_CHARACTERS = 200


class CompletionLog:
    """Collects rows of (prompt, completion, reward, advantage) between two log calls."""

    def __init__(self, folder: Path, to_print: int | None, unique_prompts: bool = False) -> None:
        self._folder = folder
        self._to_print = to_print
        self._unique_prompts = unique_prompts
        self._rows: list[dict[str, Any]] = []

    def add(
        self, rollouts: Sequence[Rollout], rewards: list[float], advantages: list[float]
    ) -> None:
        for rollout, reward, advantage in zip(rollouts, rewards, advantages, strict=True):
            row: dict[str, Any] = {
                "prompt": _text(rollout.prompt),
                "completion": _text(rollout.completion),
            }
            row |= {"reward": reward, "advantage": advantage}
            self._rows.append(row | (rollout.extra or {}))

    def state(self) -> list[dict[str, Any]]:
        """The rows that are not written yet."""
        return list(self._rows)

    def restore(self, state: list[dict[str, Any]]) -> None:
        self._rows = list(state)

    def flush(self, step: int, is_main_process: bool) -> None:
        """Called by all processes; the main one prints and writes."""
        rows = gather_object(self._rows)
        self._rows = []
        if not is_main_process or not rows:
            return
        if self._unique_prompts:  # the first completion of each
            rows = list({row["prompt"]: row for row in reversed(rows)}.values())[::-1]
        for row in rows[: self._to_print]:
            print(
                f"step {step}  reward {row['reward']:.3f}  advantage {row['advantage']:+.3f}  "
                f"{_short(row['prompt'])!r} -> {_short(row['completion'])!r}"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"completions_{step:05d}.parquet"
        names = dict.fromkeys(name for row in rows for name in row)  # processes may differ
        columns = {name: [row.get(name) for row in rows] for name in names}
        Dataset.from_dict(columns | {"step": [step] * len(rows)}).to_parquet(path)


def _text(value: str | list[dict[str, Any]]) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(f"{message['role']}: {message['content']}" for message in value)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."

"""The completions behind the numbers: printed and written to parquet when metrics are logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from datasets import Dataset

_SHOWN_CHARACTERS = 200


class CompletionLog:
    """Collects rows of (prompt, completion, reward, advantage) between two log calls."""

    def __init__(self, folder: Path, to_print: int | None) -> None:
        self._folder = folder
        self._to_print = to_print
        self._rows: list[dict[str, Any]] = []

    def add(
        self,
        prompts: list[Any],
        completions: list[Any],
        rewards: list[float],
        advantages: list[float],
    ) -> None:
        for prompt, completion, reward, advantage in zip(
            prompts, completions, rewards, advantages, strict=True
        ):
            row = {"prompt": _text(prompt), "completion": _text(completion)}
            self._rows.append(row | {"reward": reward, "advantage": advantage})

    def flush(self, step: int, is_main_process: bool) -> None:
        """Called by all processes; the main one prints and writes."""
        rows = gather_object(self._rows)
        self._rows = []
        if not is_main_process or not rows:
            return
        for row in rows[: self._to_print]:
            print(
                f"step {step}  reward {row['reward']:.3f}  advantage {row['advantage']:+.3f}  "
                f"{_short(row['prompt'])!r} -> {_short(row['completion'])!r}"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"completions_{step:05d}.parquet"
        Dataset.from_list([row | {"step": step} for row in rows]).to_parquet(path)


def _text(value: str | list[dict[str, Any]]) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(f"{message['role']}: {message['content']}" for message in value)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."

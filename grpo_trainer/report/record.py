"""What a report is made from: a run's settings, its log and where its completions lie."""

from __future__ import annotations

import json
import math
import re
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from grpo_trainer.common import whole
from grpo_trainer.monitor import environment

RECORD_NAME = "run.json"  # in the run's folder
REPORT_NAME = "report.html"

History = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run.

    Args:
        name: how it is called beside others.
        history: what the trainer logged, ``state.log_history``.
        settings: every argument.
        changed: the names of those that are not at their defaults.
        recipe: model, rewards, dataset and so on, by name.
        environment: device and versions.
        folder: of the run, where its completions lie.
    """

    name: str
    history: History
    settings: dict[str, Any] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path = Path()

    @classmethod
    def of(cls, trainer: Trainer) -> RunRecord:
        """Return the run of ``trainer`` as it is now."""
        args, folder = trainer.args, Path(trainer.args.output_dir)
        defaults = {item.name: item.default for item in fields(args)}
        return cls(
            name=args.run_name or folder.resolve().name,
            history=trainer.state.log_history,
            settings=args.to_dict(),  # without tokens and passwords
            changed=[name for name in defaults if _differs(getattr(args, name), defaults[name])],
            recipe=asdict(trainer.recipe),
            environment=environment(args.device),
            folder=folder,
        )

    def save(self) -> None:
        """Write ``run.json`` into the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = jsonable(vars(self) | {"folder": None})
        with whole(self.folder / RECORD_NAME) as path:
            path.write_text(json.dumps(content, indent=1) + "\n")


def load_run(folder: Path) -> RunRecord:
    """Return the run in ``folder``: by its ``run.json``, else by the trainer's state alone.

    Raises:
        ValueError: there is neither, or it cannot be read.
    """
    record = folder / RECORD_NAME
    path = record if record.is_file() else _trainer_state(folder)
    if path is None:
        raise ValueError(
            f"report: expected the folder of a run, with {RECORD_NAME} or {TRAINER_STATE_NAME}, "
            f"got {str(folder)!r}"
        )
    try:
        content = json.loads(path.read_text())
        if path == record:
            return RunRecord(**(content | {"folder": folder}))
        return RunRecord(name=folder.resolve().name, history=content["log_history"], folder=folder)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"report: {path} is not the record of a run: {error}") from error


def jsonable(value: Any) -> Any:
    """Return ``value`` as JSON can hold it: NaN and infinities as None, other objects as text."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | None) else str(value)


def _differs(value: Any, default: Any) -> bool:
    """Return whether somebody set it: TrainingArguments fills some of its defaults in itself."""
    if default in (MISSING, None, "", "none"):
        return bool(value) and isinstance(value, str | int | float | list | dict)
    return value != default


def _trainer_state(folder: Path) -> Path | None:
    """Return the newest: a run leaves one at its end, and one in each checkpoint."""
    if (folder / TRAINER_STATE_NAME).is_file():
        return folder / TRAINER_STATE_NAME
    steps = {
        int(match[1]): path
        for path in folder.glob(f"checkpoint-*/{TRAINER_STATE_NAME}")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.parent.name))
    }
    return steps[max(steps)] if steps else None

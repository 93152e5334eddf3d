"""Keeps a run's record and report up to date."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from grpo_trainer.common import unfailing
from grpo_trainer.monitor.recipe import environment
from grpo_trainer.monitor.report.command import write_report
from grpo_trainer.monitor.report.record import REPORT_NAME, RunRecord, jsonable


class ReportWriter(TrainerCallback):
    """Writes ``run.json`` and ``report.html`` with every checkpoint and at the end.

    Without plotly it writes the former alone and says once how to get the latter. Nothing that goes
    wrong ends the run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._write(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._write(args, state)

    def _write(self, args: TrainingArguments, state: TrainerState) -> None:
        if not state.is_world_process_zero or not state.log_history:
            return
        with unfailing(f"report of {args.output_dir}"):
            record = record_of(self._trainer)
            record.save()
            write_report([record.folder], record.folder / REPORT_NAME)


def record_of(trainer: Trainer) -> RunRecord:
    """Return the run of ``trainer`` as it is now."""
    args, folder = trainer.args, Path(trainer.args.output_dir)
    settings = jsonable(args.to_dict())  # without tokens and passwords
    defaults = {item.name: item.default for item in dataclasses.fields(args)}
    return RunRecord(
        name=args.run_name or folder.resolve().name,
        history=jsonable(trainer.state.log_history),
        settings=settings,
        changed=[n for n in settings if n in defaults and _differs(getattr(args, n), defaults[n])],
        recipe=jsonable(dataclasses.asdict(trainer.recipe)),
        environment=environment(args.device),
        folder=folder,
    )


def _differs(value: Any, default: Any) -> bool:
    """Return whether somebody set it: TrainingArguments fills some of its defaults in itself."""
    if default in (dataclasses.MISSING, None, "", "none"):
        return bool(value) and isinstance(value, str | int | float | list | dict)
    return value != default
